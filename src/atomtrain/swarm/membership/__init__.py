"""Who is in a run, what each says of itself, and who averages with whom and when.

Stands on `transport` and `anchors`. Begin with `records.py` and `roster.py`; `config.py` says what
a run tells every newcomer.
"""

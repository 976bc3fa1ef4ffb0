"""Published weights in few bits, made wide while they are read.

Stands on `models`. Begin with `files.py`; the other modules have one way each in which such weights
are published.
"""

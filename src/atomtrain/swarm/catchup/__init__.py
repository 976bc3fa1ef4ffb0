"""How a peer gets what it lacks: the way into a run, its manifest, and anchors from donors.

Stands on `rounds`. Begin with `joining.py` and `repair.py`.
"""

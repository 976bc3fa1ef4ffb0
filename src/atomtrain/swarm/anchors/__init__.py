"""What the swarm last agreed on, fragment by fragment, and what the trainer sees of it.

Stands on `codecs`. Begin with `anchors.py`.
"""

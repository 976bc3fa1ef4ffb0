"""A round of averaging against hivemind and the link. Begin with `averaging.py`."""

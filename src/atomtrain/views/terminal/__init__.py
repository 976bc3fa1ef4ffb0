"""The terminal view of a run. Begin with `terminal.py`."""

"""A run followed from its event files: as a web page, and in a terminal. Begin with `source.py`."""

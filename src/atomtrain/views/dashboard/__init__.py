"""The web page of a run, from event files. Begin with `server.py`."""

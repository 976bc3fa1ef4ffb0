"""Runs as live display, lines and pictures, from their events. Begin with `display.py`."""

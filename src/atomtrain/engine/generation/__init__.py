"""Generates text with a model that the device need not hold; begin at `generating.py`."""

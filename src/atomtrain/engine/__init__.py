"""Swapped training: streams a model, segment by segment, through a device.

Imports `planning`, `analysis` and the base; needs torch and numpy only. Begin with `api.py`, which
opens an engine, then `engine.py`; the rooms below are devices, state, updates, execution and
calibration.
"""

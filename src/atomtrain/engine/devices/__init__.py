"""Devices and their streams: CUDA, the processor, and one that is emulated.

Stands on nothing else of the engine. Begin with `device.py`, what the executor asks of a device.
"""

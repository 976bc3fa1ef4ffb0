"""Devices and their streams: GPUs, the processor, and one that is emulated.

Stands on nothing else of the engine. Begin with `device.py`, what the executor asks of a device.
What a GPU asks of its maker's module is in `vendor.py`.
"""

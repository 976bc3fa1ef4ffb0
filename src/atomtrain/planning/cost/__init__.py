"""What a plan takes: bytes on device, host and disk, and seconds on every stream.

Stands on `plan`. Begin with `timeline.py` (time) and `memory.py` (bytes).
"""

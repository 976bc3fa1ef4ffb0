"""What each layer costs: bytes and FLOPs on fake tensors, seconds from a short profile.

Stands on `layers`. Begin with `costs.py`; `saved.py` says what waits for backward.
"""

"""When and how blocks are updated: gradients are tracked, clipped, and handed to the optimizer.

Stands on `state` and `devices`. Begin with `updates.py`.
"""

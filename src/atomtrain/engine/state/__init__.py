"""What lies on the host and on disk: parameters, gradients, optimizer state, and their types.

Stands on `devices`. Begin with `store.py`.
"""

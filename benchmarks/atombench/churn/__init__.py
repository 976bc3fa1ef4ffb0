"""Peers that are killed and replaced while they train. Begin with `churn.py`."""

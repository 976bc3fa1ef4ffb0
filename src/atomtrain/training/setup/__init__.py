"""Puts a peer together: text, model, engine and objective; from new, a checkpoint, or a swarm.

Stands on `config`. Begin with `setup.py`.
"""

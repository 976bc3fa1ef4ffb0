"""Whole swarms in one process, on a virtual clock: real services, a network in memory.

Stands on `atomtrain.swarm`. Benchmarks and tests make swarms of these; begin with `swarm.py`.
"""

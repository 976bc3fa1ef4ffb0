"""Between engine and swarm: what of the host's memory is averaged, and when.

Stands on `config`. Begin with `peering.py`.
"""

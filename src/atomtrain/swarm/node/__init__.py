"""A peer's network side as a whole: its tasks on one event loop.

Stands on all other rooms of the swarm. Begin with `service.py`; `entering.py` puts it together and
starts it.
"""

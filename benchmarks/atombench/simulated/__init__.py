"""Many links and peers, simulated. Begin with `simulation.py`."""

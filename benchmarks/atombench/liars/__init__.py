"""What liars do to a swarm: begin with `liars.py`, the benchmark; they are in `misdeeds.py`."""

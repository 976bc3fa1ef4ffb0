"""The loop that joins swapping, swarm, data and checkpoints; displays and pictures of it."""

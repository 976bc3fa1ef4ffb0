"""ATOM against pipelines on links from fast to slow. Begin with `network.py`."""

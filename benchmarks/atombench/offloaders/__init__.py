"""ATOM against DeepSpeed and FSDP2. Begin with `offloaders.py`."""

"""Writes down a model's operations without data: one flat graph with named tensors.

Imports nothing of ATOM but the base. Begin with `export.py`; of equal modules `stand_ins.py` traces
one and copies it for the others.
"""

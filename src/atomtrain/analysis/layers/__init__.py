"""Makes a model a chain of layers that pass named values to each other.

Stands on `export`. Begin with `chain.py`, which says what a chain is, then `trace.py`, which finds
the one of a model.
"""

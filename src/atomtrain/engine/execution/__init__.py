"""Runs a step: segments come to slots, compute for all micro-batches, and go.

Stands on `updates`, `state` and `devices`. Begin with `executor.py`; the table at the top of
`slots.py` names who waits for whom.
"""

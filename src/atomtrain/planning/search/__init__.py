"""Finds the plan to train with.

Stands on `plan` and `cost`. Begin with `search.py`; docs/planning.md has the argument.
"""

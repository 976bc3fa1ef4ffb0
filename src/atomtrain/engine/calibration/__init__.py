"""Measures this machine and a model's layers on it, for the planner.

Stands on `execution` and all below it. Begin with `profiling.py`.
"""

"""Measurements of the engine, its planner and its optimizers."""

"""What a plan says, and the tables that follow from it alone: places, schedule, staging.

Stands on `analysis.layers`. Begin with `plan.py` and `shape.py`.
"""

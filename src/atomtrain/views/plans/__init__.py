"""Plans as tables, pictures and traces. Begin with `report.py`."""

"""Shaped links between network namespaces, and processes at their ends."""

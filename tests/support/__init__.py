"""What tests share: models, peers, processes, and patience."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the project."""

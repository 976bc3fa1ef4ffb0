"""Names of the files in a peer's folder."""

from __future__ import annotations

EVENTS_FILE = "events.jsonl"
"""Everything that happened."""
SWARM_FILE = "swarm.json"
"""What this peer knows of the others at present; replaced as a whole."""
PICTURE_FILE = "loss.png"
RECIPE_FILE = "recipe.yaml"
"""The options that the peer was last started with."""

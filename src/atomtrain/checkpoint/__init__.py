"""Checkpoints that survive a crash at any moment: one safetensors file a shard, checksummed.

A run keeps them in one folder, one directory each (`step-00000100/`). A checkpoint appears under
its name only when every byte of it is on disk, and the one before is removed only after that, so
whatever kills the writer, a loadable checkpoint is left.
"""

from __future__ import annotations

from atomtrain.checkpoint.reader import FORMAT_VERSION, Checkpoint, load_latest, open_checkpoint
from atomtrain.checkpoint.writer import save

__all__ = ["FORMAT_VERSION", "Checkpoint", "load_latest", "open_checkpoint", "save"]

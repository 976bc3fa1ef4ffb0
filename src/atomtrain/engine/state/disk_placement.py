"""A disk below host memory: the space that a plan takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.disk_file import DiskFile
from atomtrain.planning.plan.disk import DiskUse, OnDisk, States, disk_use
from atomtrain.planning.plan.layout import Layout


class Placement(NamedTuple):
    """Where state lies that is on disk."""

    file: DiskFile
    use: DiskUse
    states: States


class DiskTraffic(NamedTuple):
    """What went to and from the disk since the engine was opened."""

    read_bytes: int
    written_bytes: int
    direct: bool
    """Whether it went past the page cache; some file systems refuse that."""


def placed(
    folder: Path, chain: Chain, layout: Layout, states: States, on_disk: OnDisk
) -> Placement:
    """Take the space that a choice needs.

    Raises:
        DiskError: the folder cannot be used, or has too little space.
    """
    use = disk_use(chain, layout, states, on_disk)
    return Placement(DiskFile(folder, use.file_bytes), use, states)

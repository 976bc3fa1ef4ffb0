"""A disk below host memory: what the planner learns of it, and the space that a plan takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from atomtrain.analysis.chain import Chain
from atomtrain.planning.disk import DiskUse, OnDisk, States, disk_use
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.swapping.disk_file import DiskFile
from atomtrain.swapping.disk_profile import disk_rates
from atomtrain.swapping.options import Options
from atomtrain.units import parse_bytes


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


def machine_with_disk(machine: Machine, options: Options) -> Machine:
    """Return the machine with the host memory that may be used, and the rates of the disk.

    Raises:
        DiskError: the folder cannot be used.
    """
    if options.host_memory is not None:
        n_bytes = parse_bytes(options.host_memory, "host memory")
        machine = dataclasses.replace(machine, host_memory_bytes=n_bytes)
    if options.disk is None:
        return machine
    return disk_rates(Path(options.disk), measure=options.profile).of(machine)


def placed(
    folder: Path, chain: Chain, layout: Layout, states: States, on_disk: OnDisk
) -> Placement:
    """Take the space that a choice needs.

    Raises:
        DiskError: the folder cannot be used, or has too little space.
    """
    use = disk_use(chain, layout, states, on_disk)
    return Placement(DiskFile(folder, use.file_bytes), use, states)

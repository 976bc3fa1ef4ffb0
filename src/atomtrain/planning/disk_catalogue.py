"""Disks of the catalogue: what data sheets say of sequential reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atomtrain.planning.catalogue import Source, catalogue_section, named, source_named
from atomtrain.planning.plan.machine import Machine

ASSUMED_DISK = "nvme-pcie3"
"""Where nobody measured a disk."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Data-sheet figures of one disk."""

    name: str
    """As `atom plan --disk` takes it."""
    title: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    source: Source

    @property
    def both_ways_share(self) -> float:
        """What reads and writes keep of their rates, if the disk does one of both at a time."""
        return self.read_bytes_per_s / (self.read_bytes_per_s + self.write_bytes_per_s)

    def of(self, machine: Machine) -> Machine:
        """Return a machine with this disk."""
        return dataclasses.replace(
            machine,
            name=f"{machine.name}, {self.title}",
            storage_read_bytes_per_s=self.read_bytes_per_s,
            storage_write_bytes_per_s=self.write_bytes_per_s,
            storage_both_ways_share=self.both_ways_share,
        )


def disk(name: str) -> Disk:
    """Return a disk by name.

    Raises:
        ConfigError: it is not in the catalogue; offers the nearest name.
    """
    return named(DISKS, "disk", "Disks", name)


def _disk(name: str, entry: Mapping[str, Any]) -> Disk:
    return Disk(
        name=name,
        title=entry["title"],
        read_bytes_per_s=1e6 * entry["read_mb_per_s"],
        write_bytes_per_s=1e6 * entry["write_mb_per_s"],
        source=source_named(entry["source"]),
    )


DISKS: Mapping[str, Disk] = {
    name: _disk(name, entry) for name, entry in catalogue_section("disks").items()
}
"""The catalogue by the names that `--disk` takes."""

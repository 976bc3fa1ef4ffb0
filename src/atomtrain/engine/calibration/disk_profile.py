"""What a disk does, measured through the very reads and writes of training, and remembered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from atomtrain.engine.calibration.probes import timed
from atomtrain.engine.calibration.profile_cache import KEPT_S, profile_folder
from atomtrain.engine.devices.disk_file import DiskFile
from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.errors import DiskError
from atomtrain.files import replacing
from atomtrain.planning.catalogue import ASSUMED_DISK, disk
from atomtrain.planning.plan.machine import Machine

_VERSION = 1
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 64 << 20
_ENOUGH_S = 0.15
"""How long a measured read or write should take."""
_REPEATS = 3
_logger = logging.getLogger(__name__)


class DiskRates(NamedTuple):
    """Sequential rates of a disk."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_ways_share: float
    """What each keeps while the disk reads and writes at once."""
    direct: bool = True
    """Whether its file system lets reads and writes go past the page cache."""

    def of(self, machine: Machine) -> Machine:
        """Return a machine with this disk."""
        return dataclasses.replace(
            machine,
            storage_read_bytes_per_s=self.read_bytes_per_s,
            storage_write_bytes_per_s=self.write_bytes_per_s,
            storage_both_ways_share=self.both_ways_share,
        )


def disk_rates(
    folder: Path, *, measure: bool | Literal["again"] = True, cache: Path | None = None
) -> DiskRates:
    """Return the rates of a folder's disk; a second or two the first time, then from the cache.

    Args:
        folder: Where state will lie.
        measure: `"again"` forgets what the cache has. If `False`, they are those of a usual disk
            of the catalogue.
        cache: Folder of the cache; `None` is the user's.

    Raises:
        DiskError: the folder cannot be used, or its disk has no room for the measurement.
    """
    if not measure:
        known = disk(ASSUMED_DISK)
        return DiskRates(known.read_bytes_per_s, known.write_bytes_per_s, known.both_ways_share)
    path = (cache or profile_folder()) / f"disk-{_key(folder)}.json"
    found = None if measure == "again" else _remembered(path)
    if found is None:
        found = measured_rates(folder)
        _remember(path, found)
    return found


def measured_rates(folder: Path) -> DiskRates:
    """Measure reads, writes, and both at once.

    Raises:
        DiskError: the folder cannot be used, or its disk is full or failed.
    """
    file = DiskFile(folder, 2 * _MOST_BYTES)
    try:
        here, there = (aligned_empty(_MOST_BYTES) for _ in range(2))
        # Not zeros: some disks compress. The default generator is the user's.
        here.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))

        def write(n_bytes: int, offset: int = 0) -> None:
            file.write(offset, here[:n_bytes])
            file.settle()

        def read(n_bytes: int) -> None:
            file.read(0, there[:n_bytes])

        # Space that was never written to is slower the first time.
        write(_LEAST_BYTES)
        write_s = timed(lambda: write(_LEAST_BYTES))
        share = max(1.0, min(_MOST_BYTES / _LEAST_BYTES, _ENOUGH_S / write_s))
        n_bytes = int(share) * _LEAST_BYTES
        write(n_bytes)
        write(n_bytes, _MOST_BYTES)
        write_s = _median(lambda: write(n_bytes))
        read_s = _median(lambda: read(n_bytes))
        both_s = _median(
            lambda: _together(lambda: read(n_bytes), lambda: write(n_bytes, _MOST_BYTES))
        )
        return DiskRates(
            n_bytes / read_s,
            n_bytes / write_s,
            min(1.0, max(read_s, write_s) / both_s),
            file.direct,
        )
    finally:
        file.close()


def storage_rates(folder: Path) -> DiskRates | None:
    """Measure the disk under a folder; `None` if there is no room for it."""
    try:
        return measured_rates(folder)
    except DiskError:
        return None


def _key(folder: Path) -> str:
    try:
        device = os.stat(folder).st_dev
    except OSError:
        device = 0  # opening the file says what is wrong with the folder
    said = json.dumps([platform.node(), device, str(folder.resolve())])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _remembered(path: Path) -> DiskRates | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (
            data.pop("version") != _VERSION
            or not -KEPT_S < time.time() - data.pop("measured_s") < KEPT_S
        ):
            return None
        found = DiskRates(**data)
        whole = all(isinstance(rate, float) and rate > 0 for rate in found[:3])
        return found if whole and found.both_ways_share <= 1 else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _logger.warning("the profile %s cannot be used (%s); measuring again", path, error)
        return None


def _remember(path: Path, rates: DiskRates) -> None:
    data: dict[str, Any] = {"version": _VERSION, "measured_s": time.time(), **rates._asdict()}
    text = json.dumps(data, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        _logger.warning("the profile %s cannot be kept: %s", path, error.strerror)


def _together(one: Callable[[], None], other: Callable[[], None]) -> None:
    failed: list[DiskError] = []

    def work() -> None:
        try:
            one()
        except DiskError as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="atom-probe", daemon=True)
    thread.start()
    try:
        other()
    finally:
        thread.join()
    if failed:
        raise failed[0]


def _median(work: Callable[[], None]) -> float:
    return statistics.median(timed(work) for _ in range(_REPEATS))

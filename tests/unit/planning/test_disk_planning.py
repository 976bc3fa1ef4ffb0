"""What lies on disk: kinds, staging slots, the catalogue, measured rates and their cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atomtrain.cli.plan import PlanOptions
from atomtrain.engine.calibration import disk_profile
from atomtrain.engine.calibration.disk_profile import DiskRates, disk_rates
from atomtrain.errors import ConfigError
from atomtrain.planning.catalogue import DISKS, disk, machine_for
from atomtrain.planning.cost.timeline import DiskWork
from atomtrain.planning.plan.disk import on_disk_up_to, staging_slots
from atomtrain.training.config.options import TrainOptions


def test_blocks_of_common_size_share_slots_and_large_ones_one() -> None:
    assert staging_slots([]) == []
    assert staging_slots([8]) == [8]
    assert staging_slots([8] * 10) == [8, 8, 8]
    assert staging_slots([100, *[8] * 10, 120, 0]) == [8, 8, 8, 120]


def test_kinds_by_name() -> None:
    assert on_disk_up_to("nothing") == ()
    assert on_disk_up_to("masters") == ("moments", "masters")
    with pytest.raises(ConfigError, match="Did you mean 'moments'"):
        on_disk_up_to("moment")
    with pytest.raises(ConfigError, match="needs a folder: --disk FOLDER"):
        TrainOptions(on_disk="moments")
    with pytest.raises(ConfigError, match="needs --disk DISK"):
        PlanOptions(model="tiny", on_disk="moments")


def test_disks_of_the_catalogue() -> None:
    machine = machine_for("rtx-3090", 1 << 37)
    for name, known in DISKS.items():
        assert known.name == name
        assert known.source.url.startswith("https://")
        with_disk = known.of(machine)
        assert with_disk.storage_rates == (known.read_bytes_per_s, known.write_bytes_per_s)
        # One direction at a time: as many bytes each way take the sum of both times.
        both_s = 1 / (known.write_bytes_per_s * known.both_ways_share)
        assert both_s == pytest.approx(1 / known.read_bytes_per_s + 1 / known.write_bytes_per_s)
    with pytest.raises(ConfigError, match="Did you mean 'nvme-pcie4'"):
        disk("nvme-pci4")


def test_what_disk_work_costs_a_step() -> None:
    work = DiskWork(read_s=8.0, update_s=2.0, write_s=4.0, ahead_s=1.0, blocks=4, clips=False)
    assert (work.working_s, work.last_s, work.backlog_s) == (7.0 + 1.5, 1.0, 0.0)
    clipped = work._replace(clips=True)
    assert (clipped.working_s, clipped.last_s, clipped.backlog_s) == (0.0, 0.0, 8.0)


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(folder: Path) -> DiskRates:
        measured.append(folder)
        return DiskRates(1e9, 5e8, 0.6)

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(disk_profile, "measured_rates", measure)
        first = disk_rates(tmp_path, cache=cache)
        assert disk_rates(tmp_path, cache=cache) == first == DiskRates(1e9, 5e8, 0.6)
        assert len(measured) == 1
        (path,) = cache.iterdir()
        for nonsense in ("{", "[]", json.dumps({**json.loads(path.read_text()), "version": 0})):
            path.write_text(nonsense)
            assert disk_rates(tmp_path, cache=cache) == first
        assert len(measured) == 4
    assert disk_rates(tmp_path, measure=False, cache=cache).read_bytes_per_s == 3.5e9


def test_a_measurement_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_profile, "_MOST_BYTES", 4 << 20)
    rates = disk_profile.measured_rates(tmp_path)
    assert min(rates[:3]) > 0
    assert rates.both_ways_share <= 1
    assert not list(tmp_path.iterdir())

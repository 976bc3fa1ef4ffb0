"""What others had of the processor is noticed and told."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from atomtrain.analysis import LayerTime
from atomtrain.engine.calibration import profiling
from atomtrain.engine.calibration.profile_cache import ProfileCache, kept_profiles
from atomtrain.engine.calibration.profiling import Moment, Watch, crowded_share, crowding_warning
from atomtrain.training.tools import doctor
from tests.unit.engine.test_profile_cache import MACHINE


@pytest.mark.parametrize(
    ("cores", "threads", "wall_s", "busy_s", "own_s", "share"),
    [
        (2, 2, 1.0, 1.0, 1.0, 0.0),  # only this process
        (2, 2, 1.0, 2.0, 1.0, 0.5),  # another one has a core
        (2, 1, 1.0, 2.0, 1.0, 0.5),  # copies and updates need the second core
        (2, 1, 1.0, 2.2, 0.2, 1.0),  # never more than all
        (64, 4, 1.0, 34.0, 4.0, 0.0),  # there is room for all
        (64, 30, 1.0, 64.0, 16.0, 0.5),  # 48 of others, 32 are needed, 16 in the way
        (64, 64, 2.0, 64.0, 0.0, 0.5),
        (4, 4, 1.0, 0.98, 1.0, 0.0),  # clocks of different grain
        (2, 2, 0.01, 0.02, 0.0, 0.0),  # too short to tell
    ],
)
def test_what_counts_is_who_is_in_the_way(
    cores: int, threads: int, wall_s: float, busy_s: float, own_s: float, share: float
) -> None:
    begun = Moment(100.0, 5000.0, 7.0)
    ended = Moment(100.0 + wall_s, 5000.0 + busy_s, 7.0 + own_s)
    assert crowded_share(begun, ended, cores, threads) == pytest.approx(share)


def test_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0.0 <= Watch().crowded_share() <= 1.0
    first = profiling._now()
    assert first is not None
    assert first.busy_s > first.own_s > 0
    monkeypatch.setattr(profiling, "Path", lambda _: tmp_path / "stat")
    assert profiling._now() is None
    assert Watch().crowded_share() == 0.0
    (tmp_path / "stat").write_text("cpu0 nonsense\n")
    assert profiling._now() is None


def test_only_what_is_crowded_is_told() -> None:
    assert crowding_warning(0.1) is None
    assert "48%" in (crowding_warning(0.48) or "")


def keep(folder: Path, share: float, **key: Any) -> ProfileCache:
    cache = ProfileCache(folder, {"host": platform.node(), "device": "card", **key})
    cache.put_machine(MACHINE)
    cache.put_time("a", LayerTime(1.0, 2.0), share)
    cache.put_update("u", 1.0)
    cache.save()
    return cache


def test_a_share_that_makes_no_sense_is_damage(tmp_path: Path) -> None:
    path = keep(tmp_path, 0.0).path
    for share in (-0.1, 1.1, "much", None):
        data = json.loads(path.read_text())
        data["layers"]["a"]["crowded_share"] = share
        path.write_text(json.dumps(data))
        assert not kept_profiles(tmp_path)


def test_the_doctor_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "atomtrain" / "profiles"
    (nothing,) = doctor._profile()
    assert (nothing.state, "nothing is measured yet" in nothing.detail) == (doctor.OK, True)
    keep(folder, 0.1)
    keep(folder, 0.9, host="another one")
    (folder / "disk-0.json").write_text('{"version": 1}')
    (folder / "torn.json").write_text("{")
    path = keep(folder, 0.9, device="card of an older version").path
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    (fine,) = doctor._profile()
    assert (fine.state, fine.detail) == (doctor.OK, "measured: card")
    assert not caplog.records, "nobody measures again here"
    keep(folder, 0.4, device="other card")
    (crowded,) = doctor._profile()
    assert crowded.state == doctor.WARNING
    assert "other card was measured while other programs had 40%" in crowded.detail
    assert "--profile-again" in crowded.fix

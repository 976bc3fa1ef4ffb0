"""Probes: sizes follow the link, a busy machine cannot make other work look dearer than it is."""

from __future__ import annotations

import pytest
from torch import Tensor

from atomtrain.engine.calibration import probes
from atomtrain.engine.devices.processor import EmulatedDevice


def test_the_size_of_a_copy_follows_the_link() -> None:
    def link(bytes_per_s: float) -> int:
        return probes._worthwhile(lambda n_bytes: n_bytes / bytes_per_s, 1 << 26)

    assert link(1e3) == 4 << 10
    assert link(1e12) == 1 << 26
    # 5 to 20 ms: long enough to be measured, short enough to be measured often.
    for rate in (1e7, 1e8, 1e9):
        assert 0.004 < link(rate) / rate < 0.021


def test_one_hiccup_does_not_make_a_link_slow() -> None:
    hiccups = iter([1.0])
    size = probes._worthwhile(lambda n_bytes: next(hiccups, n_bytes / 1e9), 1 << 26)
    assert size > 1 << 20


def test_the_start_of_a_copy_is_not_part_of_the_rate() -> None:
    start_s, rate = 1e-3, 1e9
    seconds = start_s + (1 << 24) / rate
    smallest_s = start_s + (4 << 10) / rate
    assert probes._slope(1 << 24, seconds, smallest_s) == pytest.approx(rate)
    # Where nothing but the start was measured there is no slope.
    assert probes._slope(4 << 10, 1e-3, 1e-3) == pytest.approx((4 << 10) / 1e-3)


def test_other_work_costs_no_more_than_the_processor_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Wall time says that each piece cost an hour of compute.
    monkeypatch.setattr(probes._Pace, "stolen_s", lambda *_: 3600.0)
    device = EmulatedDevice(1 << 20, 1e12)
    try:
        lost = probes.stolen(device, lambda: None, 1 << 16)
    finally:
        device.close()
    assert 0 <= lost.s_per_copied_byte < 1e-3
    assert 0 <= lost.s_per_update < 1e-3


def test_lost_compute_is_never_negative() -> None:
    alone = probes._Pace(pieces=10, seconds=1.0, others=0)
    assert probes._Pace(pieces=20, seconds=1.0, others=5).stolen_s(alone) == 0.0
    assert probes._Pace(pieces=5, seconds=1.0, others=5).stolen_s(alone) == pytest.approx(0.1)
    assert probes._Pace(pieces=5, seconds=1.0, others=0).stolen_s(alone) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cache_mib", "memory_gib", "expected_mib"),
    [(8, 16, 64), (32, 16, 128), (256, 512, 1024), (1152, 64, 4096)],
)
def test_probes_go_through_more_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, cache_mib: int, memory_gib: int, expected_mib: int
) -> None:
    """Four times as much; no less than 64 MiB, no more than a sixteenth of the memory."""
    monkeypatch.setattr(probes, "cache_bytes", lambda _: cache_mib << 20)
    monkeypatch.setattr(probes, "memory_bytes", lambda: memory_gib << 30)
    assert probes.uncached_bytes() == expected_mib << 20
    assert probes.adamw_parameters() == expected_mib << 16


def test_copies_beside_compute_walk_through_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "uncached_bytes", lambda *_: 1 << 20)
    places: set[int] = set()

    class Noting(EmulatedDevice):
        def copy_in(self, target: Tensor, source: Tensor) -> None:
            places.add(source.data_ptr())
            super().copy_in(target, source)

    device = Noting(1 << 20, 1e12)
    try:
        probes.stolen(device, lambda: None, 1 << 16)
    finally:
        device.close()
    assert max(places) - min(places) == 7 << 16, "half of it is read, half is written"


def test_rates_are_rates() -> None:
    assert probes.host_copy_bytes_per_s() > 0
    assert probes.update_parameters_per_s(1 << 10) > 0

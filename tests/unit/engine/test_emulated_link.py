"""The emulated link keeps its rate, however late the thread that copies wakes up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atomtrain.engine.devices import processor
from atomtrain.engine.devices.processor import _Link

RATE = 100e6
LATE_S = 5e-4


class Clock:
    """Time that passes only while somebody sleeps, each time a little longer than asked."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + LATE_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    there = SimpleNamespace(perf_counter=found.perf_counter, sleep=found.sleep)
    monkeypatch.setattr(processor, "time", there)
    return found


def copied_s(clock: Clock, link: _Link, n_bytes: int) -> float:
    source = torch.arange(n_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    before_s = clock.now_s
    link.copy(target, source)
    assert torch.equal(target, source)
    return clock.now_s - before_s


def test_pieces_of_a_copy_follow_each_other_without_a_gap(clock: Clock) -> None:
    link, n_bytes = _Link(RATE), 5_000_000
    for _ in range(3):
        seconds = copied_s(clock, link, n_bytes)
        assert n_bytes / RATE <= seconds < n_bytes / RATE + 2 * LATE_S


def test_a_link_that_was_idle_does_not_make_up_for_it(clock: Clock) -> None:
    link, n_bytes = _Link(RATE), 1_000_000
    copied_s(clock, link, n_bytes)
    clock.now_s += 10.0
    assert copied_s(clock, link, n_bytes) >= n_bytes / RATE


def test_copies_of_several_streams_share_the_link(clock: Clock) -> None:
    link, n_bytes = _Link(RATE), 10_000
    started_s = clock.now_s
    link._copy(torch.empty(n_bytes), torch.empty(n_bytes), started_s)
    second_s = link._copy(torch.empty(n_bytes), torch.empty(n_bytes), started_s)
    assert second_s == pytest.approx(started_s + 2 * 4 * n_bytes / RATE)

"""The desk: a trainer that waits for a round is woken by it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Merge, whole
from atomtrain.swarm.anchors.trainer_mailbox import Desk, RoundReport

ELEMENTS = 4
REPORT = RoundReport(round=1, fragment=0, version=1, outcome="abandoned")


class Vector:
    """A model of one fragment."""

    def __init__(self) -> None:
        self.values = torch.zeros(ELEMENTS)

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.values


def _want(desk: Desk) -> None:
    desk.want_snapshot(0, torch.empty(ELEMENTS), lambda snapshot: None)


def _merge(desk: Desk) -> None:
    anchor = desk.store.fresh(torch.ones(ELEMENTS), version=1, tokens=1)
    desk.leave_merge(Merge(0, anchor, whole(ELEMENTS)), REPORT)


def _report(desk: Desk) -> None:
    desk.report(REPORT)


@pytest.mark.parametrize("leave", [_want, _merge, _report])
def test_who_waits_is_woken_by_what_the_next_boundary_has_to_do(
    leave: Callable[[Desk], None],
) -> None:
    vector, store = Vector(), AnchorStore((ELEMENTS,), 0)
    store.adopt_local(vector)
    desk = Desk(store, lambda steps, merges: None)
    assert not desk.wait(0), "there is nothing yet"
    network = threading.Timer(0.05, leave, (desk,))
    network.start()
    assert desk.wait(30)
    network.join()
    assert desk.wait(0), "it stays until a boundary"
    desk.boundary(steps=0, tokens=0, tokens_per_s=1.0, step_s=1.0, access=vector)
    assert not desk.wait(0), "the boundary has done it"

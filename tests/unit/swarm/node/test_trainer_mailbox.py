"""The mailbox: a trainer that waits for a round is woken by it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Merge, whole
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport, TrainerMailbox

ELEMENTS = 4
REPORT = RoundReport(round=1, fragment=0, version=1, outcome="abandoned")


class Vector:
    """A model of one fragment."""

    def __init__(self) -> None:
        self.values = torch.zeros(ELEMENTS)

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.values


def _want(mailbox: TrainerMailbox) -> None:
    mailbox.want_snapshot(0, torch.empty(ELEMENTS), lambda snapshot: None)


def _merge(mailbox: TrainerMailbox) -> None:
    anchor = mailbox.store.fresh(torch.ones(ELEMENTS), version=1, tokens=1)
    mailbox.leave_merge(Merge(0, anchor, whole(ELEMENTS)), REPORT)


def _report(mailbox: TrainerMailbox) -> None:
    mailbox.report(REPORT)


@pytest.mark.parametrize("leave", [_want, _merge, _report])
def test_who_waits_is_woken_by_what_the_next_boundary_has_to_do(
    leave: Callable[[TrainerMailbox], None],
) -> None:
    vector, store = Vector(), AnchorStore((ELEMENTS,), 0)
    store.adopt_local(vector)
    mailbox = TrainerMailbox(store, lambda steps, merges: None)
    assert not mailbox.wait(0), "there is nothing yet"
    network = threading.Timer(0.05, leave, (mailbox,))
    network.start()
    assert mailbox.wait(30)
    network.join()
    assert mailbox.wait(0), "it stays until a boundary"
    mailbox.boundary(steps=0, tokens=0, tokens_per_s=1.0, step_s=1.0, access=vector)
    assert not mailbox.wait(0), "the boundary has done it"

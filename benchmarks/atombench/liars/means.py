"""Benchmark `means`: ways to average, against what liars contribute.

The swarm is that of `liars`, with all its defences; only what each contribution counts in a mean
differs. That is all that a way to average may choose, since members check an owner's mean by it.

* `plain`: what its weight says. Norms above ten medians are left out, as with all others.
* `clipped`: the default, `atomtrain.swarm.membership.guards`.
* `clipped, momentum`: each honest peer contributes a running mean of its changes (Karimireddy, He,
  Jaggi 2021, algorithm 2).
* `krum`, `several krum`: the contribution that is nearest to the others, or all but a third
  (Blanchard et al. 2017).
* `geometric median`: by smoothed Weiszfeld steps (Pillutla, Kakade, Harchaoui 2022).
* `by loss`: the owner leaves out what raises its own loss on held-out text, slice by slice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from atombench.common import BenchmarkOptions, Result, description, keep_partial, progress
from atombench.liars.learners import Averaging, Learner, Learning, learnt
from atombench.liars.liars import QUICK as LIARS_QUICK
from atombench.liars.liars import LiarsSetup
from atombench.liars.misdeeds import CONTRIBUTIONS, Contributing, Knows, contribute
from atombench.swarm.outer_swarm import Replica
from atomtrain.swarm.codecs.slices import slice_spans
from atomtrain.swarm.membership import guards
from atomtrain.swarm.membership.guards import Guard, plain_shares
from atomtrain.swarm.rounds.owning import OwnedSlice

Shares = Callable[[Sequence[Tensor], Sequence[int]], tuple[float, ...]]
"""Returns what each contribution counts, given all of a slice and their weights."""
_MOMENTUM = 0.5
"""With eight rounds of a fragment, 0.9 would forget most of what was learnt."""
_WEISZFELD_STEPS = 8
_SMOOTHING = 1e-3
"""Part of the median distance that a distance counts at least."""
PLAIN, CLIPPED, MOMENTUM, BY_LOSS = "plain", "clipped", "clipped, momentum", "by loss"


@dataclass(frozen=True, kw_only=True)
class MeansSetup:
    """Inputs of the benchmark."""

    learning: Learning = field(default_factory=lambda: LiarsSetup().learning)
    misdeeds: tuple[str, ...] = tuple(CONTRIBUTIONS)
    means: tuple[str, ...] = ()
    """Empty: all."""


QUICK = MeansSetup(
    learning=LIARS_QUICK.learning, misdeeds=("sign flipped",), means=(PLAIN, CLIPPED, "krum")
)


def run(options: BenchmarkOptions, setup: MeansSetup | None = None) -> Result:
    """Measure, and return plain JSON values.

    What is known after each row is kept in the file of results.
    """
    setup = setup or (QUICK if options.quick else MeansSetup())
    torch.set_num_threads(1)
    text = setup.learning.task.text()
    known: Result = {"inputs": asdict(setup), **description()}
    rows: list[Result] = []
    for mean in setup.means or MEANS:
        rows.append(_row(setup, text, mean))
        keep_partial({"rows": rows, **known}, options.out)
    return {"rows": rows, **known}


def _row(setup: MeansSetup, text: Tensor, mean: str) -> Result:
    how = setup.learning
    without = learnt(how, text, averaging=averaging(mean)).loss
    losses = {
        misdeed: learnt(how, text, misdeed, averaging=averaging(mean)).loss
        for misdeed in setup.misdeeds
    }
    row = {
        "mean": mean,
        "loss_without": without,
        "losses": {
            misdeed: loss if math.isfinite(loss) else None for misdeed, loss in losses.items()
        },
        "worst_loss": max(losses.values()),
        "worst_misdeed": max(losses, key=losses.__getitem__),
    }
    progress(f"{mean}: {without:.4f} without liars, {row['worst_loss']:.4f} at worst")
    return row


def averaging(mean: str) -> Averaging:
    """Return what has honest peers average in a way of this name."""

    @contextlib.contextmanager
    def use(honest: Sequence[Learner]) -> Iterator[None]:
        if mean == MOMENTUM:
            for peer in honest:
                store = peer.service.context.mailbox.store
                contribute(store, Contributing(lambda _, running, __: running), _running_mean())
        if mean in (CLIPPED, MOMENTUM):
            yield
            return
        shares = _by_loss(honest) if mean == BY_LOSS else _SHARES[mean]
        with patch.object(guards, "_clipped_shares", shares), _any_shares(), _owner_known():
            yield

    return use


def _any_shares() -> Any:
    """Members know which shares clipping cannot make; other ways make other ones."""
    return patch.object(Guard, "admits", lambda *_: True)


_OWNED: ContextVar[OwnedSlice] = ContextVar("owned")


def _owner_known() -> Any:
    close = OwnedSlice._close

    def closed(owned: OwnedSlice, me: int, *rest: Any) -> Any:
        _OWNED.set(owned)
        return close(owned, me, *rest)

    return patch.object(OwnedSlice, "_close", closed)


def _running_mean() -> Knows:
    """Return what knows a peer's own running mean of its changes, of each fragment."""
    means: dict[int, Tensor] = {}

    def knows(fragment: int, change: Tensor) -> tuple[Tensor, Tensor]:
        before = means.get(fragment, change)
        means[fragment] = _MOMENTUM * before + (1 - _MOMENTUM) * change
        return means[fragment], change

    return knows


def _squares(values: Sequence[Tensor]) -> list[list[float]]:
    """Return the squared distance of each two contributions."""
    return [[float((one - other).square().sum()) for other in values] for one in values]


def _by_krum(values: Sequence[Tensor]) -> list[int]:
    """Return all contributions, the one that is nearest to the others first."""
    near = max(1, len(values) - (len(values) - 1) // 3 - 2)
    scores = [sum(sorted(row)[1 : 1 + near]) for row in _squares(values)]
    return sorted(range(len(values)), key=scores.__getitem__)


def _only(chosen: Sequence[int], weights: Sequence[int]) -> tuple[float, ...]:
    bounded = guards._bounded_shares(weights)
    return plain_shares([w if i in chosen else 0.0 for i, w in enumerate(bounded)])


def _plain(_: Sequence[Tensor], weights: Sequence[int]) -> tuple[float, ...]:
    return plain_shares(weights)


def _krum(values: Sequence[Tensor], weights: Sequence[int]) -> tuple[float, ...]:
    return _only(_by_krum(values)[:1], weights)


def _several_krum(values: Sequence[Tensor], weights: Sequence[int]) -> tuple[float, ...]:
    return _only(_by_krum(values)[: len(values) - (len(values) - 1) // 3], weights)


def _geometric_median(values: Sequence[Tensor], weights: Sequence[int]) -> tuple[float, ...]:
    stacked, bounded = torch.stack(list(values)), guards._bounded_shares(weights)
    shares = plain_shares(bounded)
    for _ in range(_WEISZFELD_STEPS):
        centre = (torch.tensor(shares).unsqueeze(1) * stacked).sum(0)
        distances = (stacked - centre).norm(dim=1)
        least = max(float(_SMOOTHING * distances.median()), 1e-30)
        shares = plain_shares([
            weight / max(float(distance), least)
            for weight, distance in zip(bounded, distances, strict=True)
        ])  # fmt: skip
    return shares


def _by_loss(honest: Sequence[Learner]) -> Shares:
    """Return what leaves out contributions that raise the owner's own loss; not those of liars."""
    peers = {peer.name: peer for peer in honest}

    def shares(values: Sequence[Tensor], weights: Sequence[int]) -> tuple[float, ...]:
        owned = _OWNED.get()
        owner = peers.get(owned._begin.members[owned._index])
        if owner is None:
            return _plain(values, weights)
        losses = _losses(owner, owned, values)
        chosen = [i for i, loss in enumerate(losses[1:]) if loss < losses[0]]
        return _only(chosen or range(len(values)), weights)

    return shares


def _losses(owner: Learner, owned: OwnedSlice, values: Sequence[Tensor]) -> list[float]:
    """Return an owner's held-out loss of its anchors, and with each contribution added."""
    context = owner.service.context
    fragment = context.agenda.fragment(int(owned._begin.round_id.partition("-")[0]))
    store = context.mailbox.store
    anchors = [store.anchor(f).values for f in range(len(owner.fragments))]
    inside = slice_spans(anchors[fragment].numel(), len(owned._begin.members))[owned._index]
    at = sum(anchor.numel() for anchor in anchors[:fragment]) + inside.start
    scratch = Replica(owner.replica.task, 0)
    found = list[float]()
    for value in (None, *values):
        scratch.values.copy_(torch.cat(anchors))
        if value is not None:
            scratch.values[at : at + value.numel()] += value
        found.append(owner.judged(scratch))
    return found


_SHARES: dict[str, Shares] = {
    PLAIN: _plain, "krum": _krum, "several krum": _several_krum,
    "geometric median": _geometric_median,
}  # fmt: skip
MEANS = (*_SHARES, CLIPPED, MOMENTUM, BY_LOSS)

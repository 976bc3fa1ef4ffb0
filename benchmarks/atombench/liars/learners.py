"""A swarm on a virtual clock that learns text, with or without members that lie.

Rounds, audits, proofs, guards, standing, claims and trials are the product's own, whole: only the
network is in memory, and seconds take no time. Every round is judged, since judging takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from atombench.liars.misdeeds import (
    CLAIMS,
    CONTRIBUTIONS,
    Encode,
    claim,
    contribute,
    false_mean,
    two_means,
)
from atombench.swarm.outer_swarm import Replica, Task
from atombench.virtual.clock import run_virtual
from atombench.virtual.swarm import ENDPOINT, RUN, TIMES, VirtualPeer, VirtualSwarm
from atomtrain.swarm import SwarmConfig
from atomtrain.swarm.anchors.stamps import Limit
from atomtrain.swarm.anchors.updates import OVERLAP_WEIGHTS, outer_named
from atomtrain.swarm.catchup import fetching
from atomtrain.swarm.codecs.slices import Span, slice_spans
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.rounds.audits import Claim
from atomtrain.swarm.rounds.owning import OwnedSlice
from atomtrain.swarm.transport.transport import Channel

MEANS: dict[str, float] = {
    "a mean times -5": -5.0, "a mean times -1": -1.0, "a mean times 0.98": 0.98,
}  # fmt: skip
OTHER_BYTES, GHOSTS = "another mean to one member", "made-up identities"
ALL = (*CONTRIBUTIONS, *MEANS, OTHER_BYTES, *CLAIMS, GHOSTS)
"""Every misdeed."""
_STEP_S = 0.5
_BEGIN_S = 8.0
"""When the lies begin: all have averaged by then."""
_GHOSTS = 200
_RENEWED_S = 2.0
_LOOK_S = 0.1
_SETTLED_S = 30.0
_JUDGED_SEQUENCES = 8


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a swarm learns."""

    task: Task
    peers: int
    """Liars included."""
    liars: int
    sequences: int
    """Of each peer's step."""
    local_steps: int
    fragments: int
    wire: str
    outer: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    loss: float
    """Of the honest peers' anchors on held-out text, the median one."""
    noticed_rounds: int | None
    """Rounds from the first lie until an honest peer rejected, refused or left out a liar; None:
    nobody did."""
    expelled: tuple[str, ...]
    """Liars that every honest peer has expelled for good."""
    honest_expelled: tuple[str, ...]
    """Honest peers that some honest peer has expelled."""


class Learner(VirtualPeer):
    """A peer that learns text, and judges by text of its own."""

    def __init__(
        self, swarm: VirtualSwarm[Learner], index: int, how: Learning, text: Tensor
    ) -> None:
        """Begin with the same parameters as all others."""
        config = SwarmConfig(run=RUN, endpoint=ENDPOINT, **TIMES)  # type: ignore[arg-type]
        super().__init__(swarm, f"peer{index}", _STEP_S, config)
        self._how, self._text, self._index = how, text, index
        self.replica, self._steps = Replica(how.task, 0), 0
        spans = spans_of(self.replica, how)
        self.fragments = [self.replica.values[slice(*span)] for span in spans]

    def use_judge(self) -> None:
        """Judge merges by the loss on held-out sequences of this peer's own."""
        loop = asyncio.get_running_loop()
        self.service.context.mailbox.use_judge(lambda: self.judged(self.replica), loop.time)

    def judged(self, replica: Replica) -> float:
        """Return a model's loss on held-out sequences of this peer's own."""
        inputs, labels = self._how.task.held_out(self._text, _JUDGED_SEQUENCES, self._index)
        with torch.no_grad():
            return float(replica.model(inputs, labels).loss)

    def step(self) -> None:
        """Make one optimizer step; the last one ends the training."""
        task, how = self._how.task, self._how
        batch = task.batch(self._text, how.sequences, self._steps * how.peers + self._index)
        self.replica.step(self._steps, *batch)
        self._steps += 1
        self.training = self._steps < task.steps

    def loss(self) -> float:
        """Return the loss of the model that this peer's anchors are."""
        scratch, store = Replica(self._how.task, 0), self.service.context.mailbox.store
        anchors = [store.anchor(f).values for f in range(len(self.fragments))]
        scratch.values.copy_(torch.cat(anchors))
        return scratch.loss(self._text)


def spans_of(replica: Replica, how: Learning) -> tuple[Span, ...]:
    """Return where fragments lie among a model's parameters."""
    return slice_spans(replica.values.numel(), how.fragments)


Averaging = Callable[[Sequence[Learner]], contextlib.AbstractContextManager[None]]
"""Has honest peers average in another way while it is entered."""


def learnt(
    how: Learning,
    text: Tensor,
    misdeed: str = "",
    *,
    defended: bool = True,
    averaging: Averaging | None = None,
) -> Outcome:
    """Return what comes of a swarm; without a misdeed only its honest peers are there."""
    with contextlib.ExitStack() as stack:
        if not defended:
            stack.enter_context(_undefended())

        async def scenario() -> Outcome:
            scene = await _begun(how, text, misdeed, defended=defended)
            watching = asyncio.create_task(scene.watch())
            if averaging is not None:
                stack.enter_context(averaging(scene.honest))
            stack.enter_context(scene.lying(misdeed))
            await asyncio.sleep(how.task.steps * _STEP_S)
            await asyncio.sleep(_SETTLED_S)
            watching.cancel()
            return scene.outcome()

        return run_virtual(scenario)


async def _begun(how: Learning, text: Tensor, misdeed: str, *, defended: bool) -> _Scene:
    rules: dict[str, Any] = {} if defended else {"mean": "plain", "norm_limit": 0.0}
    outer = outer_named(how.outer, how.local_steps, how.fragments)
    sizes = tuple(span.elements for span in spans_of(Replica(how.task, 0), how))
    swarm: VirtualSwarm[Learner] = VirtualSwarm(
        sizes, 3, wire=how.wire, local_steps_per_round=how.local_steps,
        outer_learning_rate=outer.learning_rate, outer_momentum=outer.momentum,
        overlap_weight=OVERLAP_WEIGHTS[how.outer], **{"mean": "clipped", **rules},
    )  # fmt: skip
    liars = how.liars if misdeed and misdeed != GHOSTS else 0
    honest = how.peers - how.liars
    for index in range(honest + liars):
        peer = Learner(swarm, index, how, text)
        if defended and index < honest:
            peer.use_judge()
        await swarm.enter(peer)
    await asyncio.sleep(_BEGIN_S)
    names = [*swarm.peers]
    return _Scene(swarm, names[:honest], names[honest:])


class _Scene:
    """A swarm in which some are about to lie."""

    def __init__(self, swarm: VirtualSwarm[Learner], honest: list[str], liars: list[str]) -> None:
        self._swarm, self._liars = swarm, liars
        self.honest = [swarm.peers[name] for name in honest]
        self._seen = {peer.name: len(peer.reports) for peer in self.honest}
        self._first = self._next_round()
        self._noticed: int | None = None
        self._renewing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def lying(self, misdeed: str) -> Iterator[None]:
        """Have the liars lie."""
        stores = [self._swarm.peers[name].service.context.mailbox.store for name in self._liars]
        with contextlib.ExitStack() as stack:
            if misdeed in CONTRIBUTIONS:
                for store in stores:
                    contribute(store, CONTRIBUTIONS[misdeed], self._knows)
            elif misdeed in CLAIMS:
                for store in stores:
                    claim(store, misdeed)
            elif misdeed in MEANS:
                encoded = false_mean(OwnedSlice._encode, self._owner_lies, MEANS[misdeed])
                stack.enter_context(patch.object(OwnedSlice, "_encode", encoded))
            elif misdeed == OTHER_BYTES:
                encode: Encode = OwnedSlice._encode
                answer = two_means(OwnedSlice.answer, encode, self._lies_to)
                stack.enter_context(patch.object(OwnedSlice, "answer", answer))
            elif misdeed == GHOSTS:
                self._liars = [f"ghost{number}" for number in range(_GHOSTS)]
                self._renewing = asyncio.create_task(self._renew())
            yield

    def _knows(self, fragment: int, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return what all honest peers are about to contribute: mean and deviations."""
        changes = torch.stack([
            peer.fragments[fragment] - peer.service.context.mailbox.store.anchor(fragment).values
            for peer in self.honest
        ])  # fmt: skip
        return changes.mean(dim=0), changes.std(dim=0)

    def _owner_lies(self, owned: OwnedSlice) -> bool:
        # Fragments are small: each member owns one slice.
        return owned._begin.members[owned._index] in self._liars

    def _lies_to(self, owned: OwnedSlice, channel: Channel) -> bool:
        return self._owner_lies(owned) and channel.remote == self.honest[0].name

    async def _renew(self) -> None:
        """Write records of peers that are not there, again and again."""
        context = self.honest[0].service.context
        record, table = self.honest[0].service.own_record(), self._swarm.network.table("peer0")
        while True:
            for ghost in self._liars:
                false = replace(
                    record, peer_id=ghost, sequence=self._swarm.clock(), addresses=()
                )  # fmt: skip
                table[ghost] = (context.admission.seal(false.encode()), 1e12)
            await asyncio.sleep(_RENEWED_S)

    async def watch(self) -> None:
        """Look until an honest peer has noticed."""
        while not self._is_noticed():
            await asyncio.sleep(_LOOK_S)
        self._noticed = max(1, self._next_round() - self._first)

    def _is_noticed(self) -> bool:
        for peer in self.honest:
            roster = peer.service.context.roster
            if any(roster.sees(liar) and not roster.answers(liar) for liar in self._liars):
                return True
            for report in peer.reports[self._seen[peer.name] :]:
                if any(liar in text for liar in self._liars for text in report.rejected):
                    return True
                if self._liars and report.outcome == "refused":
                    return True
        return False

    def _next_round(self) -> int:
        return max(peer.service.context.agenda.next_round for peer in self.honest)

    def outcome(self) -> Outcome:
        """Return what has come of it."""
        for peer in self.honest:
            peer.versions()  # raises what ended a trainer
        if self._renewing is not None:
            self._renewing.cancel()
        said = [{*peer.service.context.standing.all_expelled()} for peer in self.honest]
        return Outcome(
            loss=statistics.median(peer.loss() for peer in self.honest),
            noticed_rounds=self._noticed,
            expelled=tuple(sorted(set.intersection(*said).intersection(self._liars))),
            honest_expelled=tuple(sorted(set.union(*said).difference(self._liars))),
        )


@contextlib.contextmanager
def _undefended() -> Iterator[None]:
    """Have no peer audit a mean, or doubt a claim. Guards are rules of the run."""
    believed: dict[tuple[Any, str], Callable[..., Any]] = {
        (Claim, "unproved"): lambda *_: "",
        (Claim, "wrong"): lambda *_: "",
        (Limit, "refusal"): lambda *_: "",
        (Roster, "certain"): lambda *_: True,
        (Roster, "counts"): lambda *_: True,
        (fetching, "_flaw"): lambda *_: "",
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), instead in believed.items():
            stack.enter_context(patch.object(owner, name, instead))
        yield

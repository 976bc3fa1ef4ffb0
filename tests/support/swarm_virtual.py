"""A whole swarm on a virtual clock that checks itself.

Every snapshot and every merge is recorded, so that a test can recompute each mean from what the
contributors had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from atombench.virtual.swarm import RUN, TIMES, VirtualPeer, VirtualSwarm
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Merge, Part, Snapshot, joined_parts
from atomtrain.swarm.codecs.codec import Codec, codec_named, decode_span, encode_span
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.rounds.bases import stepped
from tests.support.swarm_configs import swarm_config


class Simulation(VirtualSwarm["SimulatedPeer"]):
    """Peers, their network, and a record of all that was averaged."""

    def __init__(
        self,
        elements: tuple[int, ...],
        seed: int,
        delay_s: float = 0.02,
        *,
        clock: Callable[[], float] | None = None,
        **rules: Any,
    ) -> None:
        """As a virtual swarm."""
        super().__init__(elements, seed, delay_s, clock=clock, **rules)
        self.snapshots: dict[str, dict[str, Snapshot]] = defaultdict(dict)  # by round id, peer
        self.weights: dict[str, dict[str, int]] = {}  # by round id: what each member weighs
        self.merges: list[tuple[str, torch.Tensor, Merge]] = []  # peer, old anchor, merge

    async def add(
        self,
        name: str,
        step_s: float,
        step: Callable[[SimulatedPeer], None] | None = None,
        **config: Any,
    ) -> SimulatedPeer:
        """Start a peer; without `step` it adds a random vector per step."""
        return await self.enter(SimulatedPeer(self, name, step_s, step, **config))

    def check_means(self, liars: Collection[str] = ()) -> int:
        """Recompute every averaged anchor from the contributors' snapshots; return how many.

        Not those of `liars`, who may believe each other.
        """
        checked = 0
        slices = self._slices()
        made: dict[str, set[str]] = defaultdict(set)
        for peer, old, merge in self.merges:
            origin = merge.anchor.origin
            if merge.snapshot is None or not origin.round_id or peer in liars:
                continue
            everywhere = sum(part.span.elements for part in origin.parts) == old.numel()
            if everywhere or not merge.anchor.grouped:  # siblings keep what was not decided
                made[origin.round_id].add(merge.anchor.stamp.digest)
            assert merge.anchor.values.shape == old.shape
            expected = old.clone()
            parts = slices[origin.round_id, merge.anchor.stamp.digest]
            assert joined_parts(parts) == joined_parts(origin.parts)
            for span, contributors in parts:
                if not span.elements:
                    continue
                weights = self.weights[origin.round_id]
                taken = [
                    replace(self.snapshots[origin.round_id][member], weight=weights[member])
                    for member in sorted(contributors)
                ]
                if merge.anchor.grouped:
                    unit = self._check_grouped(expected, span, taken, origin.round_id)
                else:
                    changes = {i: self._decoded(s.contribution(span)) for i, s in enumerate(taken)}
                    mean = self.manifest.rules.guard.mean_of(changes, [s.weight for s in taken])[0]
                    self._apply_outer(expected[span.start : span.stop], span, mean, taken)
                    # Random rounding moves a mean by less than one unit of its largest block.
                    unit = float(mean.abs().max()) * self._rounding(1 / 127)
                error = (merge.anchor.values - expected)[span.start : span.stop].abs()
                scale = 1 + expected[span.start : span.stop].abs()
                assert bool((error <= 1e-5 * scale + unit).all()), "a wrong mean"
            checked += 1
        assert all(len(digests) == 1 for digests in made.values()), "members committed differently"
        return checked

    def _slices(self) -> dict[tuple[str, str], tuple[Part, ...]]:
        """Return the parts that each anchor was made in, by its round and hash.

        Who fetches it is told neighbours as one; the wire encoded each for itself.
        """
        found: dict[tuple[str, str], tuple[Part, ...]] = {}
        for _, _, merge in self.merges:
            origin = merge.anchor.origin
            made = origin.round_id, merge.anchor.stamp.digest
            if len(origin.parts) >= len(found.get(made, ())):
                found[made] = origin.parts
        return found

    def _apply_outer(
        self, anchor: torch.Tensor, span: Span, mean: torch.Tensor, taken: list[Snapshot]
    ) -> None:
        """Move a span of an anchor by what the outer update makes of a mean."""
        update, old = self.manifest.rules.outer, taken[0].anchor
        velocity = torch.zeros_like(anchor) if update.rows else None
        if velocity is not None and old.velocity is not None:
            velocity = old.velocity[span.start : span.stop].clone()
        on_time = sum(s.weight for s in taken if not s.late) / sum(s.weight for s in taken)
        update.apply(anchor, mean, velocity, on_time)

    def _check_grouped(
        self, expected: torch.Tensor, span: Span, taken: list[Snapshot], round_id: str
    ) -> float:
        """Write what a group's mean should be; return how far low-bit wires may move it."""
        update = self.manifest.rules.outer
        led_to = [stepped(snapshot, update, span) for snapshot in taken]
        total = sum(s.weight for s in taken)
        expected[span.start : span.stop] = sum(
            y * (s.weight / total) for y, s in zip(led_to, taken, strict=True)
        )
        anchors = [s.anchor.values[slice(*span)] for s in self.snapshots[round_id].values()]
        farthest = max(float((y - a).abs().max()) for y in led_to for a in anchors)
        return farthest * self._rounding(1 / 6)

    def _rounding(self, low_bit: float) -> float:
        """Return by which share of the largest value the wire may change one."""
        return low_bit if self._codec.feedback else 0.0 if self._codec.exact else 1 / 500

    @property
    def _codec(self) -> Codec:
        return codec_named(self.manifest.rules.wire)

    def _decoded(self, contribution: torch.Tensor) -> torch.Tensor:
        """Return a contribution as its owner gets it."""
        out = torch.empty_like(contribution)
        decode_span(self._codec, encode_span(self._codec, contribution), out)
        return out


class SimulatedPeer(VirtualPeer):
    """One peer and its trainer."""

    simulation: Simulation

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        step_s: float,
        step: Callable[[SimulatedPeer], None] | None = None,
        **settings: Any,
    ) -> None:
        """Be ready to start; `settings` are those of the configuration."""
        times = {**TIMES, "connect_s": 2.0, "stall_s": 3.0}
        super().__init__(simulation, name, step_s, swarm_config(run=RUN, **{**times, **settings}))
        self._step = step
        self._record()

    def step(self) -> None:
        super().step() if self._step is None else self._step(self)

    def _record(self) -> None:
        store = self.service.context.mailbox.store
        take, merge_into = store.snapshot, store.merge

        def snapshot(fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
            taken = take(fragment, local, into)
            round_id = self.service.context.agenda.running
            assert round_id is not None
            kept = replace(taken, values=taken.values.clone())  # its memory is used again
            self.simulation.snapshots[round_id][self.name] = kept
            return taken

        def merge(what: Merge, local: torch.Tensor) -> None:
            old = store.anchor(what.fragment)
            for one in self.service._rounds.groups():
                self.simulation.weights[one.invite.round_id] = dict(
                    zip(one.begin.members, one.begin.weights, strict=True)
                )
            assert what.anchor.stamp.beats(old.stamp), "an anchor must never go back"
            what = store.fitting(what)
            expected = _pending(store, what.fragment, local)
            if what.snapshot is not None:
                for span in what.contributed:
                    expected[span.start : span.stop] -= _applied(what, span)
            merge_into(what, local)
            # Nothing is lost, nothing counts twice: only what the anchor took is gone.
            pending = _pending(store, what.fragment, local)
            if what.restart:
                assert not pending.any()
                expected = pending
            torch.testing.assert_close(pending, expected, rtol=1e-4, atol=1e-3, equal_nan=True)
            self.simulation.merges.append((self.name, old.values, what))

        store.snapshot = snapshot  # type: ignore[method-assign]
        store.merge = merge  # type: ignore[assignment,method-assign]


def _pending(store: AnchorStore, fragment: int, local: torch.Tensor) -> torch.Tensor:
    """Return what a peer has learnt and no anchor contains."""
    pending = local - store.anchor(fragment).values
    residual = store.residual(fragment)
    return pending if residual is None else pending + residual


def _applied(merge: Merge, span: Span) -> torch.Tensor:
    """Return what of a peer's learning is in the new anchor."""
    snapshot = merge.snapshot
    assert snapshot is not None
    if merge.anchor.values is snapshot.values:  # alone: no codec, no residual
        return (snapshot.values - snapshot.anchor.values)[span.start : span.stop]
    contribution = snapshot.contribution(span)
    return contribution if snapshot.lost is None else contribution - snapshot.lost[slice(*span)]

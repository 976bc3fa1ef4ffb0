"""The anchor that a round makes of the old one: slice by slice, the same bits at all members.

Or, where nobody else is in the round, of the parameters alone: whoever comes next starts there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Anchor, Digest, Merge, Part, Snapshot, digest_of, whole
from atomtrain.swarm.anchors.buffer_pool import pooled_copy, pooled_empty
from atomtrain.swarm.anchors.updates import Place, Update, rows_of
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.transport.messages import Begin


class Made(NamedTuple):
    """What has become of an anchor."""

    values: torch.Tensor
    velocity: torch.Tensor | None
    digest: str
    parts: tuple[Part, ...]


class Making:
    """Applies means to the old anchor, one slice after the other, where they lie.

    Same old anchor, or bases, same means, same operations: all members get the same bits. The old
    anchor stays as it is.
    """

    def __init__(
        self, snapshot: Snapshot, begin: Begin, update: Update, values: torch.Tensor
    ) -> None:
        """Begin with nothing; `values`, of the fragment's size, become the new anchor's."""
        self._snapshot, self._begin, self._update = snapshot, begin, update
        self._values = values
        self._velocity = None if begin.bases else _velocity(snapshot.anchor, update)
        self._digest = Digest()
        self._parts: list[Part] = []

    def keep(self, span: Span) -> None:
        """Leave the next slice as the old anchor has it."""
        start, stop = span
        self._values[start:stop] = self._snapshot.anchor.values[start:stop]
        self._hash(span)

    def rebase(
        self, span: Span, mean: torch.Tensor, base: torch.Tensor, contributors: Iterable[int]
    ) -> None:
        """Make the next slice of its base and the mean of what is to be added to it."""
        torch.add(base, mean, out=self._values[span.start : span.stop])
        self._hash(span)
        self._changed(span, contributors)

    def apply(self, span: Span, mean: torch.Tensor, contributors: tuple[int, ...]) -> None:
        """Apply the next slice's mean, which may lie in its place."""
        start, stop = span
        anchor = self._snapshot.anchor
        self._update.apply(
            anchor.values[start:stop],
            mean,
            rows_of(self._velocity, self._update.rows, span),
            _on_time_share(self._begin, contributors),
            out=self._values[start:stop],
            place=Place(self._snapshot.fragment, start, anchor.stamp.version),
        )
        self._hash(span)
        self._changed(span, contributors)

    def made(self) -> Made:
        """Return the new anchor, once it has all slices."""
        if self._velocity is not None:
            self._digest.update(byte_view(self._velocity))
        return Made(self._values, self._velocity, self._digest.text(), tuple(self._parts))

    def _hash(self, span: Span) -> None:
        # At once: the values are in the processor's cache now.
        self._digest.update(byte_view(self._values[span.start : span.stop]))

    def _changed(self, span: Span, contributors: Iterable[int]) -> None:
        members = self._begin.members
        self._parts.append(Part(span, frozenset(members[i] for i in contributors)))


def _velocity(old: Anchor, update: Update) -> torch.Tensor | None:
    """Return a copy of an anchor's velocity; after several groups it begins with zeros."""
    if old.grouped and update.rows:
        return torch.zeros(update.rows * old.values.numel())
    return None if old.velocity is None else pooled_copy(old.velocity)


def _on_time_share(begin: Begin, contributors: tuple[int, ...]) -> float:
    total = sum(begin.weights[i] for i in contributors)
    late = sum(begin.weights[i] for i in contributors if begin.late[i])
    return (total - late) / total if total else 1.0


def merge_alone(store: AnchorStore, update: Update, snapshot: Snapshot) -> Merge:
    """Return the new anchor of a round that nobody else is in: it follows the parameters."""
    old = snapshot.anchor.stamp
    if snapshot.gradient:
        return _step_alone(update, snapshot)
    new = old.next(snapshot.weight)
    anchor = store.fresh(snapshot.values, version=new.version, tokens=new.tokens)
    spans = whole(snapshot.values.numel())
    return Merge(snapshot.fragment, anchor, (), snapshot, spans)


def _step_alone(update: Update, snapshot: Snapshot) -> Merge:
    old = snapshot.anchor
    values = pooled_empty(old.values.numel())
    velocity = None if old.velocity is None else pooled_copy(old.velocity)
    everything = whole(values.numel())
    update.apply(
        old.values,
        snapshot.contribution(everything[0]),
        rows_of(velocity, update.rows, everything[0]),
        out=values,
        place=Place(snapshot.fragment, 0, old.stamp.version),
    )
    stamp = old.stamp.next(snapshot.weight, digest_of(values, velocity))
    return Merge(snapshot.fragment, Anchor(values, velocity, stamp), (), snapshot, everything)

"""Anchors: what the swarm last agreed on, fragment by fragment, and how it reaches the model.

An anchor's tensors are never changed once it is in the store: a new anchor replaces the old one, so
that a donor can stream one while the next is being made. Replacing the anchor and moving the local
parameters is one act (`merge`), done by the training thread between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm.codec import byte_view
from atomtrain.swarm.slices import Span


class FragmentAccess(Protocol):
    """How the swarm reaches the model that is being trained."""

    def view(self, index: int) -> AbstractContextManager[torch.Tensor]:
        """Lend the 1-D float32 CPU view of a fragment's local parameters, exclusively."""
        ...


@dataclass(frozen=True)
class Stamp:
    """Which anchor this is: version, tokens that went into it, and hash of its bytes."""

    version: int
    tokens: int
    digest: str

    def beats(self, other: Stamp) -> bool:
        """Say whether peers that hold `other` have to fetch this one.

        More tokens win: of two halves of a swarm that were cut apart, the one that has learnt from
        more. Then the higher version; then the lower hash. A round's anchor beats the one that it
        was made of, since somebody has trained for it.
        """
        return (self.tokens, self.version, other.digest) > (
            other.tokens,
            other.version,
            self.digest,
        )


class Part(NamedTuple):
    """A span that a round changed, and the ids of the peers whose contributions are in it."""

    span: Span
    contributors: frozenset[str]


@dataclass(frozen=True)
class Origin:
    """Which round made an anchor from its predecessor."""

    round_id: str
    parts: tuple[Part, ...]


NO_ORIGIN = Origin("", ())


@dataclass(frozen=True)
class Anchor:
    """A fragment's agreed parameters, 1-D float32, not to be changed."""

    values: torch.Tensor
    velocity: torch.Tensor | None
    stamp: Stamp
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True)
class Snapshot:
    """A member's parameters at the boundary at which it entered a round."""

    fragment: int
    values: torch.Tensor
    """1-D float32 copy of the local parameters."""
    anchor: Anchor
    """The anchor that the contribution is measured from."""
    weight: int
    """Tokens since this peer's last contribution to the fragment."""
    tokens_seen: int
    """This peer's token count at the snapshot."""
    gradient: bool = False
    """`values` are the contribution itself: a mean gradient."""
    late: bool = False
    """Part of the change was learnt before an anchor that was made without it."""
    residual: torch.Tensor | None = None
    """What encoding lost of earlier contributions, to be added to this one; None is zero."""
    lost: torch.Tensor | None = None
    """What encoding loses of this contribution; filled by the exchange. None: nothing."""

    def contribution(self, span: Span) -> torch.Tensor:
        """Return what the peer has to give in a span: its change, and its residual."""
        start, stop = span
        change = (
            self.values[start:stop].clone()
            if self.gradient
            else self.values[start:stop] - self.anchor.values[start:stop]
        )
        return change if self.residual is None else change.add_(self.residual[start:stop])


@dataclass(frozen=True)
class Merge:
    """An anchor to put in place, and the snapshot whose change it contains in some spans."""

    fragment: int
    anchor: Anchor
    changed: tuple[Span, ...]
    """Spans in which the new anchor differs from the present one."""
    snapshot: Snapshot | None = None
    contributed: tuple[Span, ...] = ()
    """Spans that contain the snapshot's contribution; disjoint from `changed`."""
    restart: bool = False
    """Drop all that no anchor contains: the parameters become the anchor."""


def digest_of(values: torch.Tensor, velocity: torch.Tensor | None) -> str:
    """Return the hash of an anchor's bytes; releases the interpreter lock for large tensors."""
    digest = hashlib.sha256(byte_view(values))
    if velocity is not None:
        digest.update(byte_view(velocity))
    return digest.hexdigest()[:32]


class AnchorStore:
    """All anchors of one peer, and its tokens that they do not contain yet.

    Not thread-safe: its owner holds a lock, or calls from one thread.
    """

    def __init__(
        self,
        fragment_elements: tuple[int, ...],
        momentum: int,
        overlap_weight: float = 1.0,
        *,
        gradients: bool = False,
    ) -> None:
        """Make a store without anchors; `momentum`: how many rows their velocity has, 0 for none.

        With `gradients` contributions are gradients, and parameters are always those of the anchor.
        `overlap_weight` is the share of what was learnt while a round went on that a merge leaves
        in the parameters; the rest joins the residual, and comes back with the next anchor.
        """
        self.fragment_elements = fragment_elements
        self.momentum = momentum
        self.gradients = gradients
        self._overlap_weight = overlap_weight
        self.tokens_seen = 0
        self._anchors: list[Anchor | None] = [None] * len(fragment_elements)
        self._tokens_merged = [0] * len(fragment_elements)
        self._measured_from = [0] * len(fragment_elements)
        self._residuals: list[torch.Tensor | None] = [None] * len(fragment_elements)

    def adopt_local(self, access: FragmentAccess) -> None:
        """Make the current parameters the anchors, version 0.

        Raises:
            SwarmError: a fragment does not have the manifest's size.
        """
        for fragment in range(len(self.fragment_elements)):
            with access.view(fragment) as local:
                self.check_size(fragment, local)
                values = local.detach().clone()
            self.place(fragment, self.fresh(values, version=0, tokens=0))

    def fresh(self, values: torch.Tensor, *, version: int, tokens: int) -> Anchor:
        """Return an anchor with zero velocity; hashes `values`."""
        velocity = torch.zeros(self.momentum * values.numel()) if self.momentum else None
        return Anchor(values, velocity, Stamp(version, tokens, digest_of(values, velocity)))

    def check_size(self, fragment: int, local: torch.Tensor) -> None:
        """Raise `SwarmError` unless `local` is the fragment the manifest describes."""
        wanted = self.fragment_elements[fragment]
        if local.dtype != torch.float32 or local.dim() != 1 or local.numel() != wanted:
            raise SwarmError(
                f"fragment {fragment} is {local.dtype} of shape {tuple(local.shape)}; the run's "
                f"manifest says 1-D float32 with {wanted} elements; use the run's model config"
            )

    def place(self, fragment: int, anchor: Anchor) -> None:
        """Put an anchor in place of a model that holds just that, or is about to."""
        self._anchors[fragment] = anchor
        self._measured_from[fragment] = anchor.stamp.version

    def anchor(self, fragment: int) -> Anchor:
        """Return a fragment's anchor.

        Raises:
            SwarmError: it has not been downloaded yet.
        """
        anchor = self._anchors[fragment]
        if anchor is None:
            raise SwarmError(f"fragment {fragment} has no anchor yet; call download() first")
        return anchor

    def stamps(self) -> tuple[Stamp | None, ...]:
        """Return every fragment's stamp; None where there is no anchor yet."""
        return tuple(None if a is None else a.stamp for a in self._anchors)

    def snapshot(self, fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
        """Copy a fragment's parameters to `into` for a round."""
        self.check_size(fragment, local)
        weight = self.tokens_seen - self._tokens_merged[fragment]
        values = into.copy_(local.detach())
        anchor, residual = self.anchor(fragment), self._residuals[fragment]
        late = self._measured_from[fragment] < anchor.stamp.version
        return Snapshot(
            fragment, values, anchor, weight, self.tokens_seen, self.gradients, late, residual
        )

    def merge(self, merge: Merge, local: torch.Tensor) -> None:
        """Put the new anchor in place and move `local`; progress since the snapshot is kept.

        Where the snapshot's contribution is in the anchor, local progress is what happened since
        the snapshot; elsewhere it is all that differs from the old anchor. The residual follows the
        same rule: what encoding lost takes its place only where the contribution was used, so that
        local minus anchor, plus residual, is at any time what no anchor contains yet. A
        restart drops both.
        """
        old, new = self.anchor(merge.fragment).values, merge.anchor.values
        if self.gradients and not merge.restart:
            local.copy_(new)
            self._tokens_merged[merge.fragment] = self.tokens_seen
            if merge.snapshot is not None and merge.contributed:
                self._advance_residual(merge.snapshot, merge.contributed)
            self.place(merge.fragment, merge.anchor)
            return
        if merge.restart:
            local.copy_(new)
            self._tokens_merged[merge.fragment] = self.tokens_seen
            self.forget_residual(merge.fragment)
            self.place(merge.fragment, merge.anchor)
            return
        for start, stop in merge.changed:
            local[start:stop].sub_(old[start:stop]).add_(new[start:stop])
        if merge.snapshot is not None and merge.contributed:
            taken = merge.snapshot.values
            # An anchor that is the snapshot itself (a peer alone) must leave no rounding behind:
            # alone in a swarm is then the same as without one, bit for bit.
            if new is not taken:
                self._advance_residual(merge.snapshot, merge.contributed)
                for start, stop in merge.contributed:
                    progress = local[start:stop].sub_(taken[start:stop])
                    self._hold_back(merge.fragment, Span(start, stop), progress)
                    progress.add_(new[start:stop])
            self._tokens_merged[merge.fragment] = merge.snapshot.tokens_seen
            self._measured_from[merge.fragment] = merge.anchor.stamp.version
        self._anchors[merge.fragment] = merge.anchor

    def _hold_back(self, fragment: int, span: Span, progress: torch.Tensor) -> None:
        """Move from `progress` to the residual what the overlap's weight leaves out."""
        if self._overlap_weight == 1.0:
            return
        residual = self._residuals[fragment]
        if residual is None:
            residual = self._residuals[fragment] = torch.zeros(self.fragment_elements[fragment])
        back = progress.mul(1.0 - self._overlap_weight)
        progress.sub_(back)
        residual[span.start : span.stop].add_(back)

    def _advance_residual(self, snapshot: Snapshot, contributed: tuple[Span, ...]) -> None:
        present, lost = self._residuals[snapshot.fragment], snapshot.lost
        if present is None and lost is None:
            return
        if lost is not None and sum(span.elements for span in contributed) == lost.numel():
            self._residuals[snapshot.fragment] = lost
            return
        # A snapshot may still hold the present one: a new one takes its place.
        fresh = torch.zeros_like(snapshot.values) if present is None else present.clone()
        for start, stop in contributed:
            fresh[start:stop] = 0.0 if lost is None else lost[start:stop]
        self._residuals[snapshot.fragment] = fresh

    def residual(self, fragment: int) -> torch.Tensor | None:
        """Return what was learnt and is in no anchor nor the parameters; None is zero."""
        return self._residuals[fragment]

    def forget_residual(self, fragment: int) -> None:
        """Drop a residual that may have been sent already."""
        self._residuals[fragment] = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return anchors, velocities and residuals by name; not copies."""
        found = {}
        for fragment in range(len(self.fragment_elements)):
            anchor = self.anchor(fragment)
            found[f"anchor.{fragment}"] = anchor.values
            if anchor.velocity is not None:
                found[f"velocity.{fragment}"] = anchor.velocity
            residual = self._residuals[fragment]
            if residual is not None:
                found[f"residual.{fragment}"] = residual
        return found

    def meta(self) -> dict[str, Any]:
        """Return versions and token counts, JSON-able."""
        stamps = [self.anchor(f).stamp for f in range(len(self.fragment_elements))]
        return {
            "fragment_elements": list(self.fragment_elements),
            "versions": [stamp.version for stamp in stamps],
            "tokens": [stamp.tokens for stamp in stamps],
            "digests": [stamp.digest for stamp in stamps],
            "tokens_since": [self.tokens_seen - merged for merged in self._tokens_merged],
            "measured_from": list(self._measured_from),
        }

    def load(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Take back what `tensors` and `meta` returned; copies.

        Raises:
            SwarmError: it belongs to another model, or its bytes have changed.
        """
        if list(meta["fragment_elements"]) != list(self.fragment_elements):
            raise SwarmError(
                "the checkpoint's swarm state has other fragments than this run; resume with the "
                "model and fragments it was saved with"
            )
        for fragment, (version, tokens, digest) in enumerate(
            zip(meta["versions"], meta["tokens"], meta["digests"], strict=True)
        ):
            values = tensors[f"anchor.{fragment}"].detach().clone()
            velocity = tensors.get(f"velocity.{fragment}")
            self.check_size(fragment, values)
            if digest_of(values, velocity) != digest:
                raise SwarmError(f"anchor {fragment} of the checkpoint is damaged: wrong hash")
            if self.momentum * values.numel() == (0 if velocity is None else velocity.numel()):
                kept = None if velocity is None else velocity.detach().clone()
                anchor = Anchor(values, kept, Stamp(version, tokens, digest))
            else:  # the run's outer update has changed since
                anchor = self.fresh(values, version=version, tokens=tokens)
            self.place(fragment, anchor)
            residual = tensors.get(f"residual.{fragment}")
            if residual is not None:
                self.check_size(fragment, residual)
                residual = residual.detach().clone()
            self._residuals[fragment] = residual
        self._tokens_merged = [self.tokens_seen - since for since in meta["tokens_since"]]
        self._measured_from = list(meta.get("measured_from", meta["versions"]))


def whole(elements: int) -> tuple[Span, ...]:
    """Return the one span that covers a fragment."""
    return (Span(0, elements),)


def joined_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts with neighbours of the same contributors joined to one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.span.stop == part.span.start and last.contributors == part.contributors:
            found[-1] = Part(Span(last.span.start, part.span.stop), last.contributors)
        else:
            found.append(part)
    return tuple(found)


def split_parts(parts: Iterable[Part], peer_id: str) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the spans without, and those with, a contribution of `peer_id`."""
    parts = tuple(parts)
    with_peer = tuple(part.span for part in parts if peer_id in part.contributors)
    return tuple(p.span for p in parts if peer_id not in p.contributors), with_peer

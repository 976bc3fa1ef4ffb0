"""All anchors of one peer, and how they reach the model that is being trained.

Replacing an anchor and moving the local parameters is one act (`merge`), done by the training
thread between two steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm.anchors.anchors import HASH, OLD_HASH, Anchor, Merge, Snapshot, digest_of
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.updates import DROPPED
from atomtrain.swarm.codecs.codec import all_finite
from atomtrain.swarm.codecs.slices import Span, piece_spans

_log = logging.getLogger("atomtrain.swarm")
_CACHED_ELEMENTS = 1 << 16
"""For each thread."""
_HAD = 32
"""Anchors of a fragment that a peer remembers to have had."""


class FragmentAccess(Protocol):
    """How the swarm reaches the model that is being trained."""

    def view(self, index: int) -> AbstractContextManager[torch.Tensor]:
        """Lend the 1-D float32 CPU view of a fragment's local parameters, exclusively."""
        ...


class GradientAccess(FragmentAccess, Protocol):
    """How the swarm reaches a model whose gradients are averaged."""

    def gradient(self, index: int) -> AbstractContextManager[torch.Tensor]:
        """Lend the mean gradient, 1-D float32, since `forget`; not to be changed."""
        ...

    def forget(self, index: int) -> None:
        """Begin to accumulate anew: the parameters have moved."""
        ...


@runtime_checkable
class MomentsAccess(FragmentAccess, Protocol):
    """How the swarm reaches a model whose optimizer remembers former steps."""

    def forget_moments(self) -> None:
        """Have the optimizer begin anew."""
        ...


class Holding(NamedTuple):
    """All that a store knows of one fragment; see `AnchorStore.hold`."""

    anchor: Anchor | None
    tokens_merged: int
    measured_from: int
    residual: torch.Tensor | None
    velocity: torch.Tensor | None


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
        self._had = [deque[Stamp](maxlen=_HAD) for _ in fragment_elements]
        """Stamps of the last anchors, for those who ask."""
        self._tokens_merged = [0] * len(fragment_elements)
        self._measured_from = [0] * len(fragment_elements)
        self._residuals: list[torch.Tensor | None] = [None] * len(fragment_elements)
        self._velocities: list[torch.Tensor | None] = [None] * len(fragment_elements)
        """Beside grouped anchors, which have none."""
        self._began_tokens = -1
        """`tokens_seen` when the parameters last became the anchors again; -1: never."""

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
        self._begin_at(fragment, anchor)
        self._remember(fragment, anchor.stamp)

    def _begin_at(self, fragment: int, anchor: Anchor) -> None:
        self._put(fragment, anchor, None)
        self._measured_from[fragment] = anchor.stamp.version

    def _remember(self, fragment: int, stamp: Stamp) -> None:
        """Say to those who ask that this peer has had an anchor: not before it has stood trial."""
        had = self._had[fragment]
        if not had or had[-1] != stamp:
            had.append(stamp)

    def drop_momentum(self, fragment: int) -> bool:
        """Have the next round take a plain step from a fragment's anchor; return whether it will.

        The values stay, and the velocity is dropped. Everybody who does it has the same anchor, bit
        for bit, of one version more: so it wins over the one with momentum.
        """
        if self.gradients or not self.momentum:
            return False
        old, velocity = self.anchor(fragment), self.velocity(fragment)
        dropped = torch.full((self.momentum * old.values.numel(),), DROPPED)
        if velocity is not None and same_bits(dropped, velocity):
            return False
        if old.grouped:
            self._velocities[fragment] = dropped
            return True
        version = old.stamp.next(0).version
        stamp = Stamp(version, old.stamp.tokens, digest_of(old.values, dropped))
        self._anchors[fragment] = replace(old, velocity=dropped, stamp=stamp)
        self._remember(fragment, stamp)
        if self._measured_from[fragment] == old.stamp.version:
            self._measured_from[fragment] = version
        return True

    def _put(self, fragment: int, anchor: Anchor, velocity: torch.Tensor | None) -> None:
        kept = self.velocity(fragment) if velocity is None else velocity
        self._velocities[fragment] = kept if anchor.grouped else None
        self._anchors[fragment] = anchor

    def had(self, fragment: int, stamp: Stamp) -> bool:
        """Say whether an anchor is, or was not long ago, this peer's; from any thread."""
        return stamp in self._had[fragment].copy()

    def velocity(self, fragment: int) -> torch.Tensor | None:
        """Return the velocity that this peer's next change meets; None: zero, or none at all."""
        anchor = self._anchors[fragment]
        if anchor is None or anchor.grouped:
            return self._velocities[fragment]
        return anchor.velocity

    def anchor(self, fragment: int) -> Anchor:
        """Return a fragment's anchor.

        Raises:
            SwarmError: it has not been downloaded yet.
        """
        anchor = self._anchors[fragment]
        if anchor is None:
            raise SwarmError(f"fragment {fragment} has no anchor yet; call download() first")
        return anchor

    def grouped(self, fragment: int) -> bool:
        """Say whether one of several groups made a fragment's anchor."""
        anchor = self._anchors[fragment]
        return anchor is not None and anchor.grouped

    def stamps(self) -> tuple[Stamp | None, ...]:
        """Return every fragment's stamp; None where there is no anchor yet."""
        return tuple(None if a is None else a.stamp for a in self._anchors)

    def unmerged_tokens(self, fragment: int) -> int:
        """Return how many of this peer's tokens went into no anchor of a fragment yet."""
        return self.tokens_seen - self._tokens_merged[fragment]

    def holds_progress(self, fragment: int) -> bool:
        """Say whether this peer has learnt what merging another anchor leaves in the parameters."""
        learnt = self.unmerged_tokens(fragment) > 0 or self._residuals[fragment] is not None
        return learnt and not self.gradients

    def snapshot(self, fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
        """Copy a fragment's parameters to `into` for a round."""
        self.check_size(fragment, local)
        weight = self.unmerged_tokens(fragment)
        values = into.copy_(local.detach())
        anchor = self.anchor(fragment)
        return Snapshot(
            fragment,
            values,
            anchor,
            weight,
            self.tokens_seen,
            self.gradients,
            late=self._measured_from[fragment] < anchor.stamp.version,
            residual=self._residuals[fragment],
            velocity=self.velocity(fragment),
        )

    def is_sound(self, access: FragmentAccess) -> bool:
        """Say whether all parameters are finite."""
        for fragment in range(len(self.fragment_elements)):
            with access.view(fragment) as local:
                if not all_finite(local.detach()):
                    return False
        return True

    def begin_again(self, access: FragmentAccess) -> None:
        """Have the parameters be the anchors, and the optimizer know nothing; the log is told.

        For parameters, or a gradient, that are not finite: anchors always are, and whatever else
        a step has reached is spoilt.
        """
        _log.warning("what this peer has learnt is not finite: it goes back to its last anchors, "
                     "and its optimizer begins anew")  # fmt: skip
        for fragment, anchor in enumerate(self._anchors):
            if anchor is not None:
                with access.view(fragment) as local:
                    self._restart(fragment, anchor, local)
                if self.gradients:
                    cast(GradientAccess, access).forget(fragment)
        if isinstance(access, MomentsAccess):
            access.forget_moments()
        self._began_tokens = self.tokens_seen

    def fitting(self, merge: Merge) -> Merge:
        """Return a merge without its snapshot, if the parameters have become anchors since."""
        snapshot = merge.snapshot
        spoilt = snapshot is not None and snapshot.tokens_seen <= self._began_tokens
        return merge.as_given() if spoilt else merge

    def merge_into(self, access: FragmentAccess, merge: Merge) -> None:
        """Merge into the model that `access` leads to."""
        with access.view(merge.fragment) as local:
            self.check_size(merge.fragment, local)
            self.merge(merge, local)
        self._remember(merge.fragment, merge.anchor.stamp)
        if self.gradients:
            cast(GradientAccess, access).forget(merge.fragment)

    def merge(self, merge: Merge, local: torch.Tensor) -> None:
        """Put the new anchor in place and move `local`; progress since the snapshot is kept.

        Where the snapshot's contribution is in the anchor, local progress is what happened since
        the snapshot; elsewhere it is all that differs from the old anchor. The residual follows the
        same rule: what encoding lost takes its place only where the contribution was used, so that
        local minus anchor, plus residual, is at any time what no anchor contains yet. A
        restart drops both.
        """
        merge = self.fitting(merge)
        old, new = self.anchor(merge.fragment).values, merge.anchor.values
        if self.gradients and not merge.restart:
            local.copy_(new)
            self._tokens_merged[merge.fragment] = self.tokens_seen
            if merge.snapshot is not None and merge.contributed:
                self._advance_residual(merge.snapshot, merge.contributed)
            self._begin_at(merge.fragment, merge.anchor)
            return
        if merge.restart:
            self._restart(merge.fragment, merge.anchor, local)
            return
        for start, stop in _cached(merge.changed):
            local[start:stop].sub_(old[start:stop]).add_(new[start:stop])
        if merge.snapshot is not None and merge.contributed:
            taken = merge.snapshot.values
            # An anchor that is the snapshot itself (a peer alone) must leave no rounding behind:
            # alone in a swarm is then the same as without one, bit for bit.
            if new is not taken:
                self._advance_residual(merge.snapshot, merge.contributed)
                for start, stop in _cached(merge.contributed):
                    progress = local[start:stop].sub_(taken[start:stop])
                    self._hold_back(merge.fragment, Span(start, stop), progress)
                    progress.add_(new[start:stop])
            self._tokens_merged[merge.fragment] = merge.snapshot.tokens_seen
            self._measured_from[merge.fragment] = merge.anchor.stamp.version
        self._put(merge.fragment, merge.anchor, merge.velocity)

    def _restart(self, fragment: int, anchor: Anchor, local: torch.Tensor) -> None:
        local.copy_(anchor.values)
        self._tokens_merged[fragment] = self.tokens_seen
        self.forget_residual(fragment)
        self._begin_at(fragment, anchor)
        self._velocities[fragment] = None

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

    def holding(self, fragment: int) -> Holding:
        """Return what there is of a fragment, which later merges do not change."""
        residual = self._residuals[fragment]
        return Holding(
            self._anchors[fragment],
            self._tokens_merged[fragment],
            self._measured_from[fragment],
            None if residual is None else residual.clone(),  # merges may add to it in its place
            self._velocities[fragment],
        )

    def hold(self, fragment: int, holding: Holding) -> None:
        """Have a fragment as `holding` has returned it; the parameters are the caller's matter."""
        self._anchors[fragment] = holding.anchor
        if holding.anchor is not None:
            self._remember(fragment, holding.anchor.stamp)
        self._tokens_merged[fragment] = holding.tokens_merged
        self._measured_from[fragment] = holding.measured_from
        self._residuals[fragment] = holding.residual
        self._velocities[fragment] = holding.velocity

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
            velocity = self.velocity(fragment)
            if velocity is not None:
                found[f"velocity.{fragment}"] = velocity
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
            "hash": HASH,
            "tokens_since": [self.tokens_seen - merged for merged in self._tokens_merged],
            "measured_from": list(self._measured_from),
            "grouped": [a is not None and a.grouped for a in self._anchors],
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
        name = meta.get("hash", OLD_HASH)
        for fragment, (version, tokens, digest) in enumerate(
            zip(meta["versions"], meta["tokens"], meta["digests"], strict=True)
        ):
            values = tensors[f"anchor.{fragment}"].detach().clone()
            velocity = tensors.get(f"velocity.{fragment}")
            self.check_size(fragment, values)
            grouped = bool(meta.get("grouped", [False] * (fragment + 1))[fragment])
            hashed = None if grouped else velocity
            if digest_of(values, hashed, name) != digest:
                raise SwarmError(f"anchor {fragment} of the checkpoint is damaged: wrong hash")
            if name != HASH:
                digest = digest_of(values, hashed)  # noqa: PLW2901 - the one that peers use now
            fits = self.momentum * values.numel() == (0 if velocity is None else velocity.numel())
            kept = None if velocity is None or not fits else velocity.detach().clone()
            stamp = Stamp(version, tokens, digest)
            if grouped:
                anchor = Anchor(values, None, stamp, grouped=True)
            elif fits:
                anchor = Anchor(values, kept, stamp)
            else:  # the run's outer update has changed since
                anchor = self.fresh(values, version=version, tokens=tokens)
            self.place(fragment, anchor)
            if grouped:
                self._velocities[fragment] = kept
            residual = tensors.get(f"residual.{fragment}")
            if residual is not None:
                self.check_size(fragment, residual)
                residual = residual.detach().clone()
            self._residuals[fragment] = residual
        self._tokens_merged = [self.tokens_seen - since for since in meta["tokens_since"]]
        self._measured_from = list(meta.get("measured_from", meta["versions"]))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two float32 tensors are equal, and their zeros of the same sign."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _cached(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans cut so that several operations in turn find their numbers in the caches."""
    elements = _CACHED_ELEMENTS * torch.get_num_threads()
    for span in spans:
        yield from piece_spans(span, elements)

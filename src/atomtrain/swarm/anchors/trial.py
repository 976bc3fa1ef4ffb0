"""Trials: an anchor is judged by what it does to this peer's own loss on its own text.

A stamp is a claim, and finite numbers prove nothing. What others cannot fake is the loss that this
peer measures itself. So a merge is done, the loss measured, and the merge undone if that got worse:
parameters and bookkeeping are what they were, bit for bit. Until a trial has ended nobody else sees
the anchor that is tried.

Everything here runs on the training thread, between two steps. Judging may take long, so it holds
no lock.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from atomtrain.swarm.anchors.anchor_store import (
    AnchorStore,
    FragmentAccess,
    GradientAccess,
    Holding,
)
from atomtrain.swarm.anchors.anchors import Anchor, Merge, whole
from atomtrain.swarm.anchors.buffer_pool import pooled_copy
from atomtrain.swarm.anchors.losses import Cost, Judge, Losses
from atomtrain.swarm.anchors.moves import Moves
from atomtrain.swarm.anchors.stamps import Stamp, steady_s

_log = logging.getLogger("atomtrain.swarm")
_HELD_S = 600.0
"""How long a fetched anchor may wait for those of other fragments, which it may need."""
_REFUSED_IN_A_ROW = 2
"""Rounds of a fragment after which its momentum is dropped. Where all peers are about where they
want to be, momentum carries an honest mean beyond, and would do it again in each round."""


class Refusal(NamedTuple):
    """An anchor that this peer will not have."""

    fragment: int
    stamp: Stamp
    donor: str
    """Who gave it; empty: a round made it, and this peer was in it."""


class _Moved(NamedTuple):
    """A fragment whose parameters are those after a merge, and its bookkeeping that before."""

    fragment: int
    values: torch.Tensor
    """The parameters before."""
    after: Holding


class Trial:
    """Merges what does no harm; for one training thread."""

    def __init__(
        self,
        judge: Judge,
        store: AnchorStore,
        lock: AbstractContextManager[object],
        on_refusal: Callable[[Refusal], None],
        clock: Callable[[], float] = steady_s,
    ) -> None:
        """Judge merges into `store`, which is used under `lock` only.

        `on_refusal` is called for each anchor that is refused.
        """
        self._on_refusal = on_refusal
        self._judge, self._store, self._lock, self._clock = judge, store, lock, clock
        self._cost = Cost(clock)
        self._losses = Losses()
        self._moves = Moves(clock)
        self._last = math.nan
        """The loss when merges were last judged; not a number before that."""
        self._good: dict[int, Anchor] = {}
        """By fragment: the anchor before the first round that was not judged yet."""
        self._refused: Counter[int] = Counter()
        """By fragment: how many rounds in a row were refused."""
        self._held = 0
        self._held_since_s = 0.0

    def loss(self) -> float:
        """Return the loss of the model as it is now."""
        return self._cost.measured(self._judge)

    def _sound_loss(self, access: FragmentAccess) -> float:
        """Return the loss before a merge, of parameters that are finite.

        If a step has made others, that is this peer's own fault, and says nothing of what is given.
        """
        loss = self.loss()
        if math.isfinite(loss):
            return loss
        with self._lock:
            if self._store.is_sound(access):
                return loss
            self._store.begin_again(access)
        return self.loss()

    def _loss_before(self, access: FragmentAccess) -> float:
        """Return the same; what has changed since the last trial is due to this peer's steps."""
        loss = self._sound_loss(access)
        self._losses.grew(self._last, loss)
        return loss

    def objection(self, before: float) -> str:
        """Return why the model as it is now is worse than another one was, if it is."""
        after = self.loss()
        why = self._losses.objection(after, before)
        if not why:
            self._keep(after)
        return why

    # Rounds ---------------------------------------------------------------------------------

    def take_round(self, merge: Merge, access: FragmentAccess, round_index: int) -> str:
        """Merge what a round has made; return why it was undone, or nothing.

        What this peer has made alone is not judged, but counts as a round where others wait to be.
        Peers count rounds alike, and every number of rounds divides the larger ones: so peers that
        judge seldom do it at the same rounds as the others, and come back to the same anchors.
        """
        alone, old = not merge.anchor.origin.round_id, self._store.anchor(merge.fragment)
        if not alone:
            self._cost.on_round()
        every = self._cost.every
        if alone or every > 1:
            if not alone:
                self._good.setdefault(merge.fragment, old)
            with self._lock:
                self._store.merge_into(access, merge)
            if alone:
                self._moves.note(merge.fragment, old, merge.anchor)
            due = self._good and round_index % every == 0
            return self._look_back(access) if due else ""
        if self._good and (why := self._look_back(access)):
            return why  # what this round has made may be made of what was given up
        before = self._loss_before(access)
        why = self._attempt([merge], access, before)
        if why:
            self._count(merge.fragment)
            self._refuse(merge, why)
        else:
            del self._refused[merge.fragment]
            self._moves.note(merge.fragment, old, merge.anchor)
        return why

    def _count(self, fragment: int) -> None:
        """Count a round that was refused; drop the momentum if it may be the reason."""
        self._refused[fragment] += 1
        if self._refused[fragment] < _REFUSED_IN_A_ROW:
            return
        del self._refused[fragment]
        with self._lock:
            dropped = self._store.drop_momentum(fragment)
        if dropped:
            _log.warning(
                "fragment %d: %d rounds in a row did harm, so its outer momentum is dropped",
                fragment, _REFUSED_IN_A_ROW,
            )  # fmt: skip

    def _look_back(self, access: FragmentAccess) -> str:
        """Judge all rounds since the last time; go back to the anchors before if that helps.

        It is a trial, too: if the loss is no better there, this peer's own steps have raised it.
        """
        good, self._good = self._good, {}
        now = self._sound_loss(access)
        why = self._losses.objection(now, self._last)
        if not why:
            for fragment, anchor in good.items():
                del self._refused[fragment]
                self._moves.note(fragment, anchor, self._store.anchor(fragment))
            self._keep(now)
            return ""
        restart = not math.isfinite(now)
        back = [Merge(f, a, whole(a.values.numel()), restart=restart) for f, a in good.items()]
        given_up = [(f, self._store.anchor(f).stamp) for f in good]
        moved = self._move(back, access)
        then = self._judged(moved, access)
        self._losses.grew(self._last, then)
        helped = bool(self._losses.objection(now, then))
        self._settle(moved, access, keep=helped)
        self._keep(then if helped else now)
        if not helped:
            return ""
        _log.warning("going back to the last good anchors, before %d fragments' last rounds: %s",
                     len(good), why)  # fmt: skip
        for fragment, stamp in given_up:
            self._count(fragment)
            self._on_refusal(Refusal(fragment, stamp, ""))
        return f"back to the last good anchors: {why}"

    # What others give -----------------------------------------------------------------------

    def ready(self, waiting: int, *, coming: bool) -> bool:
        """Say whether so many fetched anchors are to be tried now, while others are `coming`.

        Those that did harm without the others are tried again when there are twice as many.
        """
        return self._is_last(coming=coming) or waiting >= max(1, 2 * self._held)

    def _is_last(self, *, coming: bool) -> bool:
        too_long = self._held > 0 and self._clock() - self._held_since_s > _HELD_S
        return not coming or too_long

    def take_fetched(
        self, merges: Sequence[Merge], access: FragmentAccess, *, coming: bool
    ) -> list[str | None]:
        """Merge anchors that others have made; return of each why it is refused, if it is.

        None stands for those that wait: fragments of different age may fit each other badly, so
        while others are `coming` nothing is refused.

        An anchor may contain what this peer has learnt alone already, or suit it badly. So one that
        does harm together with that is tried by itself before it is refused: this peer starts again
        from it, and gives up its own progress.

        What rounds cannot have moved so far is not tried at all.
        """
        if self._good:
            self._look_back(access)
        far = [self._moves.objection(m.fragment, self._own(m), m.anchor) for m in merges]
        if any(far):
            near = [m for m, reason in zip(merges, far, strict=True) if not reason]
            tried = iter(self.take_fetched(near, access, coming=coming) if near else ())
            for merge, reason in zip(merges, far, strict=True):
                if reason:
                    self._refuse(merge, reason)
            return [reason or next(tried) for reason in far]
        before = self._loss_before(access)
        odd = frozenset(m.fragment for m in merges if self._odd(m))
        why = self._attempt(merges, access, before, odd)
        last = self._is_last(coming=coming)
        if why and not last:
            self._held_since_s = self._held_since_s if self._held else self._clock()
            self._held = len(merges)
            return [None] * len(merges)
        self._held = 0
        found: list[str | None] = [why] * len(merges)
        if why and len(merges) > 1:  # some of them may be good
            found = [self._attempt([m], access, self._last, odd) for m in merges]
        self._start_again(merges, found, access, odd)
        for merge, said in zip(merges, found, strict=True):
            if said:
                self._refuse(merge, said)
        return found

    def _own(self, merge: Merge) -> Anchor:
        return self._store.anchor(merge.fragment)

    def _odd(self, merge: Merge) -> bool:
        """Say whether no round speaks for an anchor: a hash does, or it is far away."""
        own = self._own(merge)
        tied = merge.anchor.stamp.ties(own.stamp)
        return tied or not self._moves.explain(merge.fragment, own, merge.anchor)

    def _start_again(
        self,
        merges: Sequence[Merge],
        found: list[str | None],
        access: FragmentAccess,
        odd: Collection[int],
    ) -> None:
        """Try refused anchors without this peer's own progress; forget why of those it takes.

        First all at once: they may fit only each other.
        """
        places = [
            place
            for place, why in enumerate(found)
            if why and self._store.holds_progress(merges[place].fragment)
        ]
        tries = [places, *([place] for place in places if len(places) > 1)] if places else []
        for chosen in tries:
            restarts = [_restart(merges[place]) for place in chosen]
            if self._attempt(restarts, access, self._last, odd):
                continue
            fragments = [merge.fragment for merge in restarts]
            _log.warning("fragments %s: this peer starts again from the fetched anchors, which do "
                         "harm together with its own progress", fragments)  # fmt: skip
            for place in chosen:
                found[place] = ""
            if chosen is places:
                return

    # Merges that can be undone --------------------------------------------------------------

    def _attempt(
        self,
        merges: Sequence[Merge],
        access: FragmentAccess,
        before: float,
        odd: Collection[int] = (),
    ) -> str:
        """Merge all or nothing; return why nothing. Of `odd` fragments the loss may hardly rise."""
        moved = self._move(merges, access)
        after = self._judged(moved, access)
        close = any(merge.fragment in odd for merge in merges)
        why = self._losses.objection(after, before, close=close)
        self._settle(moved, access, keep=not why)
        self._keep(before if why else after)
        return why

    def _keep(self, loss: float) -> None:
        self._last = loss
        self._losses.note(loss)

    def _judged(self, moved: Sequence[_Moved], access: FragmentAccess) -> float:
        """Return the loss; if it cannot be had, nothing has moved."""
        try:
            return self.loss()
        except BaseException:
            self._settle(moved, access, keep=False)
            raise

    def _move(self, merges: Sequence[Merge], access: FragmentAccess) -> list[_Moved]:
        """Have the parameters as they are after merges; the bookkeeping stays as it is."""
        moved = []
        with self._lock:
            for merge in merges:
                with access.view(merge.fragment) as local:
                    self._store.check_size(merge.fragment, local)
                    values = pooled_copy(local.detach())
                    before = self._store.holding(merge.fragment)
                    self._store.merge(merge, local)
                    after = self._store.holding(merge.fragment)
                    self._store.hold(merge.fragment, before)
                moved.append(_Moved(merge.fragment, values, after))
        return moved

    def _settle(self, moved: Sequence[_Moved], access: FragmentAccess, *, keep: bool) -> None:
        """Have the bookkeeping follow the parameters, or the parameters go back."""
        with self._lock:
            for fragment, values, after in moved:
                if keep:
                    self._store.hold(fragment, after)
                    if self._store.gradients:
                        cast(GradientAccess, access).forget(fragment)
                else:
                    with access.view(fragment) as local:
                        local.copy_(values)

    def _refuse(self, merge: Merge, why: str) -> None:
        own, fragment = self._store.anchor(merge.fragment).stamp, merge.fragment
        what = (
            f"the anchor that peer {merge.donor[-8:]} gave" if merge.donor else "a round's result"
        )
        _log.warning(
            "%s for fragment %d is refused and undone: %s; this peer goes on from its own, "
            "version %d", what, fragment, why, own.version,
        )  # fmt: skip
        self._on_refusal(Refusal(fragment, merge.anchor.stamp, merge.donor))


def _restart(merge: Merge) -> Merge:
    """Return the merge that leaves nothing but its anchor."""
    elements = merge.anchor.values.numel()
    return replace(merge, changed=whole(elements), snapshot=None, contributed=(), restart=True)

"""What a peer's own loss says of a merge: by how much it may rise, and how often it is measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median_low

Judge = Callable[[], float]
"""Returns the mean loss, nats per token, of the model as it is now, on a few sequences of this
peer's own text: always the same ones, and nothing else changes by it."""
MARGIN_SHARE = 0.2
"""Share of the loss by which a merge may raise it. Outer momentum overshoots: honest merges were
seen to raise it by 9% (rate 0.7, momentum 0.9, 100 steps) and 5% (0.5, 0.5, 20 steps)."""
MARGIN_NATS = 0.05
"""At least this much, where the loss is so small that chance moves it by more than that share."""
CLOSE_SHARE, CLOSE_NATS = 0.05, 0.02
"""The same for an anchor of others for which no round speaks: one that is further away than rounds
go, or has nothing but a hash before this peer's own. Halves that learnt as long differ by less."""
DRIFT_SHARE = 0.4
"""Share by which merges may raise the loss above the lowest one seen lately, step by step: two
margins, so that a run that stumbles by itself is not kept from averaging."""
DRIFT_NATS = 0.1
"""At least this much: two margins, too."""
LATELY = 32
"""Losses that are remembered for that."""
COST_SHARE = 0.01
"""Share of the time that judging rounds may take."""
MOST_UNJUDGED = 16
"""Rounds after which the loss is measured in any case; a power of two."""
_PACE_ROUNDS = 8


class Losses:
    """What this peer's loss was lately, and what is too much."""

    def __init__(self) -> None:
        """Know none yet."""
        self._seen: deque[float] = deque(maxlen=LATELY)

    def note(self, loss: float) -> None:
        """Remember the loss of a model that this peer goes on with."""
        if math.isfinite(loss):
            self._seen.append(loss)

    def grew(self, before: float, after: float) -> None:
        """Hear what this peer's own steps made of the loss: no merge is to blame if they raise it.

        Without this, whoever learns too few texts by heart would refuse all merges in the end.
        """
        if after > before:
            self._seen = deque((loss + after - before for loss in self._seen), maxlen=LATELY)

    def objection(self, after: float, before: float, *, close: bool = False) -> str:
        """Return why a merge that changes the loss like this is not taken, or an empty string.

        With `close` it may hardly rise.
        """
        share, nats = (CLOSE_SHARE, CLOSE_NATS) if close else (MARGIN_SHARE, MARGIN_NATS)
        if not math.isfinite(after):
            return f"this peer's loss on its own text would be {after} instead of {before:.3f}"
        if after > before + max(nats, share * abs(before)):
            return (
                f"this peer's loss on its own text would rise from {before:.3f} to {after:.3f} "
                "nats per token"
            )
        lowest = min(self._seen, default=before)
        if after > before and after > lowest + max(DRIFT_NATS, DRIFT_SHARE * abs(lowest)):
            return (
                f"this peer's loss on its own text would rise to {after:.3f} nats per token, and "
                f"was {lowest:.3f} not long ago"
            )
        return ""


class Cost:
    """What judging takes, and how often rounds can be judged."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know nothing yet; `clock` is in seconds."""
        self._clock = clock
        self._judged_s: deque[float] = deque(maxlen=_PACE_ROUNDS)
        self._rounds_s: deque[float] = deque(maxlen=_PACE_ROUNDS + 1)

    def measured(self, judge: Judge) -> float:
        """Return what `judge` does, and remember how long it took."""
        begun_s = self._clock()
        loss = judge()
        self._judged_s.append(self._clock() - begun_s)
        return loss

    def on_round(self) -> None:
        """Hear that a round has brought something to merge."""
        self._rounds_s.append(self._clock())

    @property
    def every(self) -> int:
        """How many rounds are judged together; a power of two.

        1: each by itself, before and after its merge. With more the loss is measured once.
        """
        if len(self._rounds_s) < 2 or not self._judged_s:
            return 1
        judged_s = median_low(self._judged_s)  # the first one prepares much, others may be held up
        between_s = (self._rounds_s[-1] - self._rounds_s[0]) / (len(self._rounds_s) - 1)
        every = 1
        while every < MOST_UNJUDGED:
            judgements = 2 if every == 1 else 1
            if judgements * judged_s <= COST_SHARE * every * between_s:
                break
            every *= 2
        return every

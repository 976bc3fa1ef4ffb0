"""What the benchmark of networks measures of a method."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from atombench.links.peers import Reply


class Measured(NamedTuple):
    """One measurement of one method, all peers together."""

    tokens_per_s: float
    sent_bytes_per_token: float
    """Bytes on the wire of all peers, headers included, for each token."""
    steps: int
    loss: float
    """Mean over the steps."""
    losses: list[float]
    """Of each step, in order."""
    elapsed_s: float
    warm_up: int
    """Steps before these that trained too, and are counted in none of the others."""
    compute_s: tuple[float, ...] = ()
    """Of pipelines: what each stage's operations of a step took of a core meanwhile; of several
    side by side the mean."""

    def plain(self) -> dict[str, Any]:
        """Return everything but the losses of the steps."""
        values = self._asdict()
        del values["losses"]
        if not self.compute_s:
            del values["compute_s"]
        return values


def by_stage(replies: Sequence[Reply], pipelines: int) -> tuple[float, ...]:
    """Return the seconds that each stage computed; of several pipelines the mean."""
    stages = len(replies) // pipelines
    return tuple(
        statistics.fmean(reply["compute_s"] for reply in replies[stage::stages])
        for stage in range(stages)
    )


def measured(replies: list[Reply], tokens_per_step: int, steps: int, warm_up: int) -> Measured:
    """Put the answers of all peers together, whose steps were timed after those of `warm_up`."""
    ended_s = max(reply["ended_s"] for reply in replies)
    elapsed_s = ended_s - min(reply["started_s"] for reply in replies)
    tokens = tokens_per_step * steps
    # A pipeline's last rank alone knows the loss; with data parallelism each has its own.
    known = [reply["losses"] for reply in replies if reply["losses"]]
    losses = [statistics.fmean(each) for each in zip(*known, strict=True)]
    return Measured(
        tokens / elapsed_s,
        sum(reply["sent_bytes"] for reply in replies) / tokens,
        steps,
        statistics.fmean(losses),
        losses,
        elapsed_s,
        warm_up,
    )

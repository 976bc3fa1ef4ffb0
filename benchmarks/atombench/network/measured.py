"""What the benchmark of networks measures of a method, and its losses over time and tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atombench.common import Result
from atombench.links.peers import Reply
from atombench.network.atom_method import BEFORE_STEPS, LOSSES_OF_PEERS
from atomtrain.data.corpus import demo_texts


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


_SMOOTHED = 5
"""Losses of so many steps are averaged before they are compared."""
_TEXT_FILE = "king-james-bible.txt"


def demonstration_text(folder: Path) -> str:
    """Write the demonstration corpus to a file in a folder; return its path.

    Raises:
        DataError: it is not installed; says how to get it.
    """
    path = folder / _TEXT_FILE
    path.write_text("\n\n".join(text for _, text in demo_texts()), encoding="utf-8")
    return str(path)


def curve_of_atom(result: Mapping[str, Any], tokens_per_step: int) -> Result:
    """Return the mean loss of ATOM's peers, of what `AtomMethod.measure` found."""
    peers: list[list[float]] = result[LOSSES_OF_PEERS]
    steps = min(len(losses) for losses in peers)
    losses = [statistics.fmean(each) for each in zip(*(x[:steps] for x in peers), strict=True)]
    step_s = result["window_s"] / max(len(each) for each in peers)
    return curve(losses, step_s, tokens_per_step, result[BEFORE_STEPS])


def curve_of_measured(measured: Measured, tokens_per_step: int) -> Result:
    """Return a baseline's."""
    step_s = measured.elapsed_s / measured.steps
    return curve(measured.losses, step_s, tokens_per_step, measured.warm_up)


def curve(losses: Sequence[float], step_s: float, tokens: int, before: int) -> Result:
    """Return loss at the end of each step; `before` steps were made and not timed."""
    ends = [before + index + 1 for index in range(len(losses))]
    return {
        "seconds": [step_s * end for end in ends],
        "tokens": [tokens * end for end in ends],
        "loss": list(losses),
    }


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return means over the last few steps, as many as there are."""
    return [
        statistics.fmean(losses[max(0, end - _SMOOTHED) : end]) for end in range(1, len(losses) + 1)
    ]

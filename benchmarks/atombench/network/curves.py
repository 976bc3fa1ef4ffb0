"""Loss over time and tokens, alike for all methods that `network` and `time-to-loss` compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atombench.common import Result
from atombench.network.atom_method import BEFORE_STEPS, LOSSES_OF_PEERS
from atombench.network.measured import Measured
from atomtrain.data.corpus import demo_texts

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

"""At which rate of links a pipeline and ATOM train equally many tokens a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


def break_even_bits_per_s(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the rate above which the pipeline is faster, by `ratio` at each `link_bits_per_s`.

    Between two links both are taken to change by powers. 0: the pipeline is faster on all links;
    `None`: on none of them.
    """
    points = sorted((row["link_bits_per_s"], row["ratio"]) for row in rows)
    for (rate, ratio), (faster, after) in reversed(list(pairwise(points))):
        if ratio >= 1 > after:
            share = math.log(ratio) / math.log(ratio / after)
            return float(rate * (faster / rate) ** share)
    return 0.0 if points and points[-1][1] < 1 else None

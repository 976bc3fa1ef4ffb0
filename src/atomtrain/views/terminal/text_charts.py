"""Charts made of characters: a curve in Braille dots, a step as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each of a character's 4 by 2 dots, by row and column (Unicode, block U+2800)."""
STREAMS = ("load", "fetch", "compute", "save", "unload", "read", "update", "write")
PHASE_MARKS = {"forward": "█", "turn": "▓", "backward": "▒"}
_OTHER_MARK = "░"


class Bar(NamedTuple):
    """One stream of a step."""

    stream: str
    cells: str
    """One character for each piece of time: how the phase there is drawn, or a space."""
    busy_share: float


def curve(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    form: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> list[str]:
    """Return a curve as lines of text: a scale on the left, dots on the right.

    Args:
        points: x and y, by ascending x; those that are not finite are left out.
        width: Columns of the whole.
        height: Lines.
        form: Writes the ends of the scale.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points or height < 1:
        return ["nothing yet"] if height else []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [form(high), *[""] * (height - 2), form(low)][:height]
    margin = max(map(len, labels)) + 1
    columns = 2 * max(1, width - margin)
    rows = 4 * height
    first, last = points[0][0], points[-1][0]
    cells = [[0] * (columns // 2) for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((columns - 1) * (x - first) / (last - first)) if last > first else 0
        row = round((rows - 1) * (high - y) / (high - low)) if high > low else rows // 2
        for at, dot in _between(before, (column, row)):
            cells[dot // 4][at // 2] |= _DOTS[dot % 4][at % 2]
        before = (column, row)
    return [
        f"{label:>{margin - 1}} " + "".join(chr(_BRAILLE | cell) for cell in line)
        for label, line in zip(labels, cells, strict=True)
    ]


def bars(spans: Sequence[Sequence[object]], width: int) -> list[Bar]:
    """Return each stream of a step as a bar.

    Args:
        spans: Stream, label, start and end in seconds from any common zero, as `timeline` events
            have them; what is malformed is left out.
        width: Characters of a bar.
    """
    kept = [span for span in map(_span, spans) if span is not None]
    if not kept or width < 1:
        return []
    zero_s, end_s = min(span[2] for span in kept), max(span[3] for span in kept)
    scale = width / (end_s - zero_s)
    names = {span[0] for span in kept}
    order = [name for name in STREAMS if name in names] + sorted(names.difference(STREAMS))
    found = []
    for name in order:
        cells = [" "] * width
        busy_s, reached_s = 0.0, -math.inf
        for _, label, start_s, stop_s in sorted(s for s in kept if s[0] == name):
            mark = PHASE_MARKS.get(label.partition(" ")[0], _OTHER_MARK)
            at = min(width - 1, int(scale * (start_s - zero_s)))
            cells[at : max(at + 1, round(scale * (stop_s - zero_s)))] = [mark] * (
                max(at + 1, round(scale * (stop_s - zero_s))) - at
            )
        for _, _, start_s, stop_s in sorted((s for s in kept if s[0] == name), key=lambda s: s[2]):
            busy_s += max(0.0, stop_s - max(start_s, reached_s))
            reached_s = max(reached_s, stop_s)
        found.append(Bar(name, "".join(cells[:width]), busy_s / (end_s - zero_s)))
    return found


def _span(span: Sequence[object]) -> tuple[str, str, float, float] | None:
    if not isinstance(span, list | tuple) or len(span) != 4:
        return None
    stream, label, start, end = span
    numbers = isinstance(start, int | float) and isinstance(end, int | float)
    if not (isinstance(stream, str) and isinstance(label, str) and numbers):
        return None
    start_s, end_s = float(start), float(end)  # type: ignore[arg-type]
    if not (math.isfinite(start_s) and math.isfinite(end_s) and end_s > start_s):
        return None
    return stream, label, start_s, end_s


def _between(before: tuple[int, int] | None, to: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, without its first one."""
    if before is None:
        return [to]
    (x0, y0), (x1, y1) = before, to
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps))
        for i in range(1, steps + 1)
    ]

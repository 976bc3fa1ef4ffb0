"""How a fragment is cut: one slice per member of a round, each slice in pieces for the wire.

This is the one table of offsets; whoever sends, receives, reduces or commits asks here.
"""

from __future__ import annotations

from typing import NamedTuple

PIECE_ELEMENTS = 1 << 20
"""Elements that are encoded and sent in one go: large enough for fast arithmetic, small enough
that several neighbours' pieces fit in memory beside the model."""


class Span(NamedTuple):
    """Elements `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements in the span."""
        return self.stop - self.start


def slice_spans(elements: int, members: int) -> tuple[Span, ...]:
    """Return one span per member, contiguous, in order, sizes differing by one at most.

    With more members than elements the last spans are empty.
    """
    small, larger = divmod(elements, members)
    stops = [small * (i + 1) + min(i + 1, larger) for i in range(members)]
    return tuple(Span(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def piece_spans(span: Span, piece_elements: int = PIECE_ELEMENTS) -> tuple[Span, ...]:
    """Return `span` cut into pieces of at most `piece_elements`."""
    starts = range(span.start, span.stop, piece_elements)
    return tuple(Span(start, min(start + piece_elements, span.stop)) for start in starts)

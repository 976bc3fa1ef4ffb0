"""How a fragment is cut: slices for the members of a round, each slice in pieces for the wire.

This is the one table of offsets; whoever sends, receives, reduces or commits asks here.
"""

from __future__ import annotations

from typing import NamedTuple

PIECE_ELEMENTS = 1 << 20
"""Elements that are encoded and sent in one go: large enough for fast arithmetic, small enough
that several neighbours' pieces fit in memory beside the model."""
SLICE_ELEMENTS = 1 << 19
"""Elements of a slice in a large fragment: small enough that means flow back while contributions
still come and that sums stay in the processor's cache, large enough that messages are few."""
_SLICES_MAX = 2048
_STREAMS = 4


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


def slices_per_member(elements: int, members: int) -> int:
    """Return how many slices each member of a round owns; in all there are 2048 at most."""
    wanted = -(-elements // (members * SLICE_ELEMENTS))
    return max(1, min(wanted, _SLICES_MAX // members))


def streams_per_neighbour(members: int, slices_each: int) -> int:
    """Return how many streams a member opens to each other one, which opens as many to it.

    One stream does not fill a link with a long round trip; four do.
    """
    return max(1, min(slices_each // 2, -(-_STREAMS // (2 * max(1, members - 1)))))


def piece_spans(span: Span, piece_elements: int = PIECE_ELEMENTS) -> tuple[Span, ...]:
    """Return `span` cut into pieces of at most `piece_elements`."""
    starts = range(span.start, span.stop, piece_elements)
    return tuple(Span(start, min(start + piece_elements, span.stop)) for start in starts)

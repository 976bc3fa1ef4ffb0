"""Newcomers at a peer that is alone: its anchors wait for them.

An anchor that it made meanwhile would beat those that they fetch, and nothing certifies it. So
several of them, who agree on the older one, would make another of the same version in their first
round, and the swarm would be divided until the better one is fetched.
"""

from __future__ import annotations

from collections.abc import Callable

_LONGEST = 4
"""So many times its patience does a peer wait in all: whoever asks for ever holds nothing up."""


class Newcomers:
    """Says whether somebody is just joining; plain bookkeeping, fed from what is asked here."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        """`patience_s`: how long one that has asked for something may take to be in a round."""
        self._patience_s, self._clock = patience_s, clock
        self._until_s: float | None = None
        """When the last one has had its time; None: nobody has come since `forget`."""
        self._at_last_s = 0.0

    def hear(self) -> None:
        """Hear that the manifest or an anchor was asked for."""
        now_s = self._clock()
        if self._until_s is None:
            self._at_last_s = now_s + _LONGEST * self._patience_s
        self._until_s = min(now_s + self._patience_s, self._at_last_s)

    @property
    def coming(self) -> bool:
        """Somebody may be about to take part."""
        return self._until_s is not None and self._clock() < self._until_s

    def forget(self) -> None:
        """Begin anew: this peer has gone on alone."""
        self._until_s = None

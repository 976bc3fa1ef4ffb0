"""Stamps: which of two anchors wins, which may meet, and which a run of some age can have.

A stamp that somebody tells is a claim. The only thing that all peers know alike, and that nobody
can tell them anew, is how old the run is: the manifest has the time at which it began. So that is
what a claim is measured by. The rates are far above what a swarm reaches; they are the same for all
peers and grow with time faster than any swarm learns, so what one peer believes the others do too,
and who slept or was cut off for however long believes it like anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

TOKENS_MAX = 1 << 50
"""Tokens of a stamp do not grow beyond this: they stay numbers that every message can hold."""
VERSION_MAX = 1 << 40
SLACK_VERSIONS = 2
"""Siblings: anchors that are at most so many versions apart average with each other."""
_TOKENS_PER_S = 10**9
"""As a thousand machines that train on a million tokens a second each."""
_VERSIONS_PER_S = 1000
"""Rounds of one fragment: each takes a step at least, and two boundaries."""
_SLACK_S = 3600.0
"""What clocks may be wrong by, and what a round may be ahead of its time."""


def steady_s() -> float:
    """Return the seconds of a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Stamp:
    """Which anchor this is: version, tokens that went into it, and hash of its bytes."""

    version: int
    tokens: int
    digest: str

    def beats(self, other: Stamp) -> bool:
        """Say whether peers that hold `other` have to fetch this one.

        More tokens win: of two halves of a swarm that were cut apart, the one that has learnt from
        more. Then the higher version; then the lower hash, which only says who tries the other's:
        see `ties`. A round's anchor beats the one that it was made of, since somebody has trained
        for it.
        """
        return (self.tokens, self.version, other.digest) > (
            other.tokens,
            other.version,
            self.digest,
        )

    def ties(self, other: Stamp) -> bool:
        """Say whether nothing but their hashes, which anybody can choose, tells two anchors apart.

        So their hashes decide nothing that matters: who fetches one takes it only if the loss
        hardly rises, and a round is on the one that most of its members have.
        """
        return (self.version, self.tokens) == (other.version, other.tokens) and self != other

    def next(self, tokens: int, digest: str = "") -> Stamp:
        """Return the stamp of what a round makes of this anchor with so many tokens."""
        version = min(self.version + 1, VERSION_MAX)
        return Stamp(version, min(self.tokens + tokens, TOKENS_MAX), digest)


def supersedes(other: Stamp, own: Stamp, slack: int) -> bool:
    """Say whether a peer that has the anchor `own` has to fetch `other`.

    With `slack` 0 whenever `other` is better; else siblings, so many versions apart at most, do
    not replace each other.
    """
    return other.beats(own) and (slack == 0 or not siblings(other, own, slack))


def siblings(one: Stamp, other: Stamp, slack: int) -> bool:
    """Say whether two anchors of a fragment may meet in a round."""
    return one == other or (slack > 0 and abs(one.version - other.version) <= slack)


def best_of(stamps: Iterable[Stamp | None]) -> Stamp | None:
    """Return the stamp that beats all others; None if there is none."""
    best = None
    for stamp in stamps:
        if stamp is not None and (best is None or stamp.beats(best)):
            best = stamp
    return best


class Limit(NamedTuple):
    """What no anchor of a run can be beyond, at one moment."""

    version: int
    tokens: int

    def refusal(self, stamp: Stamp) -> str:
        """Return why a claim cannot be true, or an empty string."""
        if stamp.version > self.version:
            return f"version {stamp.version}, and there cannot be more than {self.version} by now"
        if stamp.tokens > self.tokens:
            return f"{stamp.tokens} tokens, and there cannot be more than {self.tokens} by now"
        return ""


class RunAge:
    """How old a run is, and what follows from that."""

    def __init__(self, born_s: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        """`born_s`: when the run began, by `clock`, the swarm's time; 0: nobody knows."""
        self._born_s, self.clock = born_s, clock

    @property
    def now_s(self) -> float:
        """The swarm's time."""
        return self.clock()

    @property
    def limit(self) -> Limit:
        """What stamps can be now."""
        age_s = int(max(0.0, self.clock() - self._born_s) + _SLACK_S)
        return Limit(
            min(age_s * _VERSIONS_PER_S, VERSION_MAX), min(age_s * _TOKENS_PER_S, TOKENS_MAX)
        )

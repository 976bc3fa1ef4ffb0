"""A swarm that averages fragments in the background, round by round.

Local steps never wait for the network, so the tokens per second are those of peers alone; what a
link decides is how often the model is averaged. The rules are those of `atomtrain.swarm`: round r
averages fragment r modulo F, it is due when the fastest peer has made H/F steps since the last one
began, members hand over their snapshots between two steps, and every member reduces one slice.

Messages of a round go over connections that are open already. Streams of an exchange are new ones:
a round trip connects them, and one more agrees on their keys. Two members send contributions and
then means over the same streams (`swarm.lanes`), so TCP begins slowly once: means find open what
contributions have opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atomresearch.simulation.link import mean_recovery_s, opening_s
from atomtrain.errors import ConfigError

_ROUNDING = 1e-9
_MESSAGES = 6
_FIRST_MESSAGE_WAYS = 5
"""Until a new stream's first message has arrived: two round trips, and the message's own way."""


@dataclass(frozen=True, kw_only=True)
class SwarmWork:
    """Peers and what they average."""

    step_s: Sequence[float]
    """Seconds of a local step of each peer; two peers at least."""
    tokens_per_step: int
    """Tokens of one peer's step."""
    exchange_bytes: Sequence[int]
    """Bytes that each peer sends, and receives, in an exchange of each fragment; with K peers and
    n bytes for all values 2 * (K - 1) / K * n."""
    local_steps: int
    """Local steps (H) in which every fragment is averaged once."""
    codec_s: float = 0.0
    """Seconds of an exchange in which a peer encodes, decodes and adds up, added to those of the
    transfer; in truth most of it happens meanwhile."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be a swarm."""
        if len(self.step_s) < 2 or min(self.step_s) <= 0:
            raise ConfigError(
                f"step times {list(self.step_s)[:4]} are given; a swarm needs at least two peers "
                "whose steps take more than 0 s"
            )
        if not self.exchange_bytes or min(self.exchange_bytes) <= 0:
            raise ConfigError("a swarm needs at least one fragment of more than 0 bytes")
        if self.local_steps < 1 or self.tokens_per_step < 1:
            raise ConfigError(
                f"{self.local_steps} local steps of {self.tokens_per_step} tokens; both must be at "
                "least 1"
            )


@dataclass(frozen=True, kw_only=True)
class SwarmLink:
    """What joins each peer to the others."""

    bits_per_s: float
    """Rate of each direction of a peer's link; infinity is allowed."""
    one_way_s: float = 0.0
    loss_share: float = 0.0
    """Of packets, each lost by itself; 0 to below 1. The rate is what is left of it then."""


class SwarmRun(NamedTuple):
    """What comes of some rounds."""

    tokens_per_s: float
    """Of all peers together."""
    round_s: float
    """Mean time from a round's invitation to its decision, at each member."""
    averaged_every_s: float
    """Mean time between two averages of one and the same fragment."""
    averaged_every_tokens: float
    """Tokens of all peers in that time."""
    sent_bytes_per_token: float
    """Payload on the wire of all peers, for each token."""


def simulate_swarm(work: SwarmWork, link: SwarmLink, rounds: int | None = None) -> SwarmRun:
    """Run so many rounds (`None`: each fragment's turn comes four times)."""
    fragments = len(work.exchange_bytes)
    rounds = rounds or 4 * fragments
    fastest_s = min(work.step_s)
    steps_between = max(1, work.local_steps // fragments)
    now_s, begun_s = 0.0, 0.0
    lasted_s, sent_bytes = 0.0, 0.0
    for index in range(rounds):
        # The fastest peer proposes at a boundary: when it has made its steps, and not in a round.
        due_s = _boundary(max(now_s, begun_s + steps_between * fastest_s), fastest_s)
        exchange_bytes = work.exchange_bytes[index % fragments]
        begun_s, now_s = _round(work, link, due_s, exchange_bytes)
        lasted_s += now_s - begun_s
        sent_bytes += len(work.step_s) * exchange_bytes
    tokens_per_s = sum(work.tokens_per_step / step_s for step_s in work.step_s)
    every_s = now_s / rounds * fragments
    return SwarmRun(
        tokens_per_s,
        lasted_s / rounds,
        every_s,
        every_s * tokens_per_s,
        sent_bytes / (now_s * tokens_per_s),
    )


def _round(
    work: SwarmWork, link: SwarmLink, proposed_s: float, exchange_bytes: int
) -> tuple[float, float]:
    """Return when members were invited, and when all know the decision."""
    invited_s = proposed_s + 2 * link.one_way_s  # proposal, invitation
    snapshot_s = max(_next_boundary(invited_s, step_s) for step_s in work.step_s)
    exchange_from_s = snapshot_s + 2 * link.one_way_s  # ready, begin
    exchange_s = 8 * exchange_bytes / link.bits_per_s + work.codec_s
    exchange_s += _streams_s(work, link, exchange_bytes) + _mending_s(link, exchange_bytes)
    return invited_s, exchange_from_s + exchange_s + 2 * link.one_way_s  # held, commit


def _streams_s(work: SwarmWork, link: SwarmLink, exchange_bytes: int) -> float:
    """Return how much longer than its bytes take an exchange is.

    Who has opened a stream sends at once, the other when the first message has come. So the last
    contribution leaves that much later, and takes a way, as does the mean that follows.
    """
    round_trip_s, others = 2 * link.one_way_s, len(work.step_s) - 1
    slow_s = opening_s(exchange_bytes, link.bits_per_s, round_trip_s, others)
    return _FIRST_MESSAGE_WAYS * link.one_way_s + round_trip_s + slow_s


def _mending_s(link: SwarmLink, exchange_bytes: int) -> float:
    """Return how much longer a round takes because packets of it get lost.

    Contributions are whole, and then means, when their last packet is; the round's six messages are
    a packet each.
    """
    round_trip_s, share = 2 * link.one_way_s, link.loss_share
    halves_s = 2 * mean_recovery_s(exchange_bytes / 2, share, round_trip_s)
    return halves_s + _MESSAGES * mean_recovery_s(1, share, round_trip_s)


def _boundary(at_s: float, step_s: float) -> float:
    """Return the end of the first step of a peer that ends at `at_s` or later."""
    # A boundary that is missed by rounding alone is not missed.
    return math.ceil(at_s / step_s - _ROUNDING) * step_s


def _next_boundary(at_s: float, step_s: float) -> float:
    """Return the end of the step that a peer is in at `at_s`: one that ends just then is over."""
    return (math.floor(at_s / step_s + _ROUNDING) + 1) * step_s

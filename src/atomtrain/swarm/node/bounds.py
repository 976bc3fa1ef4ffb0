"""Bounds on what others ask of this peer: which request counts as what; see `buckets`."""

from __future__ import annotations

from collections.abc import Callable

from atomtrain.swarm.transport.buckets import (
    ACCUSATIONS,
    ANCHORS,
    CALLS,
    PINGS,
    PROBES,
    STREAMS,
    Buckets,
    allowances,
)
from atomtrain.swarm.transport.messages import (
    Accuse,
    AskAnchor,
    AskDial,
    Message,
    Ping,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.transport import Channel

_KINDS: dict[type[Message], str] = {
    AskAnchor: ANCHORS, Ping: PINGS, AskDial: PROBES, Accuse: ACCUSATIONS, RelayTo: CALLS,
    TakeCall: CALLS,
}  # fmt: skip
"""All others count as the streams that they come on."""
REFUSAL = "it was asked for that too often; try again in a minute"


class Bounds:
    """What one peer has others ask for, and how often; on its event loop."""

    def __init__(self, peer_id: str, fragments: int, clock: Callable[[], float]) -> None:
        """Of peer `peer_id`, which may ask itself whatever it likes; `clock` is in seconds."""
        self._peer_id = peer_id
        self._buckets = Buckets(allowances(fragments), clock)

    def admits_stream(self, channel: Channel) -> bool:
        """Say whether a stream is to be served that another peer has opened."""
        return self._take(STREAMS, channel)

    def refusal(self, channel: Channel, message: Message) -> str:
        """Return why what a stream begins with is not answered, or an empty string."""
        kind = _KINDS.get(type(message))
        return "" if kind is None or self._take(kind, channel) else REFUSAL

    def called_for(self, channel: Channel) -> None:
        """Hear that a stream was wanted here: it does not count."""
        if channel.remote != self._peer_id:
            self._buckets.give_back(STREAMS, channel.remote, channel.host)

    def _take(self, kind: str, channel: Channel) -> bool:
        return channel.remote == self._peer_id or self._buckets.take(
            kind, channel.remote, channel.host
        )

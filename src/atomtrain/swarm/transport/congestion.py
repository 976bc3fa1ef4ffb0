"""Which congestion control straight streams use: CUBIC, or BBR where packets get lost on the way.

On a link that loses nothing until it is full, an exchange of a dozen streams ends sooner with
CUBIC; on one that loses one packet in a hundred for other reasons it takes a multiple with CUBIC,
which slows down at each loss. So whoever sends looks, when a stream ends, at how much of it had to
be sent again, and the next streams to that peer are chosen by that. docs/swarm.md has measurements.

A system that lacks one of the two, or does not give it to this user, keeps its own choice.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_CLEAN, _LOSSY = b"cubic", b"bbr"
_LOSSY_SHARE, _CLEAN_SHARE = 0.005, 0.002
"""From so much sent again on a way counts as lossy, and below so much not any more."""
_TELLING_SEGMENTS = 500
_INFO_BYTES = 160
_RESENT_AT, _SENT_AT = 100, 156
"""Where Linux's `tcp_info` has `tcpi_total_retrans` and `tcpi_data_segs_out`, 32 bits each."""


class Congestion:
    """The choice for each peer, learnt from the streams to it."""

    def __init__(self) -> None:
        """Know of no losses yet."""
        self._lossy: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        """By peer: segments sent since the last judgement, and those of them sent again."""

    def choose(self, plain: socket.socket, peer_id: str) -> None:
        """Prepare a TCP socket for a stream with this peer."""
        name = _LOSSY if peer_id in self._lossy else _CLEAN
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)

    def learn(self, plain: socket.socket, peer_id: str) -> None:
        """Count what a socket that is about to be closed has sent; judge by enough of it."""
        try:
            info = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return
        if len(info) < _INFO_BYTES:
            return  # an old kernel
        counts = (struct.unpack_from("=I", info, at)[0] for at in (_SENT_AT, _RESENT_AT))
        sent, resent = map(sum, zip(self._sent.pop(peer_id, (0, 0)), counts, strict=True))
        if sent < _TELLING_SEGMENTS:
            self._sent[peer_id] = (sent, resent)
        elif resent >= _LOSSY_SHARE * sent:
            self._lossy.add(peer_id)
        elif resent < _CLEAN_SHARE * sent:
            self._lossy.discard(peer_id)

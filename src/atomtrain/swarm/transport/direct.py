"""Straight streams for bulk data: encrypted TCP from process to process.

The daemon's streams reach every peer, also behind a firewall, but each byte passes two more
processes. Where peers can dial each other, bulk data goes straight instead. What is needed for that
is told over the daemon's streams, which prove who is at the other end and keep it secret: the
listener's port, and a token that stands for the caller. Whoever opens a stream names the token by
its hash; then both ends agree on keys that only they can have (`secure`). So both know each other
as well as on the stream that they asked over. Where there is no straight way, the daemon's do.

    caller -> listener   hash of the token (16 bytes) | public key (32 bytes)
    listener -> caller   public key (32 bytes)
    then frames in both directions
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass

from atomtrain.errors import BadMessage
from atomtrain.swarm.transport.buckets import STREAMS, Buckets, allowances
from atomtrain.swarm.transport.secure import PUBLIC_BYTES, Agreement, SecureChannel
from atomtrain.swarm.transport.transport import OPEN_S, Channel, Handler, LinkLost

_log = logging.getLogger("atomtrain.swarm")
OFFER_BYTES = 256
"""Bytes of an offer as it travels, filled up with blanks."""
_TOKEN_BYTES = 32
_NAME_BYTES = 16
_TOKENS_MAX = 8192
_GREETINGS_MAX = 256
_GREETING_S = 10.0
_ACCEPT_AGAIN_S = 1.0
_AVOID_S, _AVOID_S_MAX = 60.0, 960.0
"""Pause after a straight stream failed: doubled each time in a row, up to the second."""
_CLEAN, _LOSSY = b"cubic", b"bbr"
_LOSSY_SHARE, _CLEAN_SHARE = 0.005, 0.002
"""From so much sent again on a way counts as lossy, and below so much not any more."""
_TELLING_SEGMENTS = 500
_INFO_BYTES = 160
_RESENT_AT, _SENT_AT = 100, 156
"""Where Linux's `tcp_info` has `tcpi_total_retrans` and `tcpi_data_segs_out`, 32 bits each."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """How one peer may open straight streams to another."""

    port: int
    token: str
    """Hexadecimal, secret; whoever knows it is the peer that it was given to."""

    def encode(self) -> bytes:
        """Return the offer as JSON of `OFFER_BYTES`."""
        return json.dumps(asdict(self)).encode().ljust(OFFER_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Return the offer in `data`.

        Raises:
            BadMessage: there is none.
        """
        try:
            body = json.loads(data)
            port, token = body["port"], body["token"]
            if type(port) is not int or not 0 < port < 65536:
                raise ValueError("no port")
            if len(bytes.fromhex(token)) != _TOKEN_BYTES:
                raise ValueError("no token")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadMessage(f"an offer that cannot be read: {error!r}") from error
        return cls(port=port, token=token)

    @property
    def secret(self) -> bytes:
        """The token's bytes."""
        return bytes.fromhex(self.token)


class Direct:
    """One peer's straight streams: a listener, and the way to those of others."""

    def __init__(
        self,
        host: str,
        port: int,
        stall_s: float,
        ask: Callable[[str], Awaitable[bytes]],
    ) -> None:
        """Listen on `host`; `port` 0 is any free one.

        `ask` returns what a peer answers, over a stream that proves its identity and this peer's,
        to the question for an offer; it raises `LinkLost`.

        Raises:
            OSError: the port is in use.
        """
        self._ask = ask
        self._stall_s = stall_s
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self._given: dict[str, Offer] = {}  # by peer
        self._named: dict[bytes, tuple[str, bytes]] = {}  # peer and token, by the token's hash
        self._offers: dict[str, Offer] = {}
        self._avoid_until_s: dict[str, float] = {}
        self._avoid_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._greetings = 0
        self._buckets = Buckets(allowances(0), time.monotonic)
        self._congestion = Congestion()

    def offer(self, peer_id: str) -> Offer:
        """Return the offer to a peer whose identity is proved."""
        if peer_id not in self._given:
            if len(self._given) >= _TOKENS_MAX:
                oldest = self._given.pop(next(iter(self._given)))
                del self._named[_name(oldest.secret)]
            port: int = self._listener.getsockname()[1]
            offer = Offer(port=port, token=secrets.token_hex(_TOKEN_BYTES))
            self._given[peer_id] = offer
            self._named[_name(offer.secret)] = (peer_id, offer.secret)
        return self._given[peer_id]

    def serve(self, handler: Handler) -> None:
        """Run `handler` for each incoming stream, from now on."""
        self._spawn(self._accept(handler))

    async def open(
        self, peer_id: str, hosts: Iterable[str], within_s: float = OPEN_S
    ) -> Channel | None:
        """Return a stream to a peer at one of `hosts`, or None if there is no straight way now.

        That takes `within_s` at most, also where a firewall swallows everything.
        """
        loop, hosts = asyncio.get_running_loop(), tuple(hosts)
        if not hosts or loop.time() < self._avoid_until_s.get(peer_id, 0.0):
            return None
        known = self._offers.get(peer_id)
        try:
            async with asyncio.timeout(within_s):
                channel = await self._connect_known(peer_id, hosts, known, within_s)
        except (OSError, LinkLost, BadMessage) as error:  # TimeoutError is an OSError
            _log.info("no straight stream to peer %s (%s)", peer_id[-8:], error)
            self._offers.pop(peer_id, None)
            if loop.time() >= self._avoid_until_s.get(peer_id, 0.0):  # several fail together once
                pause_s = self._avoid_s.get(peer_id, _AVOID_S)
                self._avoid_until_s[peer_id] = loop.time() + pause_s
                self._avoid_s[peer_id] = min(2 * pause_s, _AVOID_S_MAX)
            return None
        self._avoid_s.pop(peer_id, None)
        return channel

    def close(self) -> None:
        """Stop listening; streams that are open stay."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()

    async def _connect_known(
        self, peer_id: str, hosts: tuple[str, ...], known: Offer | None, within_s: float
    ) -> Channel:
        if known is not None:
            with contextlib.suppress(OSError):
                return await self._connect(peer_id, hosts, known, within_s)
        offer = await self._asked(peer_id, known)
        return await self._connect(peer_id, hosts, offer, within_s)

    async def _asked(self, peer_id: str, stale: Offer | None) -> Offer:
        async with self._asking.setdefault(peer_id, asyncio.Lock()):
            offer = self._offers.get(peer_id)  # who asked before may have got one, or none
            if offer is None or offer is stale:
                offer = self._offers[peer_id] = Offer.decode(await self._ask(peer_id))
            return offer

    async def _connect(
        self, peer_id: str, hosts: tuple[str, ...], offer: Offer, within_s: float
    ) -> Channel:
        """Open a stream; raises `OSError`."""
        failed = OSError("it has no address")
        share_s = within_s / (len(hosts) + 1)
        for host in hosts:
            try:
                async with asyncio.timeout(share_s):
                    return await self._connect_to(peer_id, host, offer)
            except TimeoutError:
                failed = OSError(f"{host}:{offer.port} does not answer")
            except OSError as error:
                failed = error
        raise failed

    async def _connect_to(self, peer_id: str, host: str, offer: Offer) -> Channel:
        loop = asyncio.get_running_loop()
        plain = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            _tune(plain)
            self._congestion.choose(plain, peer_id)
            await loop.sock_connect(plain, (host, offer.port))
            mine = Agreement()
            await loop.sock_sendall(plain, _name(offer.secret) + mine.public)
            keys = mine.keys(offer.secret, await _exactly(plain, PUBLIC_BYTES), opened=True)
        except BaseException:
            plain.close()
            raise
        return SecureChannel(peer_id, plain, keys, self._stall_s, self._congestion.learn)

    async def _accept(self, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, (host, _) = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is free: it will be again
                _log.warning("straight streams are not accepted for now: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            full = self._greetings >= _GREETINGS_MAX
            if full or not self._buckets.take(STREAMS, "", host):
                plain.close()
                continue
            self._spawn(self._greet(plain, host, handler))

    async def _greet(self, plain: socket.socket, host: str, handler: Handler) -> None:
        self._greetings += 1
        try:
            async with asyncio.timeout(_GREETING_S):
                channel = await self._greeted(plain)
            channel.host = host
            self._buckets.give_back(STREAMS, "", host)  # whoever takes the stream counts it
        except BaseException as error:
            plain.close()
            if not isinstance(error, OSError):
                raise
            _log.debug("a straight stream that came to nothing: %s", error)
            return
        finally:
            self._greetings -= 1
        await handler(channel)

    async def _greeted(self, plain: socket.socket) -> Channel:
        _tune(plain)
        said = await _exactly(plain, _NAME_BYTES + PUBLIC_BYTES)
        if said[:_NAME_BYTES] not in self._named:
            raise OSError("an unknown token")
        peer_id, secret = self._named[said[:_NAME_BYTES]]
        self._congestion.choose(plain, peer_id)
        mine = Agreement()
        await asyncio.get_running_loop().sock_sendall(plain, mine.public)
        keys = mine.keys(secret, said[_NAME_BYTES:], opened=False)
        return SecureChannel(peer_id, plain, keys, self._stall_s, self._congestion.learn)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tune(plain: socket.socket) -> None:
    """Have small messages go at once, and nobody wait."""
    plain.setblocking(False)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _name(secret: bytes) -> bytes:
    """Return what names a token without telling it."""
    return hashlib.sha256(b"atomtrain token " + secret).digest()[:_NAME_BYTES]


async def _exactly(plain: socket.socket, count: int) -> bytes:
    """Read so many bytes; the caller has a deadline."""
    data = b""
    while len(data) < count:
        chunk = await asyncio.get_running_loop().sock_recv(plain, count - len(data))
        if not chunk:
            raise OSError("it hung up")
        data += chunk
    return data


class Congestion:
    """Which congestion control straight streams use: CUBIC, or BBR where packets get lost.

    On a link that loses nothing until it is full, an exchange of a dozen streams ends sooner with
    CUBIC; on one that loses one packet in a hundred for other reasons it takes a multiple with
    CUBIC, which slows down at each loss. So whoever sends looks, when a stream ends, at how much of
    it had to be sent again, and the next streams to that peer are chosen by that. docs/swarm.md has
    measurements.

    A system that lacks one of the two, or does not give it to this user, keeps its own choice.
    """

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

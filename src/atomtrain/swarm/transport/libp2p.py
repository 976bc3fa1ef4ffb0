"""Transport over hivemind: its encrypted libp2p streams.

hivemind's averager is not used, and not even imported. Everything lives on the event loop of the
calling thread; the only other process is the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import re
import socket
import sys
import time
import types
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.addresses import place_of
from atomtrain.swarm.transport.buckets import STREAMS, Buckets, DaemonCalls, allowances
from atomtrain.swarm.transport.daemon import Daemon, DaemonConfig
from atomtrain.swarm.transport.direct import OFFER_BYTES, Direct
from atomtrain.swarm.transport.endpoint import Endpoint
from atomtrain.swarm.transport.identity import Identity, verify
from atomtrain.swarm.transport.transport import (
    OPEN_S,
    Channel,
    Handler,
    LinkLost,
    StreamChannel,
    host_of,
)

_log = logging.getLogger("atomtrain.swarm")
_PROTOCOL_NAME = "/atom/swarm/1"
_OFFER_PROTOCOL_NAME = "/atom/direct/1"
_HELLO = b"\x13/multistream/1.0.0\n"
"""What a libp2p peer says first on a connection: https://github.com/multiformats/multistream-select"""
_OFFERS_AT_ONCE = 256
"""Streams on which peers are told how to open straight ones; anybody may ask."""
_DIALLED = re.compile(r"\* \[[^]]*\] (.*?)(?= \* \[|$)")
"""What the daemon says of each address that it dialled: `* [ADDRESS] reason`."""
_REASON_MAX = 300
_PACKAGE = "hivemind"
_PARTS = ("hivemind.dht.node", "hivemind.dht.validation", "hivemind.utils.multiaddr")


def quiet_hivemind() -> None:
    """Keep hivemind's reports of lost peers off the terminal: they are expected and handled."""
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)


class Libp2pTransport:
    """Encrypted streams to peers, through the daemon; a peer's id is the hash of its key."""

    def __init__(
        self, daemon: Daemon, p2p: Any, endpoint: Endpoint, address: str, identity: Identity
    ) -> None:
        """Use a running daemon; see `create`."""
        self.peer_id = str(p2p.peer_id)
        self.address = address
        self.identity = identity
        self._daemon = daemon
        self._p2p = p2p
        self._endpoint = endpoint
        self._known: dict[str, tuple[str, ...]] = {}
        self._dialled: set[str] = set()
        self._dialling: dict[str, asyncio.Lock] = {}
        self._direct = _listening(endpoint, self._ask_offer) if endpoint.direct else None
        self._offering = 0
        self._buckets = Buckets(allowances(0), time.monotonic)

    @classmethod
    async def create(cls, endpoint: Endpoint, expiry_s: float = 30.0) -> Libp2pTransport:
        """Start the daemon and connect to it; membership records live `expiry_s`.

        Raises:
            SwarmError: it cannot listen where it shall.
            ConfigError: the identity cannot be used.
        """
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        quiet_hivemind()
        path = endpoint.identity_path
        identity = Identity.create() if path is None else Identity.load_or_create(path)
        port = endpoint.listen_port
        announce = None
        if endpoint.announce_host is not None:
            port = port or free_port(endpoint.listen_host)
            announce = (
                f"/{_address_kind(endpoint.announce_host)}/{endpoint.announce_host}/tcp/{port}"
            )
        daemon = Daemon(
            DaemonConfig(
                listen_host=endpoint.listen_host,
                listen_port=port,
                announce=announce,
                identity=identity,
            )
        )

        class Client(P2P):  # type: ignore[misc]
            """Keeps its socket where the next start finds it if this process is killed."""

            _UNIX_SOCKET_PREFIX = f"/unix{daemon.folder}/"

            async def add_protobuf_handler(
                self, name: str, handler: Any, *args: Any, **named: Any
            ) -> None:
                await super().add_protobuf_handler(name, calls.bounded(handler), *args, **named)

        async def connected() -> list[tuple[str, tuple[str, ...]]]:
            peers = await p2p.list_peers()
            return [(str(one.peer_id), tuple(map(str, one.addrs))) for one in peers]

        calls = DaemonCalls(expiry_s, connected)
        try:
            async with asyncio.timeout(endpoint.connect_s):
                p2p = await Client.replicate(Multiaddr(f"/unix{daemon.control}"))
                found = [str(a) for a in await p2p.get_visible_maddrs()]
        except BaseException as error:
            daemon.stop()
            if not isinstance(error, OSError | ValueError):  # a timeout is an OSError
                raise
            raise SwarmError(f"the network daemon does not answer: {error}") from error
        address = f"{announce}/p2p/{p2p.peer_id}" if announce else reachable(found)
        return cls(daemon, p2p, endpoint, address, identity)

    @property
    def p2p(self) -> Any:
        """hivemind's handle of the daemon."""
        return self._p2p

    @property
    def is_local(self) -> bool:
        """Whether this peer listens on this machine only."""
        return host_of(self.address).startswith("127.")

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """Say whether a peer has signed `data` with the key that its id names."""
        return verify(peer_id, data, signature)

    async def serve(self, handler: Handler) -> None:
        """Run `handler` for each incoming stream."""

        async def accept(
            info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await handler(self._channel(str(info.peer_id), reader, writer, host_of(str(info.addr))))

        async def offer(
            info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            assert self._direct is not None
            host = host_of(str(info.addr))
            channel = self._channel(str(info.peer_id), reader, writer, host)
            free = self._offering < _OFFERS_AT_ONCE
            if free and self._buckets.take(STREAMS, channel.remote, host):
                self._offering += 1
                try:
                    with contextlib.suppress(LinkLost):
                        await channel.send_bytes(self._direct.offer(channel.remote).encode())
                        await channel.wait_closed(self._endpoint.stall_s)
                finally:
                    self._offering -= 1
            channel.close()

        async with asyncio.timeout(self._endpoint.connect_s):
            await self._p2p.add_binary_stream_handler(_PROTOCOL_NAME, accept)
            if self._direct is not None:
                await self._p2p.add_binary_stream_handler(_OFFER_PROTOCOL_NAME, offer)
                self._direct.serve(handler)

    async def open(self, peer_id: str, *, bulk: bool = False, within_s: float = OPEN_S) -> Channel:
        """Return a new stream; for bulk a straight one, if there is a way."""
        if bulk and self._direct is not None:
            hosts = [host_of(address) for address in self._known.get(peer_id, ())]
            # The other half is for the daemon's stream.
            half_s = within_s / 2
            channel = await self._direct.open(peer_id, [host for host in hosts if host], half_s)
            if channel is not None:
                return channel
        return await self._open(peer_id, _PROTOCOL_NAME)

    async def _open(self, peer_id: str, protocol: str) -> Channel:
        """Return a new stream over the daemon, dialling the peer first if need be."""
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        try:
            # Several streams opened at once to a peer never dialled can hang: dial alone first.
            async with self._dialling.setdefault(peer_id, asyncio.Lock()):
                if peer_id not in self._dialled:
                    await self.dial(peer_id, self._known.get(peer_id, ()))
            _, reader, writer = await self._p2p.call_binary_stream_handler(
                PeerID.from_base58(peer_id), protocol
            )
        except (P2PDaemonError, OSError, EOFError, ValueError) as error:
            self._dialled.discard(peer_id)
            raise LinkLost(f"peer {peer_id[-8:]} cannot be reached: {_short(error)}") from error
        except asyncio.CancelledError:  # as a deadline does: the connection may be a dead one
            self._dialled.discard(peer_id)
            raise
        return self._channel(peer_id, reader, writer)

    async def _ask_offer(self, peer_id: str) -> bytes:
        channel = await self._open(peer_id, _OFFER_PROTOCOL_NAME)
        try:
            data = bytearray(OFFER_BYTES)
            await channel.receive_into(memoryview(data))
            return bytes(data)
        finally:
            channel.close()

    def _channel(
        self,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host: str = "",
    ) -> Channel:
        channel = StreamChannel(peer_id, reader, writer, self._endpoint.stall_s)
        channel.host = host
        return channel

    async def dial(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Connect to a peer; raises hivemind's errors, `OSError` or `ValueError`."""
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        bare = [Multiaddr(a.rsplit("/p2p/", 1)[0]) for a in addresses]
        await self._p2p._client.connect(PeerID.from_base58(peer_id), bare)
        self._dialled.add(peer_id)

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Remember where a peer can be dialled."""
        self._known[peer_id] = tuple(addresses)

    async def answers(self, address: str, within_s: float) -> bool:
        """Say whether a libp2p peer answers in time who dials this address anew.

        Who it is, is not proved: that would take a daemon that is not connected with it yet.
        """
        try:
            place = place_of(address)
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(place.host, place.port)
                try:
                    writer.write(_HELLO)
                    return await reader.readexactly(len(_HELLO)) == _HELLO
                finally:
                    writer.close()
        except (OSError, EOFError, SwarmError):
            return False

    async def refused(self, addresses: Collection[str]) -> bool:
        """Say whether a machine answers at each of these addresses that nobody listens there."""
        for address in addresses:
            try:
                place = place_of(address)
                _, writer = await asyncio.open_connection(place.host, place.port)
            except ConnectionRefusedError:
                continue
            except (OSError, SwarmError):
                return False
            writer.close()
            return False
        return bool(addresses)

    async def close(self) -> None:
        """End the daemon, and every stream with it."""
        if self._direct is not None:
            self._direct.close()
        with contextlib.suppress(OSError):
            await self._p2p.shutdown()
        self._daemon.stop()


def reachable(addresses: list[str]) -> str:
    """Return the address to give to others: one of the local network, if there is one."""
    tcp = [address for address in addresses if "/tcp/" in address and "p2p-circuit" not in address]
    outside = [address for address in tcp if not address.startswith("/ip4/127.")]
    return (outside or tcp or addresses)[0]


def _listening(endpoint: Endpoint, ask: Callable[[str], Awaitable[bytes]]) -> Direct | None:
    """Return this peer's straight streams: at the port after the daemon's, if that was chosen."""
    for port in dict.fromkeys((endpoint.listen_port and endpoint.listen_port + 1, 0)):
        try:
            return Direct(endpoint.listen_host, port, endpoint.stall_s, ask)
        except (OSError, OverflowError) as error:
            _log.warning("no straight streams at port %d: %s", port, error)
    return None


def peer_of(address: str) -> str:
    """Return the peer id in an address.

    Raises:
        SwarmError: it is not an address of a peer.
    """
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    try:
        peer_id = str(Multiaddr(address)["p2p"])
        PeerID.from_base58(peer_id)
        return peer_id
    except (ValueError, KeyError, LookupError) as error:
        raise SwarmError(
            f"{address!r} is not the address of a peer; paste the whole line that a peer prints, "
            "such as /ip4/192.168.1.5/tcp/31337/p2p/12D3Koo..."
        ) from error


def free_port(host: str) -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _address_kind(host: str) -> str:
    try:
        socket.inet_aton(host)
    except OSError:
        return "dns4"
    return "ip4"


def _short(error: BaseException) -> str:
    """Return what the daemon has to say, of each address that it dialled once."""
    text = " ".join(str(error).split()) or type(error).__name__
    reasons = dict.fromkeys(_DIALLED.findall(text))
    return ("; ".join(reasons) or text)[:_REASON_MAX]


class _NotRunYet(types.ModuleType):
    """A package of which nothing but submodules was asked for so far."""

    def __getattr__(self, name: str) -> Any:
        if (part := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return part  # its import has not ended yet
        if name.startswith("__") and name != "__version__":  # as tools that look at modules do
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        importlib.reload(self)
        return getattr(self, name)


def import_hivemind() -> None:
    """Import hivemind's hash table and streams without the rest of hivemind.

    `import hivemind` runs a package that imports its averager, its optimizers and its mixture of
    experts, and SciPy and pydantic for them: most of what that takes, and nothing of it is used
    here. So the package is made known without being run, and the modules that are used are imported
    as ever. Who asks the package itself for something gets all of it then.

    It takes seconds on a busy machine, so call it before any deadline runs.
    """
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _NotRunYet
        sys.modules[_PACKAGE] = package
    for part in _PARTS:
        importlib.import_module(part)

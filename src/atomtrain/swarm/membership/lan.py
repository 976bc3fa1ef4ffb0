"""Peers of the local network find each other without an address: a question to all, by multicast.

Whoever looks for a run sends a datagram to a group that does not leave the local network; peers
that listen to others than their own machine answer with run and address. Nothing is believed: the
address leads to an encrypted stream, on which the peer proves its id, and the run's key if there is
one. A question is at least as long as its answer, so that nobody can use peers to flood a third.
Multicast DNS is not used for that reason: zeroconf 0.154 answers 39 bytes with 230, also where the
question came to this host alone, from anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import struct
import time
from typing import NamedTuple, cast

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.transport.identity import public_key_of

GROUP, PORT = "239.192.65.84", 31065
QUESTION_BYTES = 1200
"""Size of every question, and most of an answer."""
SEARCH_S = 2.0
"""How long peers of any run may take to answer."""
NAMED_S = 6.0
"""How long a run that was named may: its first answer ends the search."""
_ASK_EVERY_S = 0.5
_ANSWERS_PER_S = 20
_ANSWERS_MAX = 256
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_MULTICAST_ALL = 49  # IP_MULTICAST_ALL
_log = logging.getLogger("atomtrain.swarm")


class Found(NamedTuple):
    """A peer that answered."""

    run: str
    name: str
    address: str
    """What leads to it, peer id included."""
    protocol: int


def question(run: str | None) -> bytes:
    """Return the datagram that asks for peers of a run; of any run without a name."""
    return json.dumps({"atom": PROTOCOL, "find": run or ""}).encode().ljust(QUESTION_BYTES)


def asked_for(data: bytes) -> str:
    """Return the run that a question is about; empty: any.

    Raises:
        BadMessage: it is not a question.
    """
    if len(data) != QUESTION_BYTES:
        raise BadMessage("a question of another size")
    body = _parsed(data)
    if not isinstance(body.get("atom"), int) or not isinstance(body.get("find"), str):
        raise BadMessage("not a question")
    return str(body["find"])


def answer(found: Found) -> bytes:
    """Return the datagram that tells of a peer."""
    return json.dumps({"atom": found.protocol, **found._asdict()}).encode()


def told(data: bytes) -> Found:
    """Return the peer that an answer tells of.

    Raises:
        BadMessage: it is no answer.
    """
    if len(data) > QUESTION_BYTES:
        raise BadMessage("an answer of impossible size")
    body = _parsed(data)
    run, name, address, protocol = (body.get(key) for key in Found._fields)
    if not (isinstance(run, str) and isinstance(name, str) and isinstance(address, str)):
        raise BadMessage("not an answer")
    if not isinstance(protocol, int) or public_key_of(address.rpartition("/")[2]) is None:
        raise BadMessage("not an answer")
    if not address.isascii() or not address.isprintable() or not (run + name).isprintable():
        raise BadMessage("an answer that cannot be shown")
    return Found(run, name, address, protocol)


def _parsed(data: bytes) -> dict[str, object]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadMessage("not an object")
    return body


class Responder(asyncio.DatagramProtocol):
    """Answers questions about one peer, at most twenty a second."""

    def __init__(self, found: Found) -> None:
        """Answer with `found` from when the transport is made."""
        self._found = found
        self._transport: asyncio.DatagramTransport | None = None
        self._second, self._answered = 0, 0

    @classmethod
    async def start(cls, found: Found, listen_host: str) -> Responder | None:
        """Answer on the interfaces that `listen_host` stands for; None where that cannot be."""
        responder = cls(found)
        try:
            listening = _listening(listen_host)
            loop = asyncio.get_running_loop()
            await loop.create_datagram_endpoint(lambda: responder, sock=listening)
        except OSError as error:
            _log.info("this peer cannot be found on the local network: %s", error)
            return None
        return responder

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer a question that is about this peer's run."""
        try:
            run = asked_for(data)
        except BadMessage:
            return
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._answered = second, 0
        reply = answer(self._found)
        if run in ("", self._found.run) and self._answered < _ANSWERS_PER_S:
            self._answered += 1
            if self._transport is not None and len(reply) <= QUESTION_BYTES:
                self._transport.sendto(reply, addr)

    def close(self) -> None:
        """Answer no more."""
        if self._transport is not None:
            self._transport.close()


def search(run: str | None, within_s: float = SEARCH_S, host: str = "0.0.0.0") -> list[Found]:
    """Return the peers of a run, or of any, that answer on the networks of `host`; blocks.

    Returns as soon as a peer of the run that was named has answered; asked for any, waits
    `within_s`.
    """
    found: dict[str, Found] = {}
    until_s = time.monotonic() + within_s
    ask_s = 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        while (now_s := time.monotonic()) < until_s and len(found) < _ANSWERS_MAX:
            if now_s >= ask_s:
                _ask(asking, question(run), host)
                ask_s = now_s + _ASK_EVERY_S
            if not select.select([asking], [], [], min(until_s, ask_s) - now_s)[0]:
                if run is not None and found:
                    break
                continue
            with contextlib.suppress(BadMessage):
                peer = told(asking.recv(QUESTION_BYTES + 1))
                if run in (None, peer.run):
                    found[peer.address] = peer
    return list(found.values())


def find(run: str | None, host: str = "0.0.0.0") -> tuple[str, tuple[str, ...]]:
    """Return the run of that name, or the only one, on the local network, and its addresses.

    Raises:
        SwarmError: there is none, or several to choose from.
    """
    within_s = SEARCH_S if run is None else NAMED_S
    peers = search(run, within_s, host)
    usable = [peer for peer in peers if peer.protocol == PROTOCOL]
    runs = sorted({peer.run for peer in usable})
    if len(runs) == 1:
        return runs[0], tuple(peer.address for peer in usable)
    if runs:
        raise SwarmError(
            f"there are {len(runs)} runs on the local network ({', '.join(runs[:8])}); say which "
            f"one with --run, such as: --join lan --run {runs[0]}"
        )
    if peers:
        raise SwarmError(
            f"the peers found on the local network speak protocol {peers[0].protocol}, this one "
            f"{PROTOCOL}: install the same version of atomtrain"
        )
    which = "a run" if run is None else f"run {run!r}"
    raise SwarmError(
        f"no peer of {which} answers on the local network within {within_s:.0f} s; check that one "
        f"trains there (not with --hidden), that no firewall drops UDP port {PORT}, or paste its "
        "address"
    )


def _ask(asking: socket.socket, data: bytes, host: str) -> None:
    for _, address in _interfaces(host):
        with contextlib.suppress(OSError):  # an interface that is down
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            asking.sendto(data, (GROUP, PORT))


def _listening(host: str) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        listening.setblocking(False)
        for shared in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listening.setsockopt(socket.SOL_SOCKET, shared, 1)
        listening.setsockopt(socket.IPPROTO_IP, _MULTICAST_ALL, 0)  # only where this one has joined
        listening.bind((GROUP, PORT))
        joined = 0
        for index, address in _interfaces(host):
            member = struct.pack("4s4si", socket.inet_aton(GROUP), socket.inet_aton(address), index)
            with contextlib.suppress(OSError):  # an interface without multicast
                listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
                joined += 1
        if not joined:
            raise OSError("no network interface takes part in multicast")
    except BaseException:
        listening.close()
        raise
    return listening


def _interfaces(host: str) -> list[tuple[int, str]]:
    """Return number and IPv4 address of each interface that a listening address stands for."""
    import fcntl  # only where interfaces are asked: hivemind is for Linux only

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for index, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe, _GET_ADDRESS, request)
                address = socket.inet_ntoa(reply[20:24])
                if host in ("0.0.0.0", address):
                    found.append((index, address))
    return found

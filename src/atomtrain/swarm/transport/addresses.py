"""Addresses of peers, as texts: `/ip4/HOST/tcp/PORT/p2p/ID`, or through a relay.

A peer that cannot be dialled is reached through one that can; its address is the relay's, a mark,
and its own id, as libp2p writes it:

    /ip4/HOST/tcp/PORT/p2p/RELAY/p2p-circuit/p2p/ID
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.identity import public_key_of

_CIRCUIT = "/p2p-circuit"
_PORT_DIGITS = 5


class Place(NamedTuple):
    """What an address says; through a relay, host and port are the relay's."""

    host: str
    is_name: bool
    port: int
    peer_id: str


class Circuit(NamedTuple):
    """A way to a peer through a relay."""

    relay_id: str
    relay_address: str
    peer_id: str


def place_of(address: str) -> Place:
    """Return the parts of an address.

    Raises:
        SwarmError: it is none.
    """
    parts = address.split("/")
    good = len(parts) >= 7 and parts[0] == "" and parts[1] in ("ip4", "dns4", "dns", "ip6")
    good = good and parts[3] == "tcp" and parts[-2] == "p2p" and _is_host(parts[2])
    good = good and parts[4].isdecimal() and len(parts[4]) <= _PORT_DIGITS
    if not good or not 0 < int(parts[4]) < 65536 or public_key_of(parts[-1]) is None:
        raise SwarmError(
            f"{address!r} is not the address of a peer; paste the whole line that a peer prints, "
            "such as RUN@/ip4/192.168.1.5/tcp/31337/p2p/12D3Koo..."
        )
    return Place(parts[2], parts[1].startswith("dns"), int(parts[4]), parts[-1])


def _is_host(text: str) -> bool:
    """Say whether a resolver can be asked for this name, or IP address."""
    try:
        return text.isprintable() and bool(text.encode("idna"))
    except UnicodeError:  # an empty part, or a long one
        return False


def through(relay_address: str, peer_id: str) -> str:
    """Return the address of a peer through a relay."""
    return f"{relay_address}{_CIRCUIT}/p2p/{peer_id}"


def circuit_of(address: str) -> Circuit | None:
    """Return the parts of an address through one relay; None if it is no such address."""
    relay_address, mark, end = address.partition(f"{_CIRCUIT}/p2p/")
    relay_id = relay_address.rpartition("/")[2]
    if not mark or not relay_id or not end or "/" in end:
        return None
    return Circuit(relay_id, relay_address, end)


def circuits_to(peer_id: str, addresses: Iterable[str]) -> list[Circuit]:
    """Return the ways to a peer through relays that are among its addresses."""
    found = [circuit_of(address) for address in addresses]
    return [one for one in found if one is not None and one.peer_id == peer_id]


def dialled(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return those of a peer's addresses that lead straight to it."""
    return tuple(address for address in addresses if _CIRCUIT not in address)


def first_hop(address: str) -> str:
    """Return what is dialled on the way to an address: the relay's, if it leads through one."""
    circuit = circuit_of(address)
    return address if circuit is None else circuit.relay_address

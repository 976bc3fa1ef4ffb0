"""One peer's end of the network: where it listens, as whom, and how long it waits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from atomtrain.errors import ConfigError
from atomtrain.settings import check_ip4, check_port, option

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def _check_host(flag: str, host: str) -> None:
    if not _HOST.fullmatch(host):
        raise ConfigError(
            f"{flag} takes a host name or an IPv4 address, such as 203.0.113.7, not {host!r}"
        )


def _check_identity(_: str, path: Path) -> None:
    if path.exists():
        from atomtrain.swarm.transport.identity import Identity

        Identity.load(path)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What a transport is told. Fields with a help text are options of `atom train`."""

    listen_host: str = option(
        "0.0.0.0",
        "IPv4 address to listen on for other peers. Default: 0.0.0.0 (all) with --run and --join, "
        "else 127.0.0.1 (this machine only).",
        "IP",
        check=check_ip4,
    )
    listen_port: int = option(0, "TCP port to listen on; 0 is any free one.", "N", check=check_port)
    announce_host: str | None = option(
        None,
        "Address under which others reach this machine, if it is not found by itself.",
        "HOST",
        check=_check_host,
    )
    identity_path: Path | None = option(
        None,
        "File with this peer's key ('atom identity FILE' makes one and shows its id). Default: "
        "identity.key in the peer's folder.",
        "FILE",
        check=_check_identity,
    )
    """Made if absent; None: a new identity at each start."""
    direct: bool = True
    """Whether bulk data may go straight between processes where peers can dial each other: to
    a TCP port of its own, the one after `listen_port` if that is chosen."""
    connect_s: float = 10.0
    """Wait for a connection to a peer, or its answer, until one was measured; see `deadlines`."""
    stall_s: float = 15.0
    """A transfer during which no byte moves for this long is given up, until more was measured."""

    def __post_init__(self) -> None:
        """Check what a transport relies on.

        Raises:
            ConfigError: names the field, the value and what is allowed.
        """
        if not 0 <= self.listen_port < 65536:
            raise ConfigError(f"swarm listen_port is {self.listen_port!r}; allowed: 0 to 65535")
        for name in ("connect_s", "stall_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"swarm {name} is {getattr(self, name)!r}; allowed: above 0")

"""This host's side of the network: what carries TCP connections, and what has been sent."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from atombench.links.shaping import INTERFACE


def sent_bytes() -> int:
    """Return the bytes that have left this host's interface so far, headers included.

    Without such an interface (in tests) there is nothing to count.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


def set_congestion_control(name: str) -> int:
    """Have all of this process's TCP connections use a congestion control, by Linux's name.

    Returns:
        How many connections there are.

    Raises:
        OSError: this kernel does not have it, or does not give it to this user.
    """
    count = 0
    for connection in _connections():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        count += 1
    return count


def _connections() -> Iterator[socket.socket]:
    """Yield the connections; each is good until the next one."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        except OSError:  # closed meanwhile: the one by which the folder was read
            continue
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and _is_connected(found):
                yield found


def _is_connected(found: socket.socket) -> bool:
    if found.type != socket.SOCK_STREAM:
        return False
    try:
        found.getpeername()
    except OSError:  # it listens
        return False
    return True

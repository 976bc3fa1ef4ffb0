"""What Gloo itself takes to add up a vector of each peer: the floor of rounds over it.

A process group that is made once, one call of `all_reduce` on memory that is in place already:
nobody agrees on anything, weighs, checks or hashes.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch


class RawGloo:
    """One peer's place in a process group; whoever uses it has a deadline."""

    def __init__(self, address: str, rank: int) -> None:
        """Take part at `address`; the first rank keeps the store at which all meet."""
        self._address, self._rank = address, rank
        self._store: Any = None
        self._group: Any = None
        self._values = torch.zeros(0)
        if rank == 0:
            self._store = self._at(address, 0)

    @property
    def port(self) -> int:
        """Where the store is; 0 with all but the first rank."""
        return 0 if self._store is None else int(self._store.port)

    def join(self, address: str, port: int, peers: int, elements: int, timeout_s: float) -> None:
        """Make the group, whose store is at `address`."""
        gloo = _distributed().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=self._address)]
        if self._store is None:
            self._store = self._at(address, port)
        self._group = gloo(self._store, self._rank, peers, options)
        self._values = torch.zeros(elements)

    def reduce(self) -> None:
        """Add up all peers' vectors."""
        self._group.allreduce([self._values]).wait()

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _at(self, address: str, port: int) -> Any:
        store = _distributed().TCPStore
        return store(address, port, is_master=self._rank == 0, wait_for_workers=False)


def _distributed() -> Any:
    """Return `torch.distributed`, whose classes its type hints leave out."""
    import torch.distributed

    return torch.distributed

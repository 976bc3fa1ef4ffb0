"""Process groups of Gloo, each for all rounds that the same members have one after the other."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where members of a group meet: the store that the first of them keeps."""

    host: str
    port: int


class ProcessGroup:
    """One member's end of a group."""

    def __init__(self, members: tuple[str, ...], me: int, host: str) -> None:
        """Take the place `me` among `members`; `host` is where others reach it."""
        self.members = members
        self.rounds = 0
        """In which it has added up everything that it was given."""
        self.place: Place | None = None
        """Known once this member has gone there."""
        self._me, self._host = me, host
        self._store: Any = None
        self._group: Any = None

    def open(self, timeout_s: float) -> Place:
        """As the first member, have a store at which the others can meet."""
        return self._at(Place(self._host, 0), timeout_s)

    def go_to(self, place: Place, timeout_s: float) -> None:
        """As any other member, find that store; raises `RuntimeError` when it is gone."""
        self._at(place, timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Connect to all members, once they have a store; blocks until they are there.

        Raises:
            RuntimeError: they are not in that time.
        """
        gloo = _distributed().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=self._host)]
        self._group = gloo(self._store, self._me, len(self.members), options)

    def add_up(self, values: Any, timeout_s: float) -> Any:
        """Begin to replace `values` by the sum of all members'; `wait` for what is returned.

        All members must call this for the same numbers in the same order.
        """
        options = _distributed().AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=timeout_s)
        return self._group.allreduce([values], options)

    def abort(self) -> None:
        """Break off whatever is under way; nothing else can be done with the group then."""
        if self._group is not None:
            self._group.abort()

    def _at(self, place: Place, timeout_s: float) -> Place:
        self._store = _distributed().TCPStore(
            *place,
            is_master=self._me == 0,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self.place = Place(place.host, self._store.port)
        return self.place


class KeptGroup:
    """The group of a peer's last round, if all of it went well; for one round at a time."""

    def __init__(self) -> None:
        """Begin without one."""
        self._group: ProcessGroup | None = None

    def take(self, members: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group if it has these members, and do not keep it any more in any case."""
        group, self._group = self._group, None
        return group if group is not None and group.members == members else None

    def keep(self, group: ProcessGroup) -> None:
        """Keep it for the next round."""
        self._group = group

    def close(self) -> None:
        """Leave the group, if there is one."""
        self._group = None


def _distributed() -> Any:
    """Return `torch.distributed`, whose classes its type hints leave out."""
    import torch.distributed

    return torch.distributed

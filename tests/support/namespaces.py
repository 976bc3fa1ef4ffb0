"""Hosts in network namespaces, for tests that skip where there can be none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from atombench.links.shaping import Link, Network
from atomtrain.errors import ConfigError


@contextlib.contextmanager
def namespaces(
    hosts: int, hidden: Sequence[int] = (), link: Link | None = None
) -> Iterator[Network]:
    """Join so many hosts, those in `hidden` behind routers that translate addresses."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(hosts))
            for host in hidden:
                network.put_behind_nat(host)
        except ConfigError as error:
            pytest.skip(str(error))
        if link is not None:
            network.shape(link)
        yield network

"""Congestion control of connections that others opened."""

from __future__ import annotations

import socket

import pytest

from atombench.links.connections import set_congestion_control

OTHER = "reno"
"""Every Linux has it."""


def control_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def test_connections_get_it_and_listeners_keep_theirs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = control_of(listener)
        with socket.create_connection(listener.getsockname()) as near, listener.accept()[0] as far:
            assert set_congestion_control(OTHER) >= 2
            assert {control_of(near), control_of(far)} == {OTHER}
            assert control_of(listener) == before
            near.sendall(b"still open")
            assert far.recv(10) == b"still open"


def test_what_the_kernel_lacks_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        pytest.raises(FileNotFoundError),
    ):
        set_congestion_control("no such one")

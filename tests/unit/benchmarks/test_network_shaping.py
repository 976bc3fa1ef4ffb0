"""What the shaped network's parts do without a network; congestion control of connections."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import pytest

from atombench.links.connections import set_congestion_control
from atombench.links.shaping import Link
from atombench.links.shaping_delay import DelayQueue, Ports, relay
from atomtrain.errors import ConfigError
from tests.support.waiting import PATIENCE_S

HEADER = bytes(10)


def frame(target: int, source: int) -> bytes:
    return HEADER + bytes(5) + bytes([target]) + bytes(5) + bytes([source]) + b"text"


def test_a_link_without_a_rate_has_no_bucket() -> None:
    assert Link(bits_per_s=None).bucket() == []


def test_the_bucket_grows_with_the_rate_and_holds_a_packet_at_least() -> None:
    slow, fast = (Link(bits_per_s=rate).bucket() for rate in (1e4, 1e9))
    assert slow[slow.index("burst") + 1] == "3200b"
    assert fast[fast.index("burst") + 1] == "500000b"
    assert fast[fast.index("rate") + 1] == "1000000000bit"


def test_the_queue_holds_what_is_under_way() -> None:
    near, far = (Link(bits_per_s=1e9, round_trip_s=s).bucket() for s in (0.0, 0.2))
    limit_bytes = [int(b[b.index("limit") + 1].removesuffix("b")) for b in (near, far)]
    assert limit_bytes[1] >= 1e9 / 8 * 0.2 > limit_bytes[0]


def test_frames_are_what_the_link_passes_in_a_millisecond() -> None:
    def frame_bytes(rate: float | None, trip_s: float) -> int:
        log = Link(bits_per_s=rate, round_trip_s=trip_s).tso_rtt_log
        return 65536 >> (int(1e6 * trip_s) >> log)

    assert frame_bytes(1e8, 0.05) == 8192
    assert frame_bytes(1e8, 0.2) == 8192
    assert frame_bytes(2.5e8, 0.05) == 8192, "16 KiB would do: halvings come in steps"
    assert frame_bytes(1e9, 0.03) == 65536
    assert frame_bytes(None, 0.03) == 65536
    assert Link(bits_per_s=1e7, round_trip_s=0.05).tso_rtt_log == 9, "as the kernel does"


@pytest.mark.parametrize(
    "link",
    [
        {"bits_per_s": 0},
        {"bits_per_s": 1e6, "round_trip_s": -1},
        {"bits_per_s": 1e6, "loss_share": 0.6},
    ],
)
def test_impossible_links_are_refused(link: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Link(**link)


def test_frames_come_out_in_order_when_they_are_due() -> None:
    queue = DelayQueue()
    queue.delay_s = 2.0
    queue.put(10.0, 0, b"a")
    queue.put(11.0, 1, b"b")
    assert queue.due(11.9) is None
    assert queue.wait_s(11.5) == 0.5
    assert queue.due(12.5) == (0, b"a")
    assert queue.due(12.5) is None
    assert queue.due(13.0) == (1, b"b")
    assert queue.wait_s(13.0) is None
    assert queue.waiting_bytes == 0


def test_so_many_frames_are_lost_as_was_asked_for() -> None:
    queue = DelayQueue()
    assert all(queue.put(0.0, 0, b"x") for _ in range(1000)), "none without being asked"
    queue.loss_share = 0.1
    kept = sum(queue.put(0.0, 0, b"x") for _ in range(10_000))
    assert 8_800 < kept < 9_200
    assert queue.waiting_bytes == 1000 + kept


def test_a_full_queue_drops() -> None:
    queue = DelayQueue()
    queue.waiting_bytes = 256 << 20
    assert not queue.put(0.0, 0, b"x")


def test_the_switch_learns_where_hosts_are() -> None:
    ports = Ports(3)
    assert ports.targets(0, frame(target=2, source=1)) == [1, 2]
    assert ports.targets(2, frame(target=1, source=2)) == [0]
    assert ports.targets(0, frame(target=2, source=1)) == [2]
    assert ports.targets(2, frame(target=2, source=3)) == []


def test_the_relay_keeps_each_frame_for_the_delay_and_their_order() -> None:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    taps, hosts = zip(*pairs, strict=True)
    for tap in taps:
        tap.setblocking(False)
    control, told = os.pipe()
    relaying = threading.Thread(target=relay, args=([tap.fileno() for tap in taps], control))
    relaying.start()
    try:
        os.write(told, b"0.2 0.0\n")
        sent_s = []
        for number in range(8):
            sent_s.append(time.monotonic())
            hosts[0].send(frame(target=2, source=1) + bytes([number]))
        for number, begun_s in enumerate(sent_s):
            assert select.select([hosts[1]], [], [], PATIENCE_S)[0]
            assert hosts[1].recv(100)[-1] == number
            assert time.monotonic() - begun_s >= 0.2
    finally:
        os.close(told)
        relaying.join(PATIENCE_S)
        assert not relaying.is_alive(), "it ends with what tells it"
        os.close(control)
        for end in (*taps, *hosts):
            end.close()


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

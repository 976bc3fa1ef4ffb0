"""Token buckets: what they let through, what they refuse, what they remember."""

from __future__ import annotations

import logging

import pytest

from atomtrain.swarm.transport.buckets import HOST_TIMES, Allowance, Buckets

ASKS = {"asks": Allowance(5.0, 2.0), "others": Allowance(1.0, 0.0)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taken(buckets: Buckets, times: int, peer_id: str, host: str = "") -> int:
    """Return how many of so many requests are let through."""
    return sum(buckets.take("asks", peer_id, host) for _ in range(times))


def test_a_peer_has_its_burst_at_once_and_then_its_rate() -> None:
    clock = Clock()
    buckets = Buckets(ASKS, clock)
    assert taken(buckets, 9, "a") == 5
    assert taken(buckets, 9, "b") == 5
    clock.now_s += 1.6
    assert taken(buckets, 9, "a") == 3
    clock.now_s += 1e6
    assert taken(buckets, 9, "a") == 5
    assert buckets.take("others", "a")
    assert not buckets.take("others", "a")


def test_identities_at_one_address_share_what_it_has() -> None:
    clock = Clock()
    buckets = Buckets(ASKS, clock)
    assert sum(taken(buckets, 1, f"peer {i}", "1.2.3.4") for i in range(1000)) == 5 * HOST_TIMES
    assert taken(buckets, 9, "elsewhere", "5.6.7.8") == 5
    clock.now_s += 1
    assert sum(taken(buckets, 1, f"other {i}", "1.2.3.4") for i in range(1000)) == 2 * HOST_TIMES


def test_a_refused_request_takes_nothing_from_the_others_at_its_address() -> None:
    buckets = Buckets(ASKS, Clock())
    assert taken(buckets, 1000, "greedy", "1.2.3.4") == 5
    assert taken(buckets, 5, "modest", "1.2.3.4") == 5


def test_what_is_given_back_can_be_taken_again_and_no_more() -> None:
    clock = Clock()
    buckets = Buckets(ASKS, clock)
    for _ in range(1000):
        assert buckets.take("asks", "a", "1.2.3.4")
        buckets.give_back("asks", "a", "1.2.3.4")
    buckets.give_back("asks", "a", "1.2.3.4")
    assert taken(buckets, 9, "a", "1.2.3.4") == 5


def test_made_up_identities_take_little_memory_and_empty_no_address_bucket() -> None:
    buckets = Buckets(ASKS, Clock(), most=100)
    let_through = sum(taken(buckets, 1, f"peer {i}", "1.2.3.4") for i in range(10_000))
    assert let_through == 5 * HOST_TIMES
    assert len(buckets._peers) <= 100
    for i in range(10_000):
        buckets.take("asks", "", f"host {i}")
    assert len(buckets._hosts) <= 100


def test_the_log_says_so_once_for_each_peer_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    buckets = Buckets(ASKS, clock)
    with caplog.at_level(logging.WARNING, "atomtrain.swarm"):
        taken(buckets, 50, "peer-one", "1.2.3.4")
        taken(buckets, 50, "peer-two", "1.2.3.4")
        assert [record.getMessage() for record in caplog.records] == [
            f"Asks of peer {name} at 1.2.3.4 are more than any peer needs: refused for now"
            for name in ("peer-one", "peer-two")
        ]
        clock.now_s += 59
        taken(buckets, 50, "peer-one", "1.2.3.4")
        assert len(caplog.records) == 2
        clock.now_s += 2
        taken(buckets, 50, "peer-one", "1.2.3.4")
        assert len(caplog.records) == 3
        for number in range(1000):  # nor do made-up identities fill the disk
            taken(buckets, 50, f"{number}")
        assert len(caplog.records) < 80

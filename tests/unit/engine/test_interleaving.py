"""Memory of several nodes is used in turn, as far as a host of one node can show it."""

from __future__ import annotations

import threading

import pytest

from atomtrain.engine.devices import host_memory
from atomtrain.engine.devices.host_memory import interleaved

pytestmark = pytest.mark.skipif(
    host_memory._policy() != host_memory._DEFAULT, reason="the system does not tell of policies"
)


def test_of_one_node_nothing_is_changed() -> None:
    with interleaved([0]):
        assert host_memory._policy() == host_memory._DEFAULT


def test_threads_that_are_started_meanwhile_keep_it() -> None:
    # Nodes that the host has not are passed over by the kernel.
    go, found = threading.Event(), []

    def work() -> None:
        go.wait(60)
        found.append(host_memory._policy())

    thread = threading.Thread(target=work)
    with interleaved([0, 1]):
        if host_memory._policy() == host_memory._DEFAULT:
            pytest.skip("the system does not let policies be set")
        assert host_memory._policy() == host_memory._INTERLEAVE
        thread.start()
    assert host_memory._policy() == host_memory._DEFAULT
    go.set()
    thread.join(60)
    assert found == [host_memory._INTERLEAVE]


def test_a_policy_of_the_user_s_own_stays() -> None:
    if not host_memory._set_policy(host_memory._INTERLEAVE, [0]):
        pytest.skip("the system does not let policies be set")
    try:
        with interleaved([0, 1]):
            assert host_memory._policy() == host_memory._INTERLEAVE
        assert host_memory._policy() == host_memory._INTERLEAVE
    finally:
        host_memory._set_policy(host_memory._DEFAULT, [])

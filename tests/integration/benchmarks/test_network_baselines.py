"""The baselines' own processes, on this host's loopback: they train what they should."""

from __future__ import annotations

import contextlib
import math
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atombench.links.peers import PeerError, Peers
from atombench.links.shaping import Link
from atombench.network.model import ModelSetup, Speeds, fused_adamw
from atombench.network.prediction import way_of
from atombench.network.search import Candidate, candidates, to_measure
from tests.support.waiting import PATIENCE_S

MODEL = ModelSetup(layers=4, width=64, vocabulary=64, sequence_tokens=16, sequences_per_peer=4)
SEQUENCES = 8
STEPS = 3
WAY = way_of(Link(bits_per_s=None))


def port_for_later() -> int:
    """Return a free port that the system gives to nobody who asks for any."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(20_000, first_given - 5000), first_given)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    port = port_for_later()
    with Peers("gloo", None, 2, tmp_path_factory.mktemp("peers")) as group:
        group.tell_all(
            "enter", PATIENCE_S, lambda rank: {"rank": rank},
            address="127.0.0.1", port=port, ranks=2, interface="lo", timeout_s=PATIENCE_S,
        )  # fmt: skip
        yield group


@pytest.fixture(scope="module")
def speeds(peers: Peers) -> Speeds:
    return Speeds.of(
        peers.tell_all("speeds", PATIENCE_S, model=MODEL.to_json(), micro_batches=[2, 4])
    )


def tell_stages(peers: Peers, method: str, pipeline: Candidate) -> list[dict[str, Any]]:
    """Have each peer do something with its stage of a pipeline of two."""
    return peers.tell_all(
        method, PATIENCE_S, lambda rank: {"rank": rank},
        model=MODEL.to_json(), plan=pipeline.plan(), sequences=SEQUENCES, ranks=2,
    )  # fmt: skip


def resident_losses() -> list[float]:
    model = MODEL.model()
    optimizer = fused_adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        batches = MODEL.micro_batches(step, SEQUENCES, 2)
        total = 0.0
        for batch in batches:
            loss = model(**batch).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / len(batches))
    return losses


def test_every_pipeline_learns_what_one_process_learns(
    peers: Peers, speeds: Speeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever was measured, on a machine with other work too, nothing seems too slow to try.
    monkeypatch.setattr("atombench.network.search._WORTH", math.inf)
    found = candidates(MODEL, 2, SEQUENCES, speeds, WAY, 1 << 30)
    alike = [candidate for candidate in found if candidate.micro_batch == 2]
    expected = resident_losses()
    chosen = [next(c for c in alike if c.recompute), *to_measure(alike, MODEL, 2)]
    assert {candidate.schedule for candidate in chosen} == {"own", "1F1B", "Interleaved1F1B"}
    for candidate in chosen:
        replies = peers.tell_all(
            "pipeline", PATIENCE_S,
            model=MODEL.to_json(), plan=candidate.plan(), sequences=SEQUENCES, steps=STEPS,
            warm_up=0,
        )  # fmt: skip
        losses = [loss for reply in replies for loss in reply["losses"]]
        assert losses == pytest.approx(expected, abs=2e-3), candidate.name()
        for reply in replies:
            took_s = reply["ended_s"] - reply["started_s"]
            assert 0 < STEPS * reply["compute_s"] < 1.1 * took_s


def test_pipelines_side_by_side_learn_what_one_process_learns(peers: Peers) -> None:
    # Each has one stage and half of the micro-batches; gradients are averaged in every step.
    plan = {
        "schedule": "own",
        "bounds": [0, MODEL.layers + 2],
        "orders": [[[backward, 0, index] for index in range(2) for backward in (False, True)]],
        "micro_batch": 2,
        "micro_batches": 2,
        "pipelines": 2,
        "wire": "bfloat16",
        "ahead": 4,
        "recompute": False,
    }
    replies = peers.tell_all(
        "pipeline", PATIENCE_S,
        model=MODEL.to_json(), plan=plan, sequences=SEQUENCES, steps=STEPS, warm_up=0,
    )  # fmt: skip
    losses = [sum(both) / 2 for both in zip(*(reply["losses"] for reply in replies), strict=True)]
    assert losses == pytest.approx(resident_losses(), abs=2e-3)
    assert replies[0]["losses"] != replies[1]["losses"]


def test_float32_on_the_wire_changes_no_bit(peers: Peers, speeds: Speeds) -> None:
    found = candidates(MODEL, 2, SEQUENCES, speeds, WAY, 1 << 30)
    for recompute in (False, True):
        best = next(c for c in found if c.micro_batch == 2 and c.recompute is recompute)
        plan = {**best.plan(), "wire": "float32"}
        replies = peers.tell_all(
            "pipeline", PATIENCE_S,
            model=MODEL.to_json(), plan=plan, sequences=SEQUENCES, steps=STEPS, warm_up=0,
        )  # fmt: skip
        assert [loss for reply in replies for loss in reply["losses"]] == resident_losses()


def test_data_parallel_peers_learn_together(peers: Peers) -> None:
    replies = peers.tell_all(
        "data_parallel", PATIENCE_S, model=MODEL.to_json(), micro_batch=2, steps=STEPS, warm_up=0
    )
    assert all(len(reply["losses"]) == STEPS for reply in replies)
    # Each peer has samples of its own.
    assert replies[0]["losses"] != replies[1]["losses"]


def test_swapped_peers_learn_what_those_with_all_memory_learn(peers: Peers) -> None:
    # Large steps: without the mean of both peers' gradients losses would be far apart by now.
    model = replace(MODEL, learning_rate=1e-2).to_json()
    same = {"model": model, "micro_batch": 2, "steps": STEPS, "warm_up": 1}
    resident = peers.tell_all("data_parallel", PATIENCE_S, **same)
    budget_bytes = MODEL.state_bytes // 2
    swapped = peers.tell_all(
        "swapped_parallel", PATIENCE_S,
        device_link_bytes_per_s=1e9, device_memory_bytes=budget_bytes, **same,
    )  # fmt: skip
    for ours, theirs in zip(swapped, resident, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)


def test_counted_memory_is_near_the_prediction(peers: Peers, speeds: Speeds) -> None:
    best, *_ = candidates(MODEL, 2, SEQUENCES, speeds, WAY, 1 << 30)
    replies = tell_stages(peers, "pipeline_memory", best)
    counted = max(reply["device_peak_bytes"] for reply in replies)
    assert 0.5 * best.predicted_bytes < counted < 2 * best.predicted_bytes


def test_peers_say_what_a_step_computes_without_the_network(peers: Peers, speeds: Speeds) -> None:
    found = candidates(MODEL, 2, SEQUENCES, speeds, WAY, 1 << 30)
    best = next(c for c in found if c.schedule == "own" and c.chunks == 1)
    parts = MODEL.layers + 2

    def computed(cut: int) -> list[float]:
        """Return seconds of each peer, of which the first has so many parts of the model.

        They are the least of several: what other programs take only adds to them.
        """
        measured = [
            peers.tell_all(
                "pipeline_compute", PATIENCE_S, lambda rank: {"rank": rank},
                model=MODEL.to_json(), plan={**best.plan(), "bounds": [0, cut, parts]},
                sequences=SEQUENCES, ranks=2,
            )
            for _ in range(5)
        ]  # fmt: skip
        return [min(replies[rank]["compute_s"] for replies in measured) for rank in range(2)]

    # All layers but the embedding, or but the head, lie with one of the two.
    little_s, much_s = computed(1)
    assert 2 * little_s < much_s
    much_s, little_s = computed(parts - 1)
    assert much_s > 2 * little_s


def test_the_link_is_probed_one_way_and_both(peers: Peers) -> None:
    replies = peers.tell_all("probe", PATIENCE_S, probe_bytes=100_000, both_ways_bytes=300_000)
    for reply in replies:
        assert reply["round_trip_s"] > 0
        assert reply["bits_per_s"] > 0
        assert reply["both_ways_bits_per_s"] > 0


def test_a_peer_that_fails_is_named(tmp_path: Path) -> None:
    with Peers("gloo", None, 1, tmp_path) as alone:
        with pytest.raises(PeerError, match=r"gloo peer 0 at 'speeds': speeds: .*unexpected"):
            alone.tell(0, "speeds", PATIENCE_S, model={"unexpected": 1}, micro_batches=[1])
        assert alone.failed


def test_a_peer_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with (
        Peers("gloo", None, 1, tmp_path) as alone,
        pytest.raises(PeerError, match="did not answer within 0 s"),
    ):
        alone.tell(0, "speeds", 0.0, model=MODEL.to_json(), micro_batches=[1])

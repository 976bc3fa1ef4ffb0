"""What `atom bench swarm` says of the processor time of wire formats."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from atombench.averaging.costs import CodecTime, TimedCodec
from atombench.swarm.swarm import codec_costs
from atombench.virtual.clock import run_virtual
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.codecs.names import CODEC_NAMES
from tests.support.swarm_virtual import Simulation


def ticking() -> CodecTime:
    """Return one whose clock goes on by a second each time that it is read."""
    ticks = itertools.count()
    return CodecTime(lambda: float(next(ticks)))


def test_what_is_timed_within_something_timed_counts_once() -> None:
    costs = ticking()
    inner = costs.timed("inner", lambda: None)
    outer = costs.timed("outer", lambda: (inner(), inner()))
    outer()
    assert costs.calls == {"outer": 1, "inner": 2}
    assert costs.spent_s == 3.0, "inner reads the clock when it begins, and is no time of its own"
    inner()
    assert costs.spent_s == 4.0


def test_time_that_ends_with_an_error_counts() -> None:
    costs = ticking()
    with pytest.raises(ZeroDivisionError):
        costs.timed("work", lambda: 1 / 0)()
    costs.timed("work", lambda: None)()
    assert costs.spent_s == 2.0


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_timed_codec_has_the_bytes_of_the_plain_one(name: str) -> None:
    costs, plain = ticking(), codec_named(name)
    timed = TimedCodec(plain, costs)
    values = torch.randn(5000)
    assert bytes(timed.encode(values)) == bytes(plain.encode(values))
    total = timed.encoded_bytes(5000), timed.for_mean(3, 7).encoded_bytes(5000)
    assert total == (plain.encoded_bytes(5000), plain.for_mean(3, 7).encoded_bytes(5000))
    mean = torch.zeros(5000)
    mean[:90] = torch.randn(90)
    data = timed.for_mean(3, 7).encode(mean)
    assert bytes(data) == bytes(plain.for_mean(3, 7).encode(mean))
    timed.for_mean(3, 7).decode(data, mean)
    assert (costs.calls["encode"], costs.calls["decode"]) == (2, 1)


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_all_that_a_round_encodes_decodes_and_keeps_is_counted(wire: str) -> None:
    """A round of three: each encodes for two others and itself, and the mean of its own slice."""
    costs = ticking()

    async def scenario() -> int:
        simulation = Simulation((600, 500), seed=1, wire=wire)
        with costs.counted():
            for name in ("a", "b", "c"):
                await simulation.add(name, step_s=0.5)
            await asyncio.sleep(20)
            assert await simulation.settle(20)
        assert simulation.check_means() > 6  # its own codecs are not counted
        return sum(len(report.contributors) == 3 for report in simulation.peers["a"].reports)

    rounds = run_virtual(scenario)
    feedback = codec_named(wire).feedback
    assert costs.calls["encode"] >= (9 + 3 if feedback else 6 + 3) * rounds
    # What a contribution decodes to, and what it loses, its member has from encoding it.
    assert (costs.calls["decode"] >= (6 + 6) * rounds) == (not codec_named(wire).exact)
    assert (costs.calls["_with_residual"] >= 9 * (rounds - 2)) == feedback
    assert costs.calls["_advance_residual"] >= 3 * rounds
    assert costs.spent_s >= costs.calls["encode"] + costs.calls["_advance_residual"]

    before = costs.calls.total()
    run_virtual(scenario_without(wire))
    assert costs.calls.total() == before, "nothing is counted any more"


def scenario_without(wire: str):
    async def scenario() -> None:
        simulation = Simulation((60,), seed=1, wire=wire)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(10)

    return scenario


def test_the_share_is_that_of_a_step_alone() -> None:
    alone = [[{"processor_s": 2.0}, {"processor_s": 4.0}]]
    told = {"steps": 10, "averaged": 5, "codec_s": 0.6, "steps_per_round": 2}
    none = {**told, "averaged": 0, "codec_s": 0.0}
    result = codec_costs(alone, {"int4": [told, told], "topk": [none, none]})
    assert result["step_processor_s"] == 3.0
    assert result["codecs"]["int4"] == {
        "processor_share": pytest.approx(0.02),
        "processor_s_per_round": pytest.approx(0.12),
        "rounds_per_peer": 5.0,
        "steps_per_round": 2,
    }
    assert result["codecs"]["topk"]["processor_share"] is None, "no round, no share"

"""What a round moves is what the formula of its wire format says, and what is free is the rest."""

from __future__ import annotations

import asyncio

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership.deadlines import RoundTiming
from atomtrain.swarm.rounds.commitments import chunk_elements
from atomtrain.swarm.transport.rates import Usage
from tests.support.swarm_virtual import Simulation

pytestmark = pytest.mark.slow

ELEMENTS = 409_600
"""Whole blocks of every format, in slices of four members as well as of two."""
MESSAGES_BYTES = 4_000
SHOWN_BYTES = 700
"""What is said of a contribution whose chunk is shown: its root, signature, and the way there."""
CONTRIBUTION_BITS = {
    "float32": 32.0, "float16": 16.0, "int8": 8.125, "int4": 4.125, "topk": 0.453125,
}  # fmt: skip


def mean_bits(wire: str, members: int) -> float:
    """Return the bits of an element of a mean, as docs/swarm.md tells them."""
    if wire == "topk":
        return 1 + members / 32 * 8.125
    return 8.125 if wire == "int4" else CONTRIBUTION_BITS[wire]


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("wire", CONTRIBUTION_BITS)
def test_bytes_of_a_round_are_those_of_the_formula(wire: str, members: int) -> None:
    async def scenario() -> None:
        simulation = Simulation((ELEMENTS,), seed=5, wire=wire, local_steps_per_round=4)
        peers = [await simulation.add(name, step_s=0.5) for name in "abcd"[:members]]
        await asyncio.sleep(12)
        bits = (CONTRIBUTION_BITS[wire] + mean_bits(wire, members)) * (members - 1) / members
        formula_bytes = bits / 8 * ELEMENTS
        chunk_bytes = 4 * chunk_elements(ELEMENTS // members)
        audits_bytes = members * (members - 1) * (chunk_bytes + SHOWN_BYTES)
        for peer in peers:
            whole = [r for r in peer.reports if len(r.contributors) == members]
            assert len(whole) > 1
            for report in whole:
                for moved_bytes in (report.bytes_sent, report.bytes_received):
                    assert formula_bytes * 0.999 < moved_bytes
                    assert moved_bytes < formula_bytes * 1.001 + audits_bytes + MESSAGES_BYTES

    run_virtual(scenario)


def test_what_is_free_is_what_the_link_moves_and_rounds_do_not() -> None:
    now_s = [100.0]
    usage = Usage(lambda: now_s[0])
    timing = RoundTiming(floor_s=lambda: 5.0, ceiling_s=100.0, slowest_bytes_per_s=1e5)

    def free_bytes_per_s() -> float:
        return usage.free_bytes_per_s(timing.moved_bytes, timing.link_bytes_per_s)

    assert free_bytes_per_s() == 0.0, "nothing was measured"
    timing.observe(8_000_000, 8.0)
    timing.observe(2_000_000, 4.0)  # others were in the way: the link can do better
    now_s[0] += 20.0
    assert free_bytes_per_s() == pytest.approx(1e6 - 1e7 / 20)
    for _ in range(20):  # idle: what was moved more than a minute ago does not count
        now_s[0] += 5.0
        free = free_bytes_per_s()
    assert free == 1e6

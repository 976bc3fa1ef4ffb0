"""Standing: kept on disk, little weight for who comes new; made-up identities cost little."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership import standing as standings
from atomtrain.swarm.membership.standing import FULL_ROUNDS, Standing
from atomtrain.swarm.rounds.owning import OwnedSlice
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_lying_owners import HONEST, LIAR, lied


def test_what_was_seen_of_a_peer_is_known_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "me" / "standing.json"
    before = Standing("run", path)
    before.expel("liar", "its mean is not that of the contributions")
    before.bar("deceived", 1000.0)
    for round_index in (3, 4):
        before.observe("odd", round_index, rejected=True)
    before.observe("good", 4, rejected=False)
    before.save()
    after = Standing("run", path)
    assert after.expelled("liar")
    assert after.all_expelled() == {"liar": "its mean is not that of the contributions"}
    assert not after.trusts("liar", lambda: 1e12)
    assert not after.trusts("deceived", lambda: 1004.0)
    assert after.trusts("deceived", lambda: 1005.0)
    assert after.excluded(5) == {"odd"}
    assert after.lowered("me", ("good", "me", "new"), (8, 8, 8)) == (8, 8, 4)
    assert Standing("another", path).trusts("liar", lambda: 0.0)


def test_peers_may_come_while_another_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Standing("run")
    standing.observe("one", 1, rejected=False)

    def knows(_: Standing, peer_id: str) -> bool:
        standing.observe(f"{peer_id} and another", 1, rejected=False)
        return False

    monkeypatch.setattr(Standing, "knows", knows)
    assert not standing.knows_anybody("me")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"run": "run"}', '{"run": "run", "peers": {"p": {"accepted": "many"}}}',
     '{"run": "run", "peers": {"p": {"evil": 1}}}',
     '{"run": "run", "peers": {"p": {"barred_until_s": NaN}}}'],
)  # fmt: skip
def test_a_damaged_file_costs_what_was_in_it(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "standing.json"
    path.write_text(text)
    assert Standing("run", path).trusts("p", lambda: 0.0)
    assert "cannot be read" in caplog.text
    assert "Traceback" not in caplog.text


def test_so_many_peers_are_remembered_and_who_lied_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standings, "_PEERS_MAX", 3)
    standing = Standing()
    standing.expel("liar", "why")
    for number in range(20):
        standing.observe(f"stranger{number}", number, rejected=False)
    assert standing.expelled("liar")
    assert len(standing._records) == 3


def test_who_comes_new_weighs_little_at_first() -> None:
    standing, members = Standing(), ("me", "new", "old")
    assert standing.lowered("me", members, (100, 100, 100)) == (100, 100, 100), "all are new"
    for round_index in range(2 * FULL_ROUNDS):
        standing.observe("old", round_index, rejected=False)
    weighs = []
    for round_index in range(FULL_ROUNDS + 1):
        weighs.append(standing.lowered("me", members, (100, 100, 100))[1])
        standing.observe("new", round_index, rejected=False)
    assert weighs == [11, 22, 33, 44, 55, 66, 77, 88, 100]
    assert standing.lowered("me", ("me", "x", "old"), (0, 1, 0)) == (0, 1, 0)
    for round_index in (50, 51):
        standing.observe("new", round_index, rejected=True)
    assert standing.lowered("me", members, (100, 100, 100))[1] == 11, "and begins anew"


@pytest.mark.slow
def test_a_liar_that_comes_back_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The honest peers are restarted; what they have seen of the liar is in their folders."""

    async def scenario(seconds_s: float) -> Simulation:
        simulation = Simulation((400, 90), 5, 0.02, mean="plain")
        for name in (*HONEST, LIAR):
            path = tmp_path / name / "standing.json"
            await simulation.add(name, step_s=0.5, standing_path=path)
        await asyncio.sleep(seconds_s)
        return simulation

    with monkeypatch.context() as patch:
        patch.setattr(OwnedSlice, "_encode", lied(lambda mean: -mean))
        run_virtual(lambda: scenario(30.0))
    again = run_virtual(lambda: scenario(20.0))
    for name in HONEST:
        peer = again.peers[name]
        assert not peer.service.context.roster.trusts(LIAR)
        assert all(LIAR not in report.contributors for report in peer.reports)


@pytest.mark.slow
def test_two_hundred_made_up_identities_hold_up_no_rounds() -> None:
    """They are in the records, and nobody is there: each is missed once, and then for a minute."""

    async def rounds(ghosts: int) -> int:
        simulation = Simulation((60, 30), 5, 0.02, group_size=16, local_steps_per_round=16)
        for name in ("a", "b", "c", "d"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(10)
        record = simulation.peers["a"].service.own_record()
        table = simulation.network.table("a")
        admission = simulation.peers["a"].service.context.admission

        async def renew() -> None:
            while True:
                now_s = simulation.clock()
                for number in range(ghosts):
                    false = replace(record, peer_id=f"ghost{number}", sequence=now_s, addresses=())
                    table[f"ghost{number}"] = (admission.seal(false.encode()), 1e12)
                await asyncio.sleep(2)

        renewing = asyncio.create_task(renew())
        await asyncio.sleep(10)  # in which they are found out
        before = [len(peer.reports) for peer in simulation.peers.values()]
        await asyncio.sleep(100)
        renewing.cancel()
        together = [
            report
            for peer, seen in zip(simulation.peers.values(), before, strict=True)
            for report in peer.reports[seen:]
            if len(report.contributors) == 4
        ]
        return len(together)

    alone = run_virtual(lambda: rounds(0))
    assert run_virtual(lambda: rounds(200)) > 0.9 * alone

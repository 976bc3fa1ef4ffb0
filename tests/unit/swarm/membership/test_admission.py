"""Who is admitted: run keys, lists of peers, proofs that are worth nothing to others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage, ConfigError, SwarmError
from atomtrain.swarm.membership.admission import Admission, key_of, read_allowed, read_secret
from tests.support.swarm_virtual import Simulation

_KEY, _OTHER = b"k" * 32, b"o" * 32
_PEER = "12D3KooWJkgyoePXTxr3gVF6FGYx8WZHwXwfMFuBc78jdBJHSeKX"


def _of(peer_id: str, **rule: Any) -> Admission:
    return Admission(**{"run": "r", "peer_id": peer_id, "key": _KEY, **rule})


def test_a_proof_is_good_for_one_pair_and_one_run() -> None:
    proof = _of("a").proof("b")
    assert _of("b").refusal("a", proof) == ""
    for wrong in (
        _of("b").refusal("c", proof),  # stolen
        _of("c").refusal("a", proof),  # passed on
        _of("a").refusal("b", proof),  # sent back
        _of("b", run="s").refusal("a", proof),
        _of("b", key=_OTHER).refusal("a", proof),
        _of("b").refusal("a", ""),
        _of("b").refusal("a", "é" * 64),
    ):
        assert "--run-key" in wrong


def test_without_key_and_list_everybody_is_admitted() -> None:
    open_run = _of("b", key=None)
    assert open_run.refusal("a", "") == ""
    assert open_run.proof("a") == ""
    assert open_run.unseal("a", open_run.seal(b"{}")) == b"{}"


def test_lists_admit_their_own_peer_and_name_the_stranger() -> None:
    listed = _of("b", key=None, allowed=frozenset({"a"}))
    assert listed.refusal("a", "") == listed.refusal("b", "") == ""
    assert "peer c is not on" in listed.refusal("c", "")
    with pytest.raises(BadMessage):
        listed.unseal("c", b"{}")


def test_records_are_sealed_for_one_peer() -> None:
    sealed = _of("a").seal(b'{"x": 1}')
    assert _of("b").unseal("a", sealed) == b'{"x": 1}'
    forged = sealed.replace(b"1", b"2", 1) if b"1" in sealed[-4:] else sealed + b" "
    for peer_id, data in (("c", sealed), ("a", forged), ("a", b'{"x": 1}'), ("a", b"")):
        with pytest.raises(BadMessage):
            _of("b").unseal(peer_id, data)


@given(st.binary(max_size=200))
def test_garbage_is_no_sealed_record(data: bytes) -> None:
    with pytest.raises(BadMessage):
        _of("b").unseal("a", data)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(file)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="5 bytes"):
        read_secret(file)
    file.write_text("long enough to be a secret\n")
    assert read_secret(file) == b"long enough to be a secret"
    with pytest.raises(ConfigError, match="is not a peer id"):
        read_allowed(file)
    file.write_text("# nobody yet\n\n")
    with pytest.raises(ConfigError, match="names no peer"):
        read_allowed(file)
    file.write_text(f"{_PEER} # mine\n/ip4/10.0.0.1/tcp/5/p2p/{_PEER}\n")
    assert read_allowed(file) == {_PEER}


def test_a_key_is_the_stretched_secret_of_one_run() -> None:
    """Against the other implementation of scrypt that is here, with 32 MiB a guess."""
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    secret = b"correct horse battery staple"
    other = Scrypt(salt=b"atom run key\nmine", length=32, n=2**15, r=8, p=1)
    assert key_of(secret, "mine") == other.derive(secret)
    assert len({key_of(secret, "mine"), key_of(secret, "yours"), key_of(b"other", "mine")}) == 3


@pytest.mark.slow
def test_strangers_neither_fetch_nor_average_nor_slow_anybody_down(tmp_path: Path) -> None:
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_bytes(b"the secret of this run")
    wrong.write_bytes(b"a guess at the secret")

    async def scenario() -> None:
        simulation = Simulation((50,), seed=4)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.4, key_path=key)
        await asyncio.sleep(10)
        for name, rule in (("guesser", {"key_path": wrong}), ("open", {})):
            with pytest.raises(SwarmError, match="could not be fetched"):
                await simulation.add(name, step_s=0.4, **rule)
            stranger = simulation.peers.pop(name)
            stranger.service.context.mailbox.store.adopt_local(stranger)
            stranger.service.set_training()  # it goes on as if it belonged to the run
            stranger._task = asyncio.create_task(stranger._train())
        before = len(simulation.peers["a"].reports)
        await asyncio.sleep(40)
        reports = simulation.peers["a"].reports[before:]
        assert len(reports) > 8
        assert {report.contributors for report in reports} == {("a", "b")}
        assert {record.peer_id for record in simulation.peers["a"].service.context.roster.others} \
            == {"b"}  # fmt: skip
        assert simulation.check_means() > 10

    run_virtual(scenario)

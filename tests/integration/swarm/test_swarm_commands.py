"""`atom swarm`, `atom identity` and `atom doctor` as a user runs them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.cli import swarm as swarm_cli
from atomtrain.cli.main import main
from atomtrain.swarm import Manifest, Swarm, SwarmConfig
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.node import probe
from atomtrain.swarm.transport.identity import Identity
from tests.support.swarm_configs import swarm_config
from tests.support.waiting import PATIENCE_S

ELEMENTS = (3000, 500)
STRANGER = Identity(bytes(range(32))).peer_id


class Model:
    """Fragments that nothing trains."""

    def __init__(self) -> None:
        self.fragments = [torch.zeros(n) for n in ELEMENTS]

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands wait for peers that stand still with the whole machine."""
    wait_patiently(monkeypatch)


def wait_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have those who look at a swarm wait as long as it takes."""
    hurried = swarm_cli.outside_config

    def patient(*given: Any) -> SwarmConfig:
        config = hurried(*given)
        endpoint = replace(config.endpoint, connect_s=PATIENCE_S, stall_s=PATIENCE_S)
        return replace(config, endpoint=endpoint)

    monkeypatch.setattr(swarm_cli, "outside_config", patient)
    monkeypatch.setattr(probe, "_TCP_S", PATIENCE_S)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "looked-at"


@pytest.fixture(scope="module")
def founder(run_folder: Path) -> Iterator[Swarm]:
    run_folder.mkdir()
    (run_folder.parent / "key").write_text("the secret of this run")
    config = swarm_config(
        run="looked-at", name="first", listen_host="127.0.0.1", expiry_s=30.0, discoverable=False,
        peers_path=run_folder / "peers.json", key_path=run_folder.parent / "key",
        connect_s=30.0, stall_s=30.0,
    )  # fmt: skip
    swarm = Swarm.found(config, Manifest("looked-at", ELEMENTS), Model())
    yield swarm
    swarm.leave(1.0)


class Said:
    """What a command printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err

    @property
    def json(self) -> Any:
        assert len(self.out.splitlines()) == 1
        return json.loads(self.out)


def test_status_by_address_and_by_folder(
    founder: Swarm, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--run-key", run_folder.parent / "key")
    model = Model()
    founder.boundary(steps=2, tokens=50, tokens_per_s=25.0, step_s=1.0, access=model)
    said = Said(capsys, "swarm", "status", f"looked-at@{founder.address}", *key, "--json")
    assert said.code == 0
    status = said.json
    assert status["run"] == "looked-at"
    assert status["fragments"] == 2
    assert [peer["name"] for peer in status["peers"]] == ["first"], "who looks on is not a member"
    assert {"addresses", "behind", "free_bytes_per_s", "tokens_per_s"} <= status["peers"][0].keys()
    said = Said(capsys, "swarm", "status", run_folder, *key)
    assert said.code == 0
    assert "run looked-at: 1 peer," in said.out
    assert founder.address in said.out
    assert "\x1b" not in said.out


def test_ping_goes_the_way_step_by_step(
    founder: Swarm, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--run-key", run_folder.parent / "key")
    said = Said(capsys, "swarm", "ping", f"looked-at@{founder.address}", *key, "--json")
    assert said.code == 0
    found = said.json
    assert [step["name"] for step in found["steps"]] == ["TCP", "libp2p", "run", "version", "clock"]
    assert found["reached"]
    assert found["round_trip_s"] > 0
    assert abs(found["clock_offset_s"]) < PATIENCE_S
    assert found["bytes_per_s"] > 0


def test_ping_says_where_the_way_ends_and_why(
    founder: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = founder.address.rpartition("/tcp/")[0]
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        closed = f"{host}/tcp/{idle.getsockname()[1]}/p2p/{STRANGER}"
        named = closed.replace("ip4/127.0.0.1", "dns4/no-such-host.invalid")
        other = f"{founder.address.rpartition('/')[0]}/{STRANGER}"
        nowhere = f"/ip4/255.255.255.255/tcp/9/p2p/{STRANGER}"
        wrong = tmp_path / "wrong"
        wrong.write_text("the secret of another run")
        for address, step, *needed in (
            (f"looked-at@{closed}", "TCP", "check that the peer runs"),
            (f"looked-at@{nowhere}", "TCP", "255.255.255.255 port 9: Network is unreachable"),
            (f"looked-at@{named}", "name", "spelling"),
            (f"looked-at@{other}", "libp2p", "paste the address", f"matches {founder.peer_id}"),
            (f"looked-at@{founder.address}", "admission", "--run-key"),
            (f"another@{founder.address}", "run", "write looked-at@"),
        ):
            said = Said(capsys, "swarm", "ping", address)
            assert said.code == 1
            assert f"FAIL {step}" in said.out, said.out
            assert all(text in said.out for text in needed), said.out
        said = Said(capsys, "swarm", "ping", f"looked-at@{founder.address}", "--run-key", wrong)
        assert "this one has another" in said.out


def test_ping_goes_on_with_the_next_address(
    founder: Swarm, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--run-key", run_folder.parent / "key")
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        closed = f"/ip4/127.0.0.1/tcp/{idle.getsockname()[1]}/p2p/{STRANGER}"
        both = f"looked-at@{closed},looked-at@{founder.address}"
        said = Said(capsys, "swarm", "ping", both, *key)
        assert said.code == 0
        assert said.out.index("FAIL TCP") < said.out.index(f"{founder.address}:") < len(said.out)
        found = Said(capsys, "swarm", "ping", both, *key, "--json").json
    assert (found["reached"], found["address"]) == (True, founder.address)
    assert [one["address"] for one in found["failed"]] == [closed]


def test_mistakes_are_told_in_one_line(
    founder: Swarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("bad").write_text("no key")
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        nobody = f"mine@/ip4/127.0.0.1/tcp/{idle.getsockname()[1]}/p2p/{STRANGER}"
        for arguments, needed in (
            (["swarm", "statsu", "x"], "Did you mean 'status'?"),
            (["swarm", "status"], "TARGET"),
            (["swarm", "status", str(tmp_path)], "holds no list of peers"),
            (["swarm", "status", "nowhere"], "neither RUN@ADDRESS nor a folder"),
            (["swarm", "status", "mine@hello"], "is not the address of a peer"),
            (["swarm", "status", nobody], "no peer of run 'mine' answered"),
            (["swarm", "ping", "/ip4/1.2.3.4/tcp/1"], "is not the address of a peer"),
            (["swarm", "ping", nobody.partition("@")[2]], "names 0 runs"),
            (["swarm", "ping", nobody, "--identity", "missing"], "atom identity missing"),
            (["identity"], "FILE"),
            (["identity", str(tmp_path / "bad")], "name a file that is one, or one that is not"),
            (["identity", "/proc/nowhere/key"], "cannot be written"),
            (["doctor", "--port", "70000"], "--port must be"),
            (["train", "--identity", str(tmp_path / "bad"), "--run", "x"], "is no Ed25519 key"),
            (["train", "--identity", "k", "--peers", "2"], "--identity"),
        ):
            said = Said(capsys, *arguments)
            assert said.code == 2, arguments
            assert needed in said.err
            assert len(said.err.splitlines()) == 1
            assert said.out == ""


def test_a_list_of_peers_of_another_run_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = KnownPeers("one", tmp_path / "other" / "peers.json")
    known.remember({STRANGER: (f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}",)}, 1.0)
    assert "holds no list" in Said(capsys, "swarm", "status", tmp_path / "other").err


def test_identity_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    first = Said(capsys, "identity", path)
    assert first.code == 0
    assert first.out.startswith("12D3KooW")
    assert "made" in first.err
    again = Said(capsys, "identity", path, "--json")
    assert again.json == {"peer_id": first.out.strip(), "path": str(path), "created": False}
    path.rename(tmp_path / "identity.key")
    assert Said(capsys, "identity", tmp_path).out == first.out


def test_a_run_key_is_made_once_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "team.key", tmp_path / "other.key"
    made = Said(capsys, "identity", "--new-run-key", path)
    assert (made.code, made.out) == (0, f"{path}\n")
    assert "--run-key FILE" in made.err
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text()
    assert len(secret.strip()) == 43  # 256 bits
    refused = Said(capsys, "identity", "--new-run-key", path)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "is there already" in refused.err
    assert path.read_text() == secret
    said = Said(capsys, "identity", "--new-run-key", other, "--json")
    assert said.json == {"path": str(other), "created": True}
    assert other.read_text() != secret
    assert "cannot be written" in Said(capsys, "identity", "--new-run-key", "/proc/a/key").err


def test_doctor_finds_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "doctor", "--directory", tmp_path / "runs", "--json")
    states = {finding["check"]: finding["state"] for finding in said.json["findings"]}
    assert {"versions", "memory", "disk", "port", "clock", "open files"} <= states.keys()
    assert said.code == (1 if said.json["problems"] else 0)
    assert states["port"] == "ok"
    assert not [*tmp_path.iterdir()], "it leaves nothing behind"
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        said = Said(capsys, "doctor", "--host", "127.0.0.1", "--port", port,
                    "--directory", "/proc/runs")  # fmt: skip
    assert said.code == 1
    assert "problem  port" in said.out
    assert "choose another --port" in said.out
    assert "problem  disk" in said.out
    unknown = Said(capsys, "doctor", "--host", "192.0.2.200", "--directory", tmp_path)
    assert "an address of this machine" in unknown.out

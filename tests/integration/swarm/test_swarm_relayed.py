"""A peer behind a relay, over real streams: what a user sees of it, and ways in through it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from atomtrain.swarm import Manifest, Swarm, SwarmConfig
from atomtrain.swarm.transport.addresses import circuits_to
from atomtrain.swarm.transport.identity import Identity
from tests.integration.swarm.test_swarm_commands import ELEMENTS, Model, Said, wait_patiently
from tests.integration.swarm.test_swarm_in_process import joined
from tests.support.swarm_configs import swarm_config
from tests.support.waiting import wait_until


def _config(folder: Path, **settings: object) -> SwarmConfig:
    return swarm_config(
        run="through", listen_host="127.0.0.1", expiry_s=10.0, discoverable=False,
        key_path=folder / "key", connect_s=30.0, stall_s=30.0, **settings,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_patiently(monkeypatch)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Swarm, Swarm]]:
    """A relay, and a peer that believes to need one."""
    (tmp_path / "key").write_text("the secret of this run")
    relay = Swarm.found(_config(tmp_path, name="relay"), Manifest("through", ELEMENTS), Model())
    hidden = joined(_config(tmp_path, name="hidden", join=(relay.address,)))
    hidden._service._reach.needs_relays = True  # nobody can find out on one machine
    hidden.download(Model())
    yield relay, hidden
    for swarm in (hidden, relay):
        swarm.leave(1.0)


def test_status_ping_and_join_through_a_relay(
    pair: tuple[Swarm, Swarm], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relay, hidden = pair
    key = ("--run-key", tmp_path / "key")

    def relays() -> int:
        return next((p.relays for p in relay.peers() if p.peer_id == hidden.peer_id), 0)

    wait_until(lambda: relays() == 1)
    said = Said(capsys, "swarm", "status", f"through@{relay.address}", *key)
    assert any(line.startswith("hidden") and "relayed" in line for line in said.out.splitlines())
    assert "relay relays for hidden: 0 streams" in said.out
    said = Said(capsys, "swarm", "status", f"through@{relay.address}", *key, "--json")
    shown = {peer["name"]: peer for peer in json.loads(said.out)["peers"]}
    (circuit,) = (a for a in shown["hidden"]["addresses"] if circuits_to(hidden.peer_id, [a]))
    assert circuit.startswith(relay.address)
    assert (shown["relay"]["relays"], shown["hidden"]["relays"]) == (0, 1)

    said = Said(capsys, "swarm", "ping", f"through@{circuit}", *key, "--json")
    assert said.code == 0, said.out
    found = json.loads(said.out)
    names = [step["name"] for step in found["steps"]]
    assert names == ["TCP", "relay", "libp2p", "run", "version", "clock"]
    assert found["bytes_per_s"] > 0
    assert Said(capsys, "swarm", "status", f"through@{circuit}", *key).code == 0

    stranger = Identity.create().peer_id
    for address, arguments, needed in (
        (circuit, (), "FAIL relay"),  # without the key it is the relay that turns one away
        (circuit.replace(hidden.peer_id, stranger), key, "does not relay to peer"),
    ):
        said = Said(capsys, "swarm", "ping", f"through@{address}", *arguments)
        assert said.code == 1
        assert needed in said.out

    newcomer = joined(_config(tmp_path, name="newcomer", join=(circuit,)))
    try:
        newcomer.download(Model())
        assert newcomer.manifest.fragment_elements == ELEMENTS
    finally:
        newcomer.leave(1.0)

"""Peers of one process, over real daemons on loopback: joining, errors, checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm import Manifest, RoundReport, Swarm, SwarmConfig
from atomtrain.swarm.catchup.joining import WrongKeyError
from atomtrain.swarm.transport.transport import LinkLost
from tests.support.waiting import PATIENCE_S, wait_until

ELEMENTS = (3000, 500)


class Model:
    """Fragments that tests change at will."""

    def __init__(self, value: float = 0.0, elements: tuple[int, ...] = ELEMENTS) -> None:
        self.fragments = [torch.full((n,), value) for n in elements]

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]

    def add(self, value: float) -> None:
        for fragment in self.fragments:
            fragment.add_(value)


def config(run: str = "inproc", **changes: object) -> SwarmConfig:
    settings = {
        "run": run, "listen_host": "127.0.0.1", "expiry_s": 6.0, "connect_s": 30.0, "stall_s": 30.0,
        "round_floor_s": 5.0, "local_steps_per_round": 4, "wire": "float32", **changes,
    }  # fmt: skip
    return SwarmConfig(**settings)  # type: ignore[arg-type]


def joined(how: SwarmConfig) -> Swarm:
    """Join, as often as it takes where a process stands still for seconds."""
    for left in reversed(range(20)):
        try:
            return Swarm.join(how)
        except SwarmError as error:
            if left == 0 or "no peer" not in str(error):
                raise
    raise AssertionError("the last try ends")


def cross(swarm: Swarm, model: Model, steps: int = 1) -> list[RoundReport]:
    return swarm.boundary(
        steps=steps, tokens=10 * steps, tokens_per_s=100.0, step_s=0.02, access=model
    )


def cross_until(
    done: Callable[[list[RoundReport]], object], *peers: tuple[Swarm, Model]
) -> list[RoundReport]:
    """Let all peers cross boundaries until `done` says so of all their reports."""
    reports: list[RoundReport] = []
    until_s = time.monotonic() + PATIENCE_S
    while not done(reports):
        assert time.monotonic() < until_s, reports
        for swarm, model in peers:
            reports += cross(swarm, model)
        time.sleep(0.02)
    return reports


def together(reports: list[RoundReport]) -> list[RoundReport]:
    """Return the rounds that were averaged by two."""
    return [r for r in reports if len(r.contributors) == 2 and r.outcome == "averaged"]


@pytest.fixture(scope="module")
def founder() -> Iterator[tuple[Swarm, Model]]:
    model = Model(1.0)
    payload = {"tokenizer": "t" * 300_000}
    swarm = Swarm.found(config(), Manifest("inproc", ELEMENTS, payload), model)
    yield swarm, model
    swarm.leave(2.0)
    swarm.leave(2.0)  # again: nothing happens


def test_join_download_average_checkpoint_and_rebase(founder: tuple[Swarm, Model]) -> None:
    swarm, model = founder
    cross_until(lambda reports: len(reports) >= 4, founder)  # alone: anchors follow
    other = joined(config(join=(swarm.address,), local_steps_per_round=999))
    try:
        assert other.manifest == swarm.manifest
        assert other.manifest.digest == swarm.manifest.digest
        assert other.manifest.rules.local_steps_per_round == 4
        copy = Model()
        progress = other.download(copy)
        assert progress.round > 0
        assert progress.tokens > 0
        for index in range(2):
            anchor = other.state_dict().tensors[f"anchor.{index}"]
            assert torch.equal(copy.fragments[index], anchor)
        model.add(1.0)
        both = together(cross_until(together, founder, (other, copy)))[0]
        assert both.bytes_sent > 4 * ELEMENTS[both.fragment] / 2
        everybody = {swarm.peer_id, other.peer_id}
        wait_until(lambda: {peer.peer_id for peer in other.peers()} == everybody)
        assert other.known_addresses() == (swarm.address,)
        saved = other.state_dict()
        saved_model = Model()
        for mine, theirs in zip(saved_model.fragments, copy.fragments, strict=True):
            mine.copy_(theirs)
    finally:
        other.leave(2.0)
    model.add(5.0)
    learnt = lambda: [float(t.mean()) for t in anchors_of(swarm)]  # noqa: E731
    cross_until(lambda _: min(learnt()) > 4.0, founder)
    _rebase(founder, saved, saved_model)


def anchors_of(swarm: Swarm) -> list[torch.Tensor]:
    tensors = swarm.state_dict().tensors
    return [tensors[f"anchor.{index}"] for index in range(len(ELEMENTS))]


def _rebase(founder: tuple[Swarm, Model], saved: object, model: Model) -> None:
    """A resumed peer takes what it missed, and keeps what it had learnt beyond its anchors."""
    resumed = joined(config(join=(founder[0].address,)))
    try:
        resumed.load_state_dict(saved)  # type: ignore[arg-type]
        model.add(0.25)
        before = [
            f - saved.tensors[f"anchor.{i}"]  # type: ignore[attr-defined]
            for i, f in enumerate(model.fragments)
        ]
        wait_until(lambda: founder[0].peer_id in {peer.peer_id for peer in resumed.peers()})
        resumed.rebase(model)
        anchors = resumed.state_dict().tensors
        for index, fragment in enumerate(model.fragments):
            kept = fragment - anchors[f"anchor.{index}"]
            torch.testing.assert_close(kept, before[index], rtol=1e-5, atol=1e-5)
        assert float(model.fragments[0].mean()) > 4.0
    finally:
        resumed.leave(2.0)


def _refusal_of(join: SwarmConfig, *, reachable: bool = True) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        (joined if reachable else Swarm.join)(join)
    assert "\n" not in str(caught.value)
    return caught.value


def _error_of(join: SwarmConfig, *, reachable: bool = True) -> str:
    return str(_refusal_of(join, reachable=reachable))


def test_wrong_run_name_says_which_run_is_there(founder: tuple[Swarm, Model]) -> None:
    assert "'inproc'" in _error_of(config(run="other", join=(founder[0].address,)))


def test_unreachable_and_malformed_addresses(founder: tuple[Swarm, Model]) -> None:
    nobody = founder[0].address.rsplit("/tcp/", 1)[0] + "/tcp/9/p2p/" + "12D3KooW" + "A" * 44
    for address in ("192.168.1.5:31337", "/ip4/127.0.0.1/tcp/9", nobody):
        assert address in _error_of(config(join=(address,)), reachable=False)
    dead = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJkgyoePXTxr3gVF6FGYx8WZHwXwfMFuBc78jdBJHSeKX"
    assert "no peer answers" in _error_of(config(join=(dead,)), reachable=False)
    assert "no address to join" in _error_of(config())


def test_one_good_address_among_bad_ones_is_enough(founder: tuple[Swarm, Model]) -> None:
    dead = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJkgyoePXTxr3gVF6FGYx8WZHwXwfMFuBc78jdBJHSeKX"
    swarm = joined(config(join=(dead, founder[0].address)))
    swarm.leave(1.0)


def test_key_and_list_of_peers_keep_strangers_out(tmp_path: Path) -> None:
    key, wrong, ids = tmp_path / "key", tmp_path / "wrong", tmp_path / "ids"
    key.write_text("the secret of this run")
    wrong.write_text("a guess at the secret")
    ids.write_text("12D3KooWJkgyoePXTxr3gVF6FGYx8WZHwXwfMFuBc78jdBJHSeKX  # somebody else")
    model = Model(1.0)
    swarm = Swarm.found(config(key_path=key), Manifest("inproc", ELEMENTS), model)
    try:
        join = {"join": (swarm.address,)}
        for stranger in (config(**join), config(**join, key_path=wrong)):
            assert "turns this one away: it admits only peers that know" in _error_of(stranger)
            assert isinstance(_refusal_of(stranger), WrongKeyError)
        listed = config(**join, key_path=key, allow_path=ids)
        refused = _refusal_of(listed)
        assert "not on its list of allowed peers: make an id that stays" in str(refused)
        assert not isinstance(refused, WrongKeyError)
        ids.write_text(f"{swarm.address}\n")
        other = joined(listed)
        try:
            copy = Model()
            other.download(copy)
            cross_until(together, (swarm, model), (other, copy))
        finally:
            other.leave(2.0)
    finally:
        swarm.leave(2.0)


def test_newcomer_with_a_key_does_not_join_an_open_run(
    founder: tuple[Swarm, Model], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("the secret of this run")
    error = _error_of(config(join=(founder[0].address,), key_path=key))
    assert "is none that this one admits" in error


def test_large_fragment_goes_over_several_streams() -> None:
    model, copy = Model(1.0, (1 << 21,)), Model(0.0, (1 << 21,))
    swarm = Swarm.found(config(wire="int4"), Manifest("inproc", (1 << 21,)), model)
    try:
        other = joined(config(join=(swarm.address,)))
        try:
            other.download(copy)
            model.add(1.0)
            digests = lambda peer: peer.state_dict().meta["digests"]  # noqa: E731
            reports = cross_until(
                lambda reports: together(reports) and digests(swarm) == digests(other),
                (swarm, model),
                (other, copy),
            )
            both = together(reports)[0]
            assert both.bytes_sent > (1 << 20) * (4.125 + 8.125) / 8
        finally:
            other.leave(2.0)
    finally:
        swarm.leave(2.0)


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SwarmError, match=f"127.0.0.1:{port}"):
            Swarm.found(config(listen_port=port), Manifest("inproc", ELEMENTS), Model())


def test_parameters_that_do_not_fit_the_manifest() -> None:
    with pytest.raises(SwarmError, match="fragment 0"):
        Swarm.found(config(), Manifest("inproc", (7, 7)), Model())


def test_garbage_on_the_stream_harms_nobody(founder: tuple[Swarm, Model]) -> None:
    asyncio.run(_throw_garbage(founder[0].address, founder[0].peer_id))
    reports = cross_until(lambda reports: len(reports) >= 2, founder)
    assert reports[-1].outcome in {"averaged", "fetched", "abandoned"}


async def _throw_garbage(address: str, peer_id: str) -> None:
    from atomtrain.swarm.transport.libp2p import Libp2pTransport

    transport = await Libp2pTransport.create(config())
    try:
        transport.learn(peer_id, (address,))
        for garbage in (b"", b"\0", b"\xff" * 100_000, b"\0\0\0\x02{}", b"\0\0\0\x05hello" * 50):
            channel = await transport.open(peer_id)
            with contextlib.suppress(LinkLost):  # it may hang up at the first bytes
                await channel.send_bytes(garbage)
            channel.close()
    finally:
        await transport.close()


def wait_for_training(swarm: Swarm, count: int) -> None:
    """Wait until a peer knows of so many that train, itself included."""
    wait_until(lambda: sum(peer.state == "training" for peer in swarm.peers()) == count)


def fail_if_asked() -> bool:
    raise AssertionError("it waits for rounds")


def test_two_peers_end_on_one_model() -> None:
    model = Model(1.0)
    rules = {"run": "ends", "local_steps_per_round": 1000, "outer_momentum": 0.5}
    first = Swarm.found(config(**rules), Manifest("ends", ELEMENTS, {}), model)
    try:
        other = joined(config("ends", join=(first.address,)))
        try:
            copy = Model()
            other.download(copy)
            wait_for_training(first, 2)
            for value, peer in ((0.5, (first, model)), (0.25, (other, copy))):
                peer[1].add(value)
                cross(*peer)
            assert first.settle(model, stop=lambda: True) == [], "it can be stopped"
            with ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(other.settle, copy)
                mine = first.settle(model)
                for reports in (mine, theirs.result(PATIENCE_S)):
                    assert {r.fragment for r in reports if len(r.contributors) == 2} == {0, 1}
            for index, (a, b) in enumerate(zip(model.fragments, copy.fragments, strict=True)):
                assert torch.equal(a, b)
                assert torch.equal(a, first.state_dict().tensors[f"anchor.{index}"])
                assert 1.2 < float(a.mean()) < 1.7
        finally:
            other.leave(2.0)
        wait_for_training(first, 1)
        model.add(1.0)
        cross(first, model)
        assert first.settle(model, stop=fail_if_asked) == [], "nobody is left to average with"
    finally:
        first.leave(2.0)


def test_who_leaves_ends_its_round_and_enters_no_other() -> None:
    model, copy = Model(1.0), Model()
    rules = {"run": "leaves", "local_steps_per_round": 1000}
    first = Swarm.found(config(**rules), Manifest("leaves", ELEMENTS, {}), model)
    try:
        leaver = joined(config("leaves", join=(first.address,)))
        try:
            leaver.download(copy)
            wait_for_training(first, 2)
            wait_for_training(leaver, 2)
            copy.add(1.0)
            cross(leaver, copy)
            with ThreadPoolExecutor(1) as pool:
                # The first begins a round, to which the other is called while it ends its training.
                cross(first, model, steps=1000)
                mine = pool.submit(cross_until, together, (first, model))
                mailbox = leaver._service.context.mailbox
                wait_until(lambda: mailbox.snapshot_wanted)
                theirs = leaver.finish(copy, PATIENCE_S)
                assert together(theirs), "the round is ended"
                assert together(mine.result(PATIENCE_S))
            assert not leaver._service.in_rounds
            wait_for_training(first, 1)  # it is told, though the leaver has not left yet
            versions = leaver.state_dict().meta["versions"]
            alone = cross_until(lambda reports: len(reports) >= 2, (first, model))
            assert not together(alone)
            assert leaver.state_dict().meta["versions"] == versions
            assert leaver.finish(copy, PATIENCE_S) == [], "again: nothing happens"
        finally:
            leaver.leave(2.0)
    finally:
        first.leave(2.0)

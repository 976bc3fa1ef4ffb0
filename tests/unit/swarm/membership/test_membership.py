"""Records that only their peer can have made, the swarm's time, and ways back into a run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import stat
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage, ConfigError
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.catchup import joining
from atomtrain.swarm.membership import records
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.config import SwarmConfig
from atomtrain.swarm.membership.directory import SwarmClock
from atomtrain.swarm.membership.known_peers import KnownPeers, read_known
from atomtrain.swarm.membership.records import (
    JOINING,
    LEFT,
    TRAINING,
    PeerRecord,
    RecordReader,
    sign_record,
)
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.node.service import beat_pause_s
from atomtrain.swarm.transport.daemon import RuntimeFolder
from atomtrain.swarm.transport.identity import Identity, public_key_of, verify
from atomtrain.swarm.transport.transport import LinkLost
from tests.support.swarm_virtual import Simulation

NOW_S = 1_700_000_000.0
ALICE, MALLORY = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))


def record_of(peer: Identity, sequence: float = 1.0, **changes: Any) -> PeerRecord:
    record = PeerRecord(
        peer_id=peer.peer_id, manifest="m", name="n", state=TRAINING, sequence=sequence,
        addresses=(f"/ip4/10.0.0.1/tcp/1/p2p/{peer.peer_id}",), next_round=3, steps=4, tokens=5,
        tokens_per_s=6.0, step_s=0.1, round_s=0.2, free_bytes_per_s=1.0, fetch_bytes_per_s=0.0,
        stamps=(Stamp(1, 2, "0d" * 16), None),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


# Keys


def test_a_key_is_kept_and_gives_the_same_id(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.peer_id.startswith("12D3KooW")
    assert Identity.load_or_create(path).peer_id == made.peer_id
    Identity.create().save(path)  # whoever comes second finds the first one's
    assert Identity.load(path).peer_id == made.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_an_id_is_what_libp2p_makes_of_the_key() -> None:
    # RFC 8032, test 1; the id was worked out by hand from libp2p's specification.
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    identity = Identity(secret)
    found = public_key_of(identity.peer_id)
    assert found is not None
    assert found.hex() == public
    assert len(identity.encode()) == 68


@pytest.mark.parametrize("content", [b"", b"x" * 68, b"\x08\x01\x12\x40" + bytes(64), b"\0" * 999])
def test_a_file_that_is_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="atom identity"):
        Identity.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Identity.load(tmp_path / "missing")


def test_an_id_is_written_in_one_way() -> None:
    assert public_key_of(ALICE.peer_id) is not None
    for other in (f"{ALICE.peer_id} ", f" {ALICE.peer_id}", f"1{ALICE.peer_id}", "0OIl", "", "é"):
        assert public_key_of(other) is None


@given(st.text(max_size=80), st.binary(max_size=80))
def test_strange_ids_and_signatures_are_refused(peer_id: str, signature: bytes) -> None:
    assert not verify(peer_id, b"text", signature)
    assert not verify(ALICE.peer_id, b"text", signature)


# Records in the hash table


def test_a_record_comes_back_as_its_peer_signed_it() -> None:
    data = sign_record(ALICE, "run", b"record", NOW_S + 30)
    assert RecordReader("run").open(ALICE.peer_id, data, NOW_S) == (b"record", NOW_S + 30)


def test_forged_replayed_and_stale_records_are_refused() -> None:
    data = sign_record(ALICE, "run", b"record", NOW_S + 30)
    head, tail = data[:-14], data[-14:]
    longer = head + struct.pack(">d", NOW_S + 60) + tail[8:]
    forged = sign_record(MALLORY, "run", b"record", NOW_S + 30)
    for what, wrong, run, now_s in (
        ("another peer's", forged, "run", NOW_S),
        ("with a new time", longer, "run", NOW_S),
        ("with another content", data[:-1] + b"x", "run", NOW_S),
        ("of another run", data, "other", NOW_S),
        ("after its time", data, "run", NOW_S + 31),
        ("of the future", sign_record(ALICE, "run", b"r", NOW_S + 9999), "run", NOW_S),
        ("never ends", sign_record(ALICE, "run", b"r", float("nan")), "run", NOW_S),
        ("too long", sign_record(ALICE, "run", bytes(9 << 20), NOW_S + 30), "run", NOW_S),
    ):
        with pytest.raises(BadMessage):
            assert not RecordReader(run).open(ALICE.peer_id, wrong, now_s), what


def test_a_reader_checks_a_signature_once_and_the_time_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def counted(peer_id: str, data: bytes, signature: bytes) -> bool:
        checked.append(peer_id)
        return verify(peer_id, data, signature)

    monkeypatch.setattr(records, "verify", counted)
    reader = RecordReader("run")
    data = sign_record(ALICE, "run", b"record", NOW_S + 30)
    for now_s in (NOW_S, NOW_S + 20):
        assert reader.open(ALICE.peer_id, bytes(bytearray(data)), now_s) == (b"record", NOW_S + 30)
    assert checked == [ALICE.peer_id]
    for peer_id, wrong, now_s in (
        (ALICE.peer_id, data, NOW_S + 31),
        (MALLORY.peer_id, data, NOW_S),
        (ALICE.peer_id, data[:-1] + b"x", NOW_S),
        (ALICE.peer_id, sign_record(ALICE, "other", b"record", NOW_S + 30), NOW_S),
        (ALICE.peer_id, None, NOW_S),
    ):
        with pytest.raises(BadMessage):
            reader.open(peer_id, wrong, now_s)  # type: ignore[arg-type]
    assert reader.open(ALICE.peer_id, data, NOW_S)[0] == b"record", "and is not put off by them"


def test_a_reader_remembers_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_GOOD_BYTES_MAX", 500)
    reader = RecordReader("run")
    for number in range(20):
        data = sign_record(ALICE, "run", b"r%d" % number, NOW_S + 30)
        reader.open(ALICE.peer_id, data, NOW_S)
        reader.open(ALICE.peer_id, data, NOW_S)
    assert sum(len(data) for data in reader._good) == reader._good_bytes <= 500
    assert reader._good


@given(st.binary(max_size=200), st.integers(0, 100), st.integers(0, 255))
def test_any_change_of_a_record_shows(garbage: bytes, position: int, value: int) -> None:
    data = sign_record(ALICE, "run", b"r" * 30, NOW_S + 30)
    changed = bytearray(data)
    changed[position % len(data)] = value
    for wrong in (garbage, bytes(changed), data[: position % len(data)]):
        if wrong != data:
            with pytest.raises(BadMessage):
                RecordReader("run").open(ALICE.peer_id, wrong, NOW_S)


def test_nodes_of_the_hash_table_keep_signed_records_of_the_run_only(tmp_path: Path) -> None:
    pytest.importorskip("hivemind")
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils import MSGPackSerializer

    from atomtrain.swarm.membership.directory import record_validator

    def stored(data: object, *, peer: Identity = ALICE, key: str = "atom/run/peers",
               expires_s: float = NOW_S + 30) -> DHTRecord:  # fmt: skip
        return DHTRecord(
            DHTID.generate(source=key).to_bytes(),
            MSGPackSerializer.dumps(peer.peer_id),
            MSGPackSerializer.dumps(data),
            expires_s,
        )

    open_run = record_validator(Admission("run", "me"), lambda: NOW_S, RecordReader("run"))
    good = sign_record(ALICE, "run", b"record", NOW_S + 30)
    assert open_run.validate(stored(good))
    assert not open_run.validate(stored(good, peer=MALLORY))
    assert not open_run.validate(stored(good, expires_s=NOW_S + 31)), "put back for longer"
    assert not open_run.validate(stored(good, key="atom/other/peers"))
    assert not open_run.validate(stored(good, key="anything else"))
    for junk in (b"junk", 7, None, {"a": 1}, "text"):
        assert not open_run.validate(stored(junk))
    assert not open_run.validate(DHTRecord(stored(good).key, b"", b"\xff", NOW_S + 30))
    key = Admission("run", ALICE.peer_id, b"k" * 32)
    keyed = record_validator(Admission("run", "me", b"k" * 32), lambda: NOW_S, RecordReader("run"))
    assert not keyed.validate(stored(good)), "by somebody who does not know the key"
    assert keyed.validate(stored(sign_record(ALICE, "run", key.seal(b"record"), NOW_S + 30)))


class FakeNode:
    """A node of a hash table of five, of which two do not answer and one tells old news."""

    def __init__(self) -> None:
        from hivemind.utils import MSGPackSerializer
        from hivemind.utils.timed_storage import ValueWithExpiration

        self.node_id, self.protocol = 0, self
        self.storage: dict[Any, Any] = {}
        self.serializer = MSGPackSerializer
        self.asked: list[str] = []
        self.stored: list[str] = []

        def told(*signed: tuple[str, bytes]) -> Any:
            entries = {peer: (MSGPackSerializer.dumps(data), NOW_S + 30) for peer, data in signed}
            return ValueWithExpiration(entries, NOW_S + 30)

        old, new = (sign_record(ALICE, "run", text, NOW_S + s)
                    for text, s in ((b"old", 20), (b"new", 30)))  # fmt: skip
        forged = (MALLORY.peer_id, new)
        self.answers = {
            "p1": told((ALICE.peer_id, new)),
            "p2": told((ALICE.peer_id, old), forged),
            "p3": None,
        }

    async def find_nearest_nodes(self, ids: list[Any], **_: Any) -> dict[Any, Any]:
        return {one: {0: "me", 1: "p1", 2: "p2", 3: "p3", 4: "dead", 5: "dead"} for one in ids}

    async def _call_find_with_blacklist(self, peer: str, keys: list[Any]) -> Any:
        self.asked.append(peer)
        return {keys[0]: (self.answers[peer], {})} if peer in self.answers else None

    async def call_store(self, peer: str, *_: Any, **__: Any) -> Any:
        self.stored.append(peer)
        return None if peer == "dead" else [True]


def test_records_are_read_from_three_that_answer() -> None:
    pytest.importorskip("hivemind")
    from atomtrain.swarm.membership.directory import DhtDirectory

    asked = set()
    for _ in range(20):
        node = FakeNode()
        directory = DhtDirectory(
            node, ALICE, Admission("run", "me"), lambda: NOW_S, RecordReader("run")  # type: ignore[arg-type]
        )  # fmt: skip
        found = asyncio.run(directory.records())
        assert found == {ALICE.peer_id: b"new"}, "the latest, and nothing forged"
        assert {"p1", "p2", "p3"} <= set(node.asked)
        assert len(node.asked) <= 5
        asked.add(tuple(node.asked))
    assert len(asked) > 1, "the load is shared"


def test_records_take_a_ninth_of_the_time_but_never_expire() -> None:
    assert beat_pause_s(30.0, 0.0) == (1.0, 7.0), "whatever news there are"
    assert beat_pause_s(30.0, 0.5)[0] == 4.0
    assert beat_pause_s(30.0, 5.0) == (6.0, 7.0), "a beat that takes long is not put off for long"


# What a peer makes of the records


def test_an_older_record_does_not_take_the_place_of_a_newer_one() -> None:
    roster = Roster(Admission("run", "me"), 2, "m")
    for sequence, state, members in (
        (5.0, TRAINING, 1),
        (4.0, JOINING, 1),  # put back by somebody
        (6.0, LEFT, 0),
        (5.0, TRAINING, 0),
        (7.0, TRAINING, 1),  # it has come back
    ):
        roster.update({ALICE.peer_id: record_of(ALICE, sequence, state=state).encode()})
        assert len(roster.others) == members, sequence
        assert all(record.state == TRAINING for record in roster.others)
    assert roster.addresses.keys() == {ALICE.peer_id}
    roster.update({ALICE.peer_id: record_of(ALICE, 8.0, manifest="another").encode()})
    assert roster.of_another == {ALICE.peer_id}
    assert not roster.others, "a run of the same name, but not the same run"
    assert not roster.all_left


def test_everybody_has_left() -> None:
    roster = Roster(Admission("run", "me"), 2, "m")
    assert not roster.all_left, "nobody was there yet"
    roster.update({ALICE.peer_id: record_of(ALICE, 1.0).encode()})
    assert not roster.all_left
    roster.update({ALICE.peer_id: record_of(ALICE, 2.0, state=LEFT).encode()})
    assert roster.all_left
    assert not roster.addresses, "who said goodbye is not looked for"


def test_a_record_of_many_fragments_is_compact() -> None:
    stamps = tuple(Stamp(10**6, 10**12, "ab" * 16) for _ in range(1000))
    data = record_of(ALICE, stamps=stamps).encode()
    assert len(data) < 45_000
    assert PeerRecord.decode(ALICE.peer_id, data, 1000).stamps == stamps


# Time


def test_a_clock_that_is_an_hour_off_tells_the_swarms_time() -> None:
    asked_s = time.time()
    clock = SwarmClock.measured(asked_s, asked_s + 3600.2, asked_s + 0.4)
    assert abs(clock() - time.time() - 3600) < 60
    assert abs(clock.offset_s - 3600) < 1e-3
    assert abs(SwarmClock()() - time.time()) < 60


@pytest.mark.parametrize(
    ("answers", "asked", "error_s"),
    [
        ((0.2,), 1, 0.2),
        ((4.0, 0.1), 2, 0.1),
        ((4.0, 3.0, 5.0), 3, 3.0),
        ((4.0, LinkLost("gone")), 2, 4.0),
    ],
)
def test_a_clock_measured_while_somebody_stood_still_is_measured_again(
    answers: tuple[Any, ...], asked: int, error_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SimpleNamespace] = []

    async def open_to(_: str) -> SimpleNamespace:
        opened.append(SimpleNamespace(close=lambda: None))
        return opened[-1]

    async def ask(channel: SimpleNamespace, *_: Any) -> tuple[str, SwarmClock]:
        answer = answers[opened.index(channel)]
        if isinstance(answer, LinkLost):
            raise answer
        return "manifest", SwarmClock(0.0, answer)

    monkeypatch.setattr(joining, "ask_manifest", ask)
    transport: Any = SimpleNamespace(peer_id="me", learn=lambda *_: None, open=open_to)
    admission = Admission("run", "me")
    work = joining._try(transport, SwarmConfig(run="run"), admission, ALICE.peer_id, ["address"])
    found = asyncio.run(work)
    assert not isinstance(found, str)
    assert found[1].error_s == error_s
    assert len(opened) == asked


# Ways back


def test_known_peers_are_kept_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "run" / "peers.json"
    one, other = KnownPeers("run", path), KnownPeers("run", path)
    address = {peer.peer_id: (f"/ip4/10.0.0.1/tcp/1/p2p/{peer.peer_id}",)
               for peer in (ALICE, MALLORY)}  # fmt: skip
    one.remember({ALICE.peer_id: address[ALICE.peer_id]}, 1.0)
    other.remember({MALLORY.peer_id: address[MALLORY.peer_id]}, 2.0)
    assert KnownPeers("run", path).addresses == address
    assert [*KnownPeers("run", path).addresses] == [MALLORY.peer_id, ALICE.peer_id]
    one.refresh()
    assert one.addresses == address
    assert not len(KnownPeers("another", path))
    assert [entry.name for entry in path.parent.iterdir()] == ["peers.json"]
    before = path.stat().st_mtime_ns
    other.remember({MALLORY.peer_id: address[MALLORY.peer_id]}, 3.0)
    assert path.stat().st_mtime_ns == before, "no news, no writing"


def test_only_the_last_peers_are_known() -> None:
    known = KnownPeers("run")
    peers = [Identity(bytes([n]) * 32).peer_id for n in range(70)]
    for n, peer_id in enumerate(peers):
        known.remember({peer_id: (f"/x/{peer_id}",)}, float(n))
    assert [*known.addresses] == peers[:5:-1]


@settings(max_examples=60, deadline=None)
@given(st.one_of(
    st.binary(max_size=100),
    st.recursive(
        st.none() | st.floats() | st.text(max_size=8) | st.just(ALICE.peer_id),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["run", "peers", ALICE.peer_id]), inner),
    ).map(lambda body: json.dumps(body).encode()),
))  # fmt: skip
def test_a_damaged_list_of_peers_costs_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("known") / "peers.json"
    path.write_bytes(data)
    assert isinstance(read_known("run", path), dict)


def test_the_folder_of_a_killed_peer_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = RuntimeFolder(), RuntimeFolder()
    monkeypatch.undo()
    assert first.path.exists(), "it is in use"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    os.close(first._lock)  # as the kernel does for a process that is killed
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    third = RuntimeFolder()
    assert not first.path.exists()
    assert second.path.exists()
    for folder in (second, third):
        folder.close()
        folder.close()
    assert not [*tmp_path.iterdir()]


def test_folders_that_are_somebody_elses_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.swarm.transport.daemon._PATH_BYTES_MAX", 200)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ("results", "unfinished", "empty")
    results, unfinished, empty = (tmp_path / f"atom-swarm-{name}" for name in names)
    for folder in (results, unfinished, empty):
        folder.mkdir()
    (results / "figures.json").write_text("{}")
    (unfinished / ".lock").touch()
    for folder in (results, unfinished, empty):
        os.utime(folder, (0, 0))
    RuntimeFolder().close()
    assert [*tmp_path.iterdir()] == [results]
    assert (results / "figures.json").exists()


@pytest.mark.slow
def test_halves_of_a_cut_network_go_on_and_grow_together() -> None:
    """Stated rule: of two anchors the one that more tokens went into is everybody's."""

    async def scenario() -> None:
        simulation = Simulation((30, 20), seed=11)
        for name in ("a", "b", "c", "d"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        assert all(len(p.service.context.roster.training()) == 4 for p in simulation.peers.values())
        simulation.network.split({"a", "b", "c"}, {"d"})
        before = {name: sum(peer.versions()) for name, peer in simulation.peers.items()}
        await asyncio.sleep(60)
        sides = {n: len(p.service.context.roster.training()) for n, p in simulation.peers.items()}
        assert sides == {"a": 3, "b": 3, "c": 3, "d": 1}
        for name, peer in simulation.peers.items():
            assert sum(peer.versions()) > before[name] + 3, "both halves go on"
        tokens = {n: sum(s.tokens for s in p.service.context.mailbox.store.stamps() if s)
                  for n, p in simulation.peers.items()}  # fmt: skip
        assert tokens["a"] > tokens["d"]
        simulation.network.heal()
        lost = simulation.peers["d"].fragments[0].clone()
        await asyncio.sleep(60)
        assert all(len(p.service.context.roster.training()) == 4 for p in simulation.peers.values())
        last = simulation.peers["d"].reports[-1]
        assert set(last.contributors) == {"a", "b", "c", "d"}
        assert bool((simulation.peers["d"].fragments[0] != lost).all())
        for name, peer in simulation.peers.items():
            assert set(peer.service.context.roster.addresses) == set("abcd") - {name}
        assert await simulation.settle(20)
        simulation.check_means()

    run_virtual(scenario)

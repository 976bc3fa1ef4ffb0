"""Bytes from the network: whatever they are, a value or a typed error, and little memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.catchup.fetching import origin_of
from atomtrain.swarm.codecs.codec import codec_named, encode_span
from atomtrain.swarm.membership import lan
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.config import Manifest
from atomtrain.swarm.membership.records import PeerRecord, RecordReader, sign_record
from atomtrain.swarm.membership.rules import Rules
from atomtrain.swarm.node.probe import receive_status
from atomtrain.swarm.transport import messages
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import AnchorHeader, Certificate, Message
from atomtrain.swarm.transport.sealed import agree_as_called, agree_as_caller
from atomtrain.swarm.transport.transport import LinkLost
from tests.unit.swarm.membership.test_membership import ALICE, MALLORY, NOW_S, record_of

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.just("x" * 5000),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
PACKED = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "Count": st.integers(0, 2**53),
    "Real": st.floats(0, 2.0**53),
    "Text": st.text(max_size=20),
    "bool": st.booleans(),
    "Counts": st.lists(st.integers(0, 99), max_size=5).map(tuple),
    "Texts": st.lists(st.text(max_size=9), max_size=5).map(tuple),
    "Reals": st.lists(st.floats(0, 2.0**53), max_size=5).map(tuple),
    "Flags": st.lists(st.booleans(), max_size=5).map(tuple),
}
PYTHON_TYPES: dict[str, type] = {
    "Count": int, "Real": float, "Text": str, "bool": bool,
    "Counts": tuple, "Texts": tuple, "Reals": tuple, "Flags": tuple, "Chain": tuple,
}  # fmt: skip
KINDS = sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)
NESTED = {kind.__name__: kind for kind in KINDS}


def of_kind(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = kind.__annotations__.items()
    return st.builds(kind, **{name: field(declared) for name, declared in fields})


def field(declared: str) -> st.SearchStrategy[Any]:
    if declared == "Chain":
        return st.lists(of_kind(Certificate), max_size=2).map(tuple)
    if declared == "Certificate | None":
        return st.none() | of_kind(Certificate)
    return of_kind(NESTED[declared]) if declared in NESTED else FIELDS[declared]


def any_message() -> st.SearchStrategy[Message]:
    return st.sampled_from(KINDS).flatmap(of_kind)


def spoilt(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """Return a JSON object with one of its values, or its bytes, changed."""
    if draw(st.booleans()):
        position = draw(st.integers(0, len(data) - 1))
        return data[:position] + draw(st.binary(max_size=3)) + data[position + 1 :]
    body = json.loads(data)
    key = draw(st.sampled_from(sorted(body)))
    if draw(st.booleans()):
        body[key] = draw(JSON_VALUES)
    else:
        del body[key]
    return json.dumps(body).encode()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_message_comes_back(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(of_kind(kind))
    assert messages.decode(messages.encode(message)) == message


@settings(max_examples=400, deadline=None)
@given(any_message(), st.data())
def test_spoilt_messages(message: Message, data: st.DataObject) -> None:
    wrong = spoilt(messages.encode(message), data.draw)
    try:
        found = messages.decode(wrong)
    except BadMessage:
        return
    for name in found.__struct_fields__:
        value, declared = getattr(found, name), found.__annotations__[name]
        if declared == "Certificate | None":
            assert value is None or type(value) is Certificate
            continue
        assert type(value) is NESTED.get(declared, PYTHON_TYPES.get(declared))
        assert not isinstance(value, int | float) or 0 <= value <= 2**53


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_spoilt_records(data: st.DataObject) -> None:
    wrong = spoilt(record_of(ALICE).encode(), data.draw)
    try:
        found = PeerRecord.decode(ALICE.peer_id, wrong, 2)
    except BadMessage:
        return
    assert len(found.stamps) == 2
    PeerRecord.decode(ALICE.peer_id, found.encode(), 2)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_spoilt_manifests(data: st.DataObject) -> None:
    wrong = spoilt(Manifest("run", (3, 4), {"a": 1}, Rules()).encode(), data.draw)
    try:
        found = Manifest.decode(wrong)
    except (SwarmError, ValueError) as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert all(0 < n <= 1 << 40 for n in found.fragment_elements)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.text("0123 -x", max_size=6))),
    st.lists(st.text(max_size=3), max_size=4),
)
def test_any_origin_of_an_anchor(parts: list[tuple[int, int, str]], members: list[str]) -> None:
    header = AnchorHeader(
        fragment=0, version=1, tokens=1, digest="d", start_bytes=0, round_id="r",
        members=tuple(members), starts=tuple(p[0] for p in parts),
        stops=tuple(p[1] for p in parts), contributors=tuple(p[2] for p in parts), grouped=False,
    )  # fmt: skip
    try:
        origin = origin_of(header, 40)
    except BadMessage:
        return
    assert all(0 <= p.span.start <= p.span.stop <= 40 for p in origin.parts)
    assert all(p.contributors <= set(members) for p in origin.parts)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(max_size=60), JSON_VALUES.map(lambda v: json.dumps(v).encode())))
def test_datagrams(data: bytes) -> None:
    for read in (lan.told, lan.asked_for):
        with pytest.raises(BadMessage):
            read(data)
    with pytest.raises(BadMessage):
        lan.asked_for(data.ljust(lan.QUESTION_BYTES)[: lan.QUESTION_BYTES])


@given(st.data())
def test_spoilt_answers_of_the_local_network(data: st.DataObject) -> None:
    peer_id = Identity(bytes(range(32))).peer_id
    found = lan.Found("run", "name", f"/ip4/10.0.0.1/tcp/1/p2p/{peer_id}", 3)
    assert lan.told(lan.answer(found)) == found
    try:
        read = lan.told(spoilt(lan.answer(found), data.draw))
    except BadMessage:
        return
    assert read.address.isprintable()
    assert (read.run + read.name).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "float16", "int8", "int4", "topk"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_spoilt_values(name: str, data: st.DataObject) -> None:
    codec = codec_named(name)
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    (piece,) = encode_span(codec, torch.randn(700, generator=noise))
    wrong = bytearray(piece)
    for _ in range(data.draw(st.integers(1, 9))):
        wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
    guarded = torch.full((702,), 7.0)
    with contextlib.suppress(BadMessage):  # its size is always right: the receiver reckons it
        codec.decode(wrong, guarded[1:701])
    assert guarded[0] == guarded[701] == 7.0, "it wrote outside"


@pytest.mark.parametrize("head", [b"\xff\xff\xff\xff", b"\x00\x10\x00\x01", b"\x7f\x00\x00\x00"])
def test_announced_sizes_take_no_memory(head: bytes) -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("me", "them", stall_s=1.0)
        await theirs.send_bytes(head)
        tracemalloc.start()
        try:
            with pytest.raises(BadMessage):
                await mine.receive_any(1.0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    run_virtual(scenario)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**53), st.binary(max_size=30))
def test_any_status(announced: int, content: bytes) -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("me", "them", stall_s=1.0)
        await theirs.send(messages.StatusHeader(bytes_count=min(announced, 1 << 24)))
        await theirs.send_bytes(content)
        theirs.close()
        try:
            assert isinstance(await receive_status(mine, 1.0), dict)
        except (BadMessage, LinkLost):
            await asyncio.sleep(0)

    run_virtual(scenario)


@given(st.data())
def test_spoilt_entries_of_the_hash_table(data: st.DataObject) -> None:
    """Whatever a node is given to keep, or told: the record as it was signed, or nothing."""
    pytest.importorskip("hivemind")
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils import MSGPackSerializer

    from atomtrain.swarm.membership.directory import record_validator

    key = DHTID.generate(source="atom/run/peers").to_bytes()
    signed = sign_record(ALICE, "run", b"record", NOW_S + 30)
    validator = record_validator(Admission("run", "me"), lambda: NOW_S, RecordReader("run"))
    good = [MSGPackSerializer.dumps(ALICE.peer_id), MSGPackSerializer.dumps(signed)]
    assert validator.validate(DHTRecord(key, *good, NOW_S + 30))
    which, wrong = data.draw(st.integers(0, 1)), list(good)
    if data.draw(st.booleans()):
        wrong[which] = data.draw(
            st.binary(max_size=60)
            | PACKED.map(MSGPackSerializer.dumps)
            | st.just(b"\x91" * 100_000)  # nested lists
        )
    else:
        position = data.draw(st.integers(0, len(wrong[which]) - 1))
        before = wrong[which]
        wrong[which] = before[:position] + data.draw(st.binary(max_size=3)) + before[position + 1 :]
    if validator.validate(DHTRecord(key, *wrong, NOW_S + 30)):
        assert [MSGPackSerializer.loads(part) for part in wrong] == [ALICE.peer_id, signed]


@given(st.binary(max_size=200), st.booleans())
def test_any_greeting_through_a_relay(data: bytes, from_caller: bool) -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("relay", "relay", stall_s=1.0)
        await theirs.send_bytes(data)
        theirs.close()
        agree = agree_as_called if from_caller else agree_as_caller
        with pytest.raises(LinkLost):
            await agree(mine, ALICE, MALLORY.peer_id)

    run_virtual(scenario)


@settings(max_examples=60)
@given(st.data())
def test_spoilt_frames_of_an_encrypted_stream(data: st.DataObject) -> None:
    """Nothing of a frame that a relay has changed, cut short or made up is read."""

    async def scenario() -> None:
        one, other = channel_pair("relay", "relay", stall_s=1.0)
        caller, called = await asyncio.gather(
            agree_as_caller(one, ALICE, MALLORY.peer_id),
            agree_as_called(other, MALLORY, ALICE.peer_id),
        )
        sent: list[bytes] = []

        async def keep(part: bytes | memoryview) -> None:
            sent.append(bytes(part))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one, "send_bytes", keep)
            await caller.send(messages.Ping(bytes_count=3))
        frame = b"".join(sent)
        position = data.draw(st.integers(0, len(frame) - 1))
        wrong = frame[:position] + data.draw(st.binary(max_size=40)) + frame[position + 1 :]
        await one.send_bytes(wrong)
        one.close()
        try:
            found = await called.receive_any(1.0)
        except (BadMessage, LinkLost):
            return
        assert wrong[: len(frame)] == frame
        assert found == messages.Ping(bytes_count=3)

    run_virtual(scenario)

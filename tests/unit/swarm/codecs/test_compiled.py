"""Compiled codecs and PyTorch: the same bytes, the same decoded bits, the same refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.errors import BadMessage
from atomtrain.native import library
from atomtrain.swarm.codecs.codec import Codec, codec_named
from atomtrain.swarm.codecs.dense import keys_of, uniform
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.codecs.sparse import SparseMeanCodec, kept
from tests.support.cores import core_for

LEVELS = {
    "this processor's": library.core(),
    "any processor's": core_for("DEFAULT"),
}
CONTRIBUTORS = 3
CODECS: dict[str, Codec] = {
    **{name: codec_named(name) for name in CODEC_NAMES},
    "int8 mean": codec_named("int4").for_mean(CONTRIBUTORS, 2**63 - 1),
    "sparse mean": SparseMeanCodec(CONTRIBUTORS, 5),
}
SIZES = st.one_of(
    st.sampled_from(
        [0, 1, 2, 7, 8, 9, 31, 32, 33, 255, 256, 257, 511, 4095, 4096, 4097, 8192, 28672]
    ),
    st.integers(0, 9000),
)


@contextmanager
def running_on(core: ctypes.CDLL | None) -> Iterator[None]:
    with patch.object(library, "core", lambda: core):
        yield


def drawn_values(elements: int, seed: int, kind: str) -> torch.Tensor:
    """Return finite float32 values, with what is special about this kind."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(elements, generator=generator)
    if kind == "zeros":
        return torch.zeros(elements) * normal  # of both signs
    if kind == "ties":
        return (normal * 2).round() / 2
    if kind == "subnormal":
        return normal * 1e-41
    if kind == "near the least scale":
        return normal * 2.0**-122
    if kind == "huge":
        return normal.clamp(-4, 4) * 2e35
    if kind == "mostly zero":
        return normal * (torch.rand(elements, generator=generator) < 0.01)
    if kind == "halves of units":  # the middle between two integers, in either format
        return (normal * 14).round().clamp(-14, 14) / 2
    if kind == "blocks of other sizes":  # no block's limit tells that of the next
        blocks = torch.arange(elements) // 4096
        return normal * torch.tensor([1.0, 1e-9, 0.9, 0.0, 1e9, 1.1])[blocks % 6]
    if kind == "any bits":
        bits = torch.randint(-(2**31), 2**31, (elements,), generator=generator).to(torch.int32)
        values = bits.view(torch.float32)
        return torch.where(values.abs() < 1e36, values, 1.0)  # nor NaN
    return normal


KINDS = (
    "normal", "zeros", "ties", "subnormal", "near the least scale", "huge", "mostly zero",
    "halves of units", "blocks of other sizes", "any bits",
)  # fmt: skip


def fitting(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return values that a codec takes: as many as so many contributions name."""
    if name == "sparse mean":
        values[CONTRIBUTORS * kept(values.numel()) :] = 0.0
        values = values.roll(values.numel() // 3)
    return values


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60)
@given(elements=SIZES, seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
def test_bytes_values_and_residuals_are_the_same(
    level: str, name: str, elements: int, seed: int, kind: str
) -> None:
    codec, values = CODECS[name], fitting(name, drawn_values(elements, seed, kind))
    found = []
    for core in (None, LEVELS[level]):
        with running_on(core):
            data = bytes(codec.encode(values))
            decoded = torch.full_like(values, torch.nan)
            codec.decode(bytearray(data), decoded)
            sent, lost = values.clone(), torch.full_like(values, torch.nan)
            again = codec.encode(sent, sent, lost if codec.feedback else None)  # in its place
            if codec.feedback:
                assert bits(lost) == bits(values - decoded)
            if not codec.exact:
                assert bytes(again) == data
            assert bits(sent) == bits(decoded)
        found.append((data, bits(decoded)))
    assert found[0] == found[1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in CODECS if CODECS[name].feedback])
def test_a_residual_alone_and_places_within_a_larger_tensor(level: str, name: str) -> None:
    codec, values = CODECS[name], torch.randn(5001, generator=torch.Generator().manual_seed(0))
    room = torch.full((2, 5041), 7.0)
    with running_on(LEVELS[level]):
        data = bytes(codec.encode(values, residual=room[0, 20:-20]))
        assert bytes(codec.encode(values, sent=room[1, 20:-20])) == data
    assert torch.equal(values - room[1, 20:-20], room[0, 20:-20])
    assert bool((room[:, :20] == 7).all()), "nothing is written beside them"
    assert bool((room[:, -20:] == 7).all())


def outcome(codec: Codec, data: bytearray, elements: int) -> object:
    out = torch.full((elements,), 7.0)
    try:
        codec.decode(data, out)
    except BadMessage as error:
        return str(error)
    return bits(out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60)
@given(
    elements=SIZES, seed=st.integers(0, 10**6), changes=st.integers(0, 3), tail=st.integers(-1, 1)
)
def test_the_same_garbage_is_refused_with_the_same_words(
    level: str, name: str, elements: int, seed: int, changes: int, tail: int
) -> None:
    """Bytes of an encoded piece, some changed, or one too many or too few."""
    codec = CODECS[name]
    data = bytearray(codec.encode(fitting(name, drawn_values(elements, seed, "normal"))))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(changes if data else 0):
        at, to = torch.randint(0, 1 << 20, (2,), generator=generator).tolist()
        data[at % len(data)] = to % 256
    if tail and data:
        data = data[:tail] if tail < 0 else data + b"\0"
    with running_on(None):
        expected = outcome(codec, data, elements)
    with running_on(LEVELS[level]):
        assert outcome(codec, data, elements) == expected
    if tail and data:
        assert isinstance(expected, str)
        assert "it must have" in expected


@pytest.mark.parametrize("level", LEVELS)
def test_every_half_and_every_middle_between_two(level: str) -> None:
    """Halves from a stranger may be infinite or NaN; those made are up to 1, rounded to even."""
    codec = codec_named("float16")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    data = bytearray(b"\0\0\x40\x3f") + every.numpy().tobytes()  # a scale of 0.75
    halves = every.view(torch.float16).float()
    low = halves[(halves >= 0) & (halves < 1)]
    steps = torch.tensor([0.25, 0.5, 0.75])[:, None] * (low[1:] - low[:-1]) + low[:-1]
    middle = steps.view(-1)
    values = torch.cat((torch.ones(1), middle, -middle, middle.nextafter(torch.ones(1))))
    with running_on(None):
        expected = outcome(codec, data, 1 << 16), bytes(codec.encode(values))
    with running_on(LEVELS[level]):
        assert (outcome(codec, data, 1 << 16), bytes(codec.encode(values))) == expected


def test_random_numbers_are_spread_evenly_and_differ_between_seeds() -> None:
    one, other = (uniform(1 << 16, keys_of(seed)).double() for seed in (0, 1))
    for numbers in (one, other):
        assert float(numbers.min()) >= 0
        assert float(numbers.max()) < 1
        counts = torch.histc(numbers, 64, 0, 1)
        assert float(((counts - 1024) ** 2 / 1024).sum()) < 110, "chi squared, 63 degrees"
    pairs = torch.stack((one[:-1], one[1:])), torch.stack((one[1:], other[:-1]))
    for pair in (*pairs, torch.stack((one, other))):
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / 256


def test_of_equal_magnitudes_the_earlier_are_sent() -> None:
    values = torch.ones(4096)
    values[::2] = -1.0
    for core in (None, LEVELS["this processor's"]):
        with running_on(core):
            out = torch.empty(4096)
            codec_named("topk").decode(codec_named("topk").encode(values), out)
        assert torch.equal(out[:128], values[:128])
        assert not out[128:].any()

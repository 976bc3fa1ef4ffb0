"""Codecs: sizes, errors, the same bits for everybody, and garbage."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.errors import BadMessage, ConfigError
from atomtrain.swarm.codecs.codec import (
    Codec,
    codec_named,
    decode_span,
    encode_span,
    encoded_bytes,
)
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.codecs.sparse import kept

_LOSSY = ("int8", "int4", "topk")


def _sent(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, torch.nan)
    decode_span(codec, encode_span(codec, values), out)
    return out


def _all_codecs() -> list[Codec]:
    """Return every format that travels: contributions, and means of 2 and of 40."""
    plain = [codec_named(name) for name in CODEC_NAMES]
    return plain + [codec.for_mean(k, seed=3) for codec in plain for k in (2, 40)]


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_round_trip_has_the_promised_size_and_error(name: str, scale: float) -> None:
    codec = codec_named(name)
    values = torch.randn((1 << 20) + 77, generator=torch.Generator().manual_seed(1)) * scale
    pieces = encode_span(codec, values)
    assert sum(len(p) for p in pieces) == encoded_bytes(codec, Span(0, values.numel()))
    out = torch.empty_like(values)
    decode_span(codec, pieces, out)
    error = (out - values).abs()
    if name == "float32":
        assert torch.equal(out, values)
    elif name == "float16":
        assert bool(
            (error <= 1.01 * (values.abs() * 2.0**-11 + values.abs().max() * 2.0**-25)).all()
        )
    elif name == "topk":
        assert int((out != 0).sum()) == kept(1 << 20) + kept(77)
        assert (
            float(error.double().norm() / values.double().norm()) < 0.91
        )  # a 32nd, but the largest
    else:
        units = {"int8": 127, "int4": 7}[name]
        most = torch.nn.functional.pad(values, (0, -values.numel() % 256)).view(-1, 256)
        bound = most.abs().amax(dim=1).repeat_interleave(256)[: values.numel()] / units / 2
        # Pieces of 2**20 are whole blocks.
        assert bool((error <= bound * 1.001).all())


def test_bits_an_element() -> None:
    sizes = {name: codec_named(name).encoded_bytes(1 << 20) * 8 / (1 << 20) for name in CODEC_NAMES}
    assert sizes == {
        "float16": 16 + 32 / (1 << 20), "float32": 32, "int8": 8.125, "int4": 4.125,
        "topk": 0.453125,
    }  # fmt: skip
    mean = codec_named("topk").for_mean(4, 0)
    assert mean.encoded_bytes(1 << 20) * 8 / (1 << 20) == 1 + 4 / 32 * 8.125
    assert codec_named("topk").for_mean(200, 0).encoded_bytes(256) == 260


@given(st.integers(0, 9000), st.integers(0, 10**6), st.sampled_from(range(15)))
def test_any_length_and_many_zeros(elements: int, seed: int, which: int) -> None:
    codec = _all_codecs()[which]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator)
    values *= torch.rand(elements, generator=generator) < 0.02
    if codec.name == "sparse-mean" and int((values != 0).sum()) > 2 * kept(elements):
        values.zero_()
    out = _sent(codec, values)
    assert bool(torch.isfinite(out).all())
    if codec.name != "topk":  # it has no zero among its four values
        assert not out[values == 0].any(), "what did not change does not change"
    assert float((out - values).norm()) <= 1.0001 * float(values.norm())


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_zeros_nothing_and_subnormals(name: str) -> None:
    for codec in (codec_named(name), codec_named(name).for_mean(3, 1)):
        assert not _sent(codec, torch.zeros(5)).any()
        assert encode_span(codec, torch.empty(0)) == []
        tiny = _sent(codec, torch.full((2000,), 1e-44) * (torch.arange(2000) % 50 == 0))
        assert bool(torch.isfinite(tiny).all())


@pytest.mark.parametrize("name", _LOSSY)
def test_means_are_right_on_average(name: str) -> None:
    values = torch.zeros(4096)
    values[::200] = torch.linspace(-1, 1, 21)
    total = torch.zeros(4096)
    for seed in range(400):
        total += _sent(codec_named(name).for_mean(2, seed), values)
    error = (total / 400 - values).abs().max()
    assert float(error) < 5 * 0.5 / 127 / 20  # five standard deviations of 400 draws
    first = encode_span(codec_named(name).for_mean(2, 7), values)
    assert first == encode_span(codec_named(name).for_mean(2, 7), values), "seeded"


@pytest.mark.parametrize("name", _LOSSY)
def test_error_feedback_sends_everything_in_the_end(name: str) -> None:
    """What arrives, and the residual, is what was to be sent; and the residual stays bounded."""
    codec = codec_named(name)
    generator = torch.Generator().manual_seed(2)
    steady = torch.randn(5000, generator=generator)
    residual, arrived = torch.zeros(5000), torch.zeros(5000)
    rounds = 300
    for _ in range(rounds):
        wanted = steady + residual
        sent = _sent(codec, wanted)
        residual = wanted - sent
        arrived += sent
    torch.testing.assert_close(arrived + residual, steady * rounds, rtol=1e-3, atol=1e-1)
    assert float((arrived / rounds - steady).norm() / steady.norm()) < 0.15
    assert float(residual.norm() / steady.norm()) < 40


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_random_bytes_are_decoded_or_refused(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(_all_codecs()))
    elements = data.draw(st.sampled_from([1, 2, 3, 31, 33, 255, 257, 4096, 4097, 4200]))
    size = codec.encoded_bytes(elements)
    seed = data.draw(st.integers(0, 10**6))
    raw = bytearray(torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed),
                                  dtype=torch.uint8).numpy().tobytes())  # fmt: skip
    head = data.draw(st.binary(max_size=min(size, 40)))
    raw[: len(head)] = head
    if data.draw(st.booleans()):  # scales of one, so that decoders get past them
        for at in range(0, size - 3, 4):
            raw[at : at + 4] = b"\x00\x00\x80\x3f"
            if data.draw(st.booleans()):
                break
    room = torch.full((elements + 20,), 7.0)
    with contextlib.suppress(BadMessage):
        codec.decode(raw, room[10:-10])
    assert bool((room[:10] == 7).all()), "nothing is written outside the fragment"
    assert bool((room[-10:] == 7).all())


@pytest.mark.parametrize("name", ["float16", *_LOSSY])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 3e38])
def test_bad_scales_are_refused(name: str, bad: float) -> None:
    codec = codec_named(name)
    data = bytearray(codec.encode(torch.ones(300)))
    data[:4] = torch.tensor([bad]).numpy().tobytes()
    with pytest.raises(BadMessage, match="scale"):
        codec.decode(data, torch.empty(300))


def test_sparse_positions_and_counts_are_checked() -> None:
    topk = codec_named("topk")
    data = bytearray(topk.encode(torch.randn(4096)))
    data[8:200] = bytes(192)
    with pytest.raises(BadMessage, match="rise"):
        topk.decode(data, torch.empty(4096))
    mean = topk.for_mean(2, 0)
    data = bytearray(mean.encode(torch.zeros(4096)))
    data[:512] = b"\xff" * 512
    with pytest.raises(BadMessage, match="more values than 256"):
        mean.decode(data, torch.empty(4096))


def test_unknown_codec_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'float16'"):
        codec_named("flaot16")

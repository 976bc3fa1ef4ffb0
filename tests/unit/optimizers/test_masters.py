"""Masters of bfloat16 parameters: the split is exact, and AdamW updates masters, not streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.native import library
from atomtrain.optimizers import AdamW, masters
from atomtrain.optimizers import moments as moments_module

FORMATS = [(m, s) for m in ("float32", "split") for s in ("float32", "bfloat16", "int8")]


def every_exponent() -> Tensor:
    """Bit patterns of both signs and all 256 exponents, with the mantissas where rounding turns."""
    tops = torch.arange(512, dtype=torch.int64) << 23
    uppers = torch.tensor([0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F]) << 16
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    drawn = torch.randint(1 << 23, (20,))
    mantissas = torch.cat([(uppers[:, None] + lowers).flatten(), drawn])
    patterns = (tops[:, None] + mantissas).flatten()
    return (patterns - (patterns >> 31 << 32)).to(torch.int32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


def test_the_split_is_exact_for_every_exponent() -> None:
    patterns = every_exponent()
    stream = torch.empty(patterns.shape, dtype=torch.bfloat16)
    rest = torch.empty(patterns.shape, dtype=torch.int16)
    masters.write(stream, rest, patterns.view(torch.float32))
    assert torch.equal(bits(masters.read(stream, rest)), patterns)


def test_what_updates_join_and_part_is_exact_for_every_exponent() -> None:
    """Also for every pattern of the stream: joining takes its conversion to float32 for a shift."""
    patterns = every_exponent()
    stream = torch.empty(patterns.shape, dtype=torch.bfloat16)
    rest = torch.empty(patterns.shape, dtype=torch.int16)
    spare = torch.empty(patterns.shape)
    masters.part(patterns.clone().view(torch.float32), stream, rest, spare)
    whole = torch.empty(patterns.shape, dtype=torch.bfloat16)
    masters.part(patterns.view(torch.float32), whole, None, spare)
    assert torch.equal(bits(stream), bits(whole))
    assert torch.equal(bits(stream), bits(masters.round_stream(patterns.view(torch.float32))))
    joined = torch.empty(patterns.shape)
    masters.join(stream, rest, joined, spare)
    assert torch.equal(bits(joined), patterns)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    nothing = torch.zeros(every.shape, dtype=torch.int16)
    joined = torch.empty(every.shape)
    streams = every.to(torch.int16).view(torch.bfloat16)
    masters.join(streams, nothing, joined, torch.empty(every.shape))
    assert torch.equal(bits(joined), every << 16)


def test_masters_of_several_slices_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "_SLICE_ELEMENTS", 1000)
    patterns = every_exponent()
    stream = torch.empty(patterns.shape, dtype=torch.bfloat16)
    rest = torch.empty(patterns.shape, dtype=torch.int16)
    masters.write(stream, rest, patterns.view(torch.float32))
    assert torch.equal(bits(masters.read(stream, rest)), patterns)


def test_the_stream_is_the_nearest_with_ties_away_from_zero() -> None:
    patterns = every_exponent()
    values = patterns.view(torch.float32)
    stream, even = masters.round_stream(values), values.to(torch.bfloat16)
    number, tie = ~values.isnan(), patterns & 0xFFFF == 0x8000
    assert torch.equal(bits(stream)[number & ~tie], bits(even)[number & ~tie])
    ties = number & tie & ~values.isinf()
    assert bool((stream[ties].float().abs() > values[ties].abs()).all())
    assert masters.round_stream(torch.tensor([float("nan")])).isnan().all()


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter((torch.randn(shape) * 0.02).to(torch.bfloat16)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, owned: list[nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(len(owned) + steps)
    for _ in range(steps):
        for parameter in owned:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (drawn * 1e-2).to(parameter.dtype)
        optimizer.step()


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert set(left) == set(right)
    for key, value in left.items():
        assert value.dtype is right[key].dtype, key
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize(("master", "state"), FORMATS)
def test_the_master_is_what_a_float32_parameter_would_be(
    master: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments_module, "SLICE", 256)
    owned = parameters([(40, 17), (130,), (0,)])
    values = [nn.Parameter(torch.randn(p.shape) * 0.02) for p in owned]
    narrow = AdamW(owned, state=state, master=master, lr=1e-3, seed=4)
    wide = AdamW(values, state=state, lr=1e-3, seed=4)
    for parameter, value in zip(owned, values, strict=True):
        narrow.set_master(parameter, value.detach().clone())
    train(narrow, owned, 5)
    generator = torch.Generator().manual_seed(len(owned) + 5)
    for _ in range(5):
        for value in values:
            drawn = torch.randn(value.shape, generator=generator)
            value.grad = (drawn * 1e-2).to(torch.bfloat16).float()
        wide.step()
    for parameter, value in zip(owned, values, strict=True):
        assert torch.equal(narrow.master_of(parameter), value)
        assert torch.equal(parameter, masters.round_stream(value))


@pytest.mark.parametrize(("master", "state"), FORMATS)
def test_a_saved_optimizer_goes_on_with_the_same_bits(master: str, state: str) -> None:
    owned = parameters([(300,), (7, 9)])
    optimizer = AdamW(owned, state=state, master=master, seed=2)
    train(optimizer, owned, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in owned]
    resumed = AdamW(again)
    resumed.load_state_dict(saved)
    for one, other in zip(owned, again, strict=True):
        same(optimizer.state[one], resumed.state[other])
    train(optimizer, owned, 2)
    train(resumed, again, 2)
    for one, other in zip(owned, again, strict=True):
        same(optimizer.state[one], resumed.state[other])
        assert torch.equal(one, other)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    owned = [nn.Parameter(torch.ones(10, dtype=torch.bfloat16))]
    optimizer = AdamW(owned, lr=1e-4, weight_decay=0.0, master="split")
    for _ in range(100):
        owned[0].grad = torch.ones_like(owned[0])
        optimizer.step()
    torch.testing.assert_close(optimizer.master_of(owned[0]), torch.full((10,), 0.99))


def test_masters_take_the_bytes_that_are_told() -> None:
    for master, state, each in (("float32", "float32", 12), ("float32", "bfloat16", 8)):
        owned = parameters([(256, 128)])
        optimizer = AdamW(owned, state=state, master=master)
        told = optimizer.state_bytes_of(owned[0])
        train(optimizer, owned, 1)
        held = sum(t.nbytes for key, t in optimizer.state[owned[0]].items() if key != "step")
        assert held == told == each * owned[0].numel()


@pytest.mark.parametrize(("master", "state"), FORMATS)
@pytest.mark.parametrize("compiled", [True, False])
def test_updates_keep_the_scratch_that_is_told(
    master: str, state: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(library, "core", lambda: None)
    owned = parameters([(256, 128), (5,)])
    optimizer = AdamW(owned, state=state, master=master)
    told = optimizer.scratch_bytes()
    assert (told == 0) == compiled
    optimizer.free_scratch()
    train(optimizer, owned, 2)
    buffers = [buffer for kept in vars(masters._local).values() for buffer in kept]
    held = sum(buffer.nbytes for buffer in buffers)
    passing = state == "int8" and not compiled
    scales = 4 * 4 * owned[0].numel() // 128 if passing else 0  # freed after each update
    assert held + scales == told


def test_mistakes_are_refused() -> None:
    owned = parameters([(3,)])
    with pytest.raises(ConfigError, match=r"master 'splat' is not a format.*Did you mean 'split'"):
        AdamW(owned, master="splat")
    optimizer = AdamW(owned)
    with pytest.raises(ConfigError, match="is not in this optimizer"):
        optimizer.master_of(parameters([(3,)])[0])
    train(optimizer, owned, 1)
    split = AdamW(owned, master="split")
    split.state[owned[0]] = optimizer.state[owned[0]]
    with pytest.raises(ConfigError, match="has no rest of a bfloat16 parameter"):
        split.step()

"""The compiled core gives the bits of PyTorch: any size, format, value and number of threads."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.native import library
from atomtrain.optimizers import SGD, AdamW, companding, compiled, elementwise, moments
from atomtrain.optimizers.base import check_gradient
from atomtrain.optimizers.compiled import Paths, same_bits
from atomtrain.optimizers.masters import Scaling
from tests.support.cores import core_for

SLICE = 1024
KINDS = list(library.VALUES)
SPECIALS = (0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3e38, math.inf, -math.inf, math.nan, 6e-8, 65520.0)
ADAMW: dict[str, Any] = {"eps": 1e-8, "seed": 11}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.core() is not None, "run `python -m atomtrain.native.build`"
    monkeypatch.setattr(moments, "SLICE", SLICE)
    monkeypatch.setattr(library, "LEAST_ELEMENTS", 1)


class Drawn:
    """Numbers of all magnitudes from a seed, with some that are special."""

    def __init__(self, seed: int, specials: bool) -> None:
        self._from = torch.Generator().manual_seed(seed)
        self._specials = torch.tensor(SPECIALS if specials else SPECIALS[:5])

    def tensor(self, count: int, scale: float) -> Tensor:
        values = torch.randn(count, generator=self._from) * scale
        values *= 10.0 ** torch.randint(-3, 3, (count,), generator=self._from)
        chosen = torch.rand(count, generator=self._from) < 0.01
        which = torch.randint(len(self._specials), (count,), generator=self._from)
        values = torch.where(chosen, self._specials[which], values)
        if count > 300:
            values[128:256] = 0
        return values


def updated(
    paths: Paths,
    way: str,
    start: Tensor,
    gradients: list[Tensor],
    group: dict[str, Any],
    by: Scaling,
) -> list[Tensor]:
    """Return parameter and state after an update with each gradient."""
    parameter = start.clone()
    state: dict[str, Any] = {}
    update = getattr(paths, way)
    for gradient in gradients:
        more = paths._prepare(state, parameter, group)
        given_gradient = gradient.clone()
        update(parameter, given_gradient, state, group, by, **more)
        if way == "_compiled":
            assert same_bits(given_gradient, gradient), "gradients are read only"
    return [parameter, *(state[key] for key in sorted(state))]


def scalings(dtype: torch.dtype) -> list[Scaling]:
    half = torch.tensor(0.7312)
    return [Scaling(), Scaling(0.25, half), Scaling(1.0, half.to(dtype)), Scaling(1 / 3)]


@settings(max_examples=60, deadline=None)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(100, 300), st.integers(900, 3 * SLICE + 50)),
    kind=st.sampled_from(KINDS),
    gradient_dtype=st.sampled_from(list(library.GRADIENTS)),
    state=st.sampled_from(list(library.MOMENTS)),
    beta1=st.sampled_from([0.0, 0.3, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    scaling=st.integers(0, 3),
    threads=st.sampled_from([1, 2, 3, 8]),
    specials=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(7, (torch.float32, "float32"), torch.float32, "float32", 0.0, 0.0, 0, 1, False, 0)
@example(24, (torch.float32, "float32"), torch.float32, "float32", 0.9, 0.1, 0, 1, False, 0)
@example(31, (torch.bfloat16, "split"), torch.bfloat16, "float32", 0.0, 0.1, 0, 1, False, 0)
def test_adamw_gives_the_bits_of_pytorch(
    count: int, kind: Any, gradient_dtype: torch.dtype, state: str, beta1: float, decay: float,
    scaling: int, threads: int, specials: bool, seed: int,
) -> None:  # fmt: skip
    dtype, master = kind
    if dtype is torch.float32:
        gradient_dtype = torch.float32
    group = {**ADAMW, "state": state, "master": master, "lr": 1e-3, "weight_decay": decay}
    group["betas"] = (beta1, 0.999)
    drawn = Drawn(seed, specials)
    start = drawn.tensor(count, 0.02).to(dtype)
    gradients = [drawn.tensor(count, 1e-2).to(gradient_dtype) for _ in range(2)]
    by = scalings(gradient_dtype)[scaling]
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "threads", lambda: threads)
        for way in ("_torch", "_compiled"):
            ends.append(updated(elementwise.ADAMW_PATHS, way, start, gradients, group, by))
    for index, (one, other) in enumerate(zip(*ends, strict=True)):
        assert same_bits(one, other), index


@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.99, 0.999, 0.9999, 0.9999999])
def test_roots_are_divided_as_a_division_does(beta2: float) -> None:
    """Without `eps` an update is the gradient over the quotient, so that all its bits count."""
    generator = torch.Generator().manual_seed(3)
    count = 1 << 18
    gradients = []
    for _ in range(3):
        exponents = torch.randint(-24, 19, (count,), generator=generator)
        gradient = torch.randn(count, generator=generator) * 10.0**exponents
        gradient[:4] = torch.tensor([0.0, -0.0, 1e30, math.inf])
        gradients.append(gradient)
    group = {"state": "float32", "master": "float32", "lr": 1.0, "weight_decay": 0.0}
    group |= {**ADAMW, "eps": 0.0, "betas": (0.0, beta2)}
    one, other = (
        updated(elementwise.ADAMW_PATHS, way, torch.zeros(count), gradients, group, Scaling())
        for way in ("_torch", "_compiled")
    )
    for index in range(len(one)):
        assert same_bits(one[index], other[index]), index


@settings(max_examples=40, deadline=None)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(100, 3 * SLICE + 50)),
    kind=st.sampled_from(KINDS),
    gradient_dtype=st.sampled_from(list(library.GRADIENTS)),
    momentum=st.sampled_from([(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]),
    decay=st.sampled_from([0.0, 0.1]),
    scaling=st.integers(0, 3),
    threads=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 1000),
)
@example(15, (torch.float32, "float32"), torch.float32, (0.9, 0.3, False), 0.1, 0, 1, 0)
def test_sgd_gives_the_bits_of_pytorch(
    count: int, kind: Any, gradient_dtype: torch.dtype, momentum: Any, decay: float, scaling: int,
    threads: int, seed: int,
) -> None:  # fmt: skip
    dtype, master = kind
    if dtype is torch.float32:
        gradient_dtype = torch.float32
    group = dict(zip(("momentum", "dampening", "nesterov"), momentum, strict=True))
    group |= {"master": master, "lr": 0.03, "weight_decay": decay}
    drawn = Drawn(seed, True)
    start = drawn.tensor(count, 0.02).to(dtype)
    gradients = [drawn.tensor(count, 1e-2).to(gradient_dtype) for _ in range(3)]
    by = scalings(gradient_dtype)[scaling]
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "threads", lambda: threads)
        for way in ("_torch", "_compiled"):
            ends.append(updated(elementwise.SGD_PATHS, way, start, gradients, group, by))
    for index, (one, other) in enumerate(zip(*ends, strict=True)):
        assert same_bits(one, other), index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_gradient_of_16_bits_is_clipped_as_mul_does(dtype: torch.dtype) -> None:
    """SGD without momentum on zeros gives what it read."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = torch.where(every.isnan(), torch.zeros_like(every), every)
    group = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    group |= {"lr": -1.0, "master": "float32"}
    for number in (1.0, 0.7312, 1e-3, 3e-7):
        by = Scaling(1.0, torch.tensor(number))
        _, master = updated(
            elementwise.SGD_PATHS, "_compiled", -torch.zeros_like(every), [every], group, by
        )
        assert same_bits(master, every.clone().mul_(torch.tensor(number)).float()), number


def test_8_bit_moments_agree_where_roots_nearly_round_up() -> None:
    """A root that is a unit off is another code only once in some 100,000 elements."""
    count, drawn = 1 << 19, torch.Generator().manual_seed(0)
    start = torch.randn(count, generator=drawn).mul_(0.02).bfloat16()
    gradients = [torch.randn(count, generator=drawn).mul_(0.01).bfloat16() for _ in range(2)]
    group = {**ADAMW, "state": "int8", "master": "split", "lr": 1e-3, "weight_decay": 0.1}
    group["betas"] = (0.9, 0.999)
    ways = [
        updated(elementwise.ADAMW_PATHS, way, start, gradients, group, Scaling())
        for way in ("_torch", "_compiled")
    ]
    assert all(same_bits(one, other) for one, other in zip(*ways, strict=True))


def test_roots_are_the_nearest_numbers() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 1e-6
    roots = values.clone()
    companding._root(roots)
    assert torch.equal(roots, values.double().sqrt().float())


@pytest.mark.slow
@pytest.mark.skipif(library.level() != "AVX512", reason="the processor has no AVX-512")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", list(library.MOMENTS))
def test_avx2_and_avx512_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: Any, state: str
) -> None:
    dtype, master = kind
    drawn = Drawn(5, specials=True)
    start = drawn.tensor(3 * SLICE + 13, 0.1).to(dtype)
    gradients = [drawn.tensor(len(start), 1e-2).to(dtype) for _ in range(3)]
    group = {**ADAMW, "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    group.update(state=state, master=master)
    ends = []
    for level in ("AVX2", "AVX512"):
        core = core_for(level)
        monkeypatch.setattr(library, "core", lambda core=core: core)
        by = Scaling(0.25 if dtype != torch.float32 else 1.0, torch.tensor(0.7312))
        ends.append(updated(elementwise.ADAMW_PATHS, "_compiled", start, gradients, group, by))
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", list(library.MOMENTS))
def test_clipping_on_the_way_is_clip_grad_norm(dtype: torch.dtype, state: str) -> None:
    start = [torch.randn(700).to(dtype), torch.randn(3, 50).to(dtype)]
    drawn = [torch.randn(value.shape).to(dtype) for value in start]
    ends = []
    for folded in (True, False):
        owned = [nn.Parameter(value.clone()) for value in start]
        optimizer = AdamW(owned, state=state)
        for parameter, gradient in zip(owned, drawn, strict=True):
            parameter.grad = gradient.clone()
        if folded:
            norms = [torch.linalg.vector_norm(gradient) for gradient in drawn]
            total = torch.linalg.vector_norm(torch.stack(norms))
            optimizer.clip_coefficient = torch.clamp(1.0 / (total + 1e-6), max=1.0)
        else:
            nn.utils.clip_grad_norm_(owned, 1.0)
        optimizer.step()
        ends.append([*owned, *(v for p in owned for v in optimizer.state[p].values())])
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_other_bits_are_noticed_and_pytorch_does_the_work(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a PyTorch that computes otherwise: the core's numbers are a little off."""
    paths = elementwise.ADAMW_PATHS if make is AdamW else elementwise.SGD_PATHS
    monkeypatch.setattr(paths, "_equal", {})
    right = compiled._memory

    def off(*arguments: Any) -> library.Parameter:
        memory = right(*arguments)
        memory.factor *= 1 + 1e-6
        return memory

    monkeypatch.setattr(compiled, "_memory", off)
    owned = [nn.Parameter(torch.randn(200).bfloat16())]
    optimizer = make(owned)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            owned[0].grad = torch.ones_like(owned[0])
            optimizer.step()
    assert caplog.text.count("run on PyTorch, which is slower") == 1
    assert optimizer.scratch_bytes() > 0


@pytest.mark.skipif(library.level() == "DEFAULT", reason="the processor or PyTorch does not fuse")
@pytest.mark.parametrize("state", ["bfloat16", "int8"])
def test_other_bits_are_noticed_although_rounded_moments_hide_them(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last bits of the second moment differ where nothing is fused."""
    owned, group = nn.Parameter(torch.zeros(4).bfloat16()), {"state": state, "master": "split"}
    found = []
    monkeypatch.setattr(moments, "SLICE", companding.SLICE)  # the random numbers of real runs
    for level in (library.level(), "DEFAULT"):
        core = core_for(level)
        monkeypatch.setattr(library, "core", lambda core=core: core)
        monkeypatch.setattr(elementwise.ADAMW_PATHS, "_equal", {})
        found.append(elementwise.ADAMW_PATHS.compiled_for(owned, torch.bfloat16, group))
    assert found == [True, False]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("exp_avg", torch.zeros(299), r"has exp_avg of shape \[299\] on cpu; this parameter needs"),
        ("exp_avg", torch.zeros(600)[::2], "is not contiguous"),
        ("exp_avg_sq", torch.zeros(300).double(), r"exp_avg_sq as torch\.float64"),
        ("master", torch.zeros(299), "has no master of a bfloat16 parameter"),
    ],
)
def test_a_state_that_cannot_be_updated_is_refused_before_anything_is_written(
    key: str, value: Tensor, words: str
) -> None:
    owned = [nn.Parameter(torch.randn(300).bfloat16())]
    optimizer = AdamW(owned)
    owned[0].grad = torch.ones_like(owned[0])
    optimizer.step()
    optimizer.state[owned[0]][key] = value
    before = copy.deepcopy([owned[0].detach(), optimizer.state[owned[0]]])
    with pytest.raises(ConfigError, match=words):
        optimizer.step()
    assert torch.equal(owned[0], before[0])
    for name, old in before[1].items():
        assert torch.equal(optimizer.state[owned[0]][name], old), name


def test_a_state_of_a_later_parameter_is_refused_before_an_earlier_one_is_written() -> None:
    owned = [nn.Parameter(torch.randn(300).bfloat16()) for _ in range(2)]
    for optimizer in (AdamW(owned), SGD(owned, momentum=0.9)):
        for one in owned:
            one.grad = torch.ones_like(one)
        optimizer.step()
        key = "exp_avg" if "exp_avg" in optimizer.state[owned[1]] else "momentum_buffer"
        optimizer.state[owned[1]][key] = torch.zeros(299)
        before = [one.detach().clone() for one in owned]
        with pytest.raises(ConfigError, match=r"of shape \[299\]"):
            optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(owned, before, strict=True))


def misaligned(count: int, dtype: torch.dtype) -> Tensor:
    room = bytearray(1 + count * dtype.itemsize)
    return torch.frombuffer(room, dtype=dtype, count=count, offset=1)


def test_misaligned_memory_is_refused() -> None:
    owned = nn.Parameter(torch.zeros(300))
    with pytest.raises(ConfigError, match=r"a gradient of shape \[300\] does not begin"):
        check_gradient(owned, misaligned(300, torch.float32))
    with pytest.raises(ConfigError, match=r"a parameter of shape \[300\] does not begin"):
        check_gradient(nn.Parameter(misaligned(300, torch.float32)), torch.zeros(300))


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_misaligned_state_is_refused_before_anything_is_written(make: Any) -> None:
    owned = nn.Parameter(torch.randn(300).bfloat16())
    optimizer = make([owned], master="split", **({"momentum": 0.9} if make is SGD else {}))
    owned.grad = torch.ones_like(owned)
    optimizer.step()
    state, before = optimizer.state[owned], owned.detach().clone()
    moment = "exp_avg_sq" if make is AdamW else "momentum_buffer"
    for key, dtype in ((moment, torch.float32), ("rest", torch.int16)):
        right, state[key] = state[key], misaligned(300, dtype)
        with pytest.raises(ConfigError, match=rf"state's {key} of shape \[300\] does not begin"):
            optimizer.step()
        state[key] = right
    assert torch.equal(owned, before)


def test_scales_of_another_length_and_a_momentum_of_another_shape_are_refused() -> None:
    owned = [nn.Parameter(torch.randn(300))]
    optimizer = AdamW(owned, state="int8")
    owned[0].grad = torch.ones_like(owned[0])
    optimizer.step()
    optimizer.state[owned[0]]["exp_avg_scale"] = torch.ones(2)
    with pytest.raises(ConfigError, match=r"exp_avg_scale of shape \[2\]"):
        optimizer.step()
    plain = SGD(owned, momentum=0.9)
    plain.state[owned[0]]["momentum_buffer"] = torch.zeros(301)
    with pytest.raises(ConfigError, match=r"momentum_buffer of shape \[301\]"):
        plain.step()


def test_a_gradient_of_another_type_or_shape_is_refused() -> None:
    owned = nn.Parameter(torch.randn(300))
    with pytest.raises(ConfigError, match=r"a gradient of shape \[300\] and torch\.bfloat16"):
        check_gradient(owned, torch.zeros(300).bfloat16())
    with pytest.raises(ConfigError, match=r"a gradient of shape \[30\]"):
        check_gradient(owned, torch.zeros(30))

"""Compiled norms of gradients have PyTorch's bits, in any type and with any number of threads."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from atomtrain.engine.updates import grad_clipping
from atomtrain.native import library
from atomtrain.optimizers.compiled import same_bits

TAKEN = [
    (torch.float32, False), (torch.float32, True), (torch.bfloat16, False),
    (torch.bfloat16, True), (torch.float16, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _tried_anew() -> None:
    assert library.core() is not None, "run `python -m atomtrain.native.build`"
    grad_clipping.equal.cache_clear()


def drawn(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(size,) for size in (*range(1, 40), 127, 129, 4099, 70_001)]
    some = [torch.randn(s, generator=generator) for s in (*shapes, (33, 65), (1, 9), (3, 1, 70))]
    some += [values * 1e-25 for values in some[:3]]  # of which squares vanish
    for special in (math.inf, -math.inf, math.nan, 3e38):
        some.append(torch.ones(1000))
        some[-1][77] = special
    return [values.to(dtype) for values in some] + [torch.zeros(300, dtype=dtype)]


@pytest.mark.parametrize(("dtype", "wide"), TAKEN)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_they_are_pytorchs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: bool, threads: int
) -> None:
    monkeypatch.setattr(library, "threads", lambda: threads)
    monkeypatch.setattr(library, "LEAST_ELEMENTS", 1)
    gradients = drawn(dtype)
    assert grad_clipping.equal(dtype, wide), "the compiled kernel is used"
    found = grad_clipping.norms(gradients, wide=wide)
    for gradient, norm in zip(gradients, found, strict=True):
        assert same_bits(norm, grad_clipping.torch_norm(gradient, wide)), gradient.shape


def test_one_large_element_shows_the_order_of_sums() -> None:
    """In bfloat16 a norm has 8 bits, which hide most of what another order would change."""
    for at in (0, 5, 8, 13, 1000, (1 << 21) + 12):
        gradient = torch.ones((1 << 21) + 13, dtype=torch.bfloat16)
        gradient[at] = 4096
        (norm,) = grad_clipping.norms([gradient], wide=False)
        assert same_bits(norm, torch.linalg.vector_norm(gradient))


def test_what_is_not_contiguous_or_not_known_is_pytorchs() -> None:
    odd = [torch.randn(6, 9).T, torch.randn(70).half(), torch.randn(70).double()]
    for norm, gradient in zip(grad_clipping.norms(odd, wide=False), odd, strict=True):
        assert same_bits(norm, torch.linalg.vector_norm(gradient))
    assert grad_clipping.norms([], wide=False) == []


def test_other_bits_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        grad_clipping, "torch_norm", lambda g, wide: torch.linalg.vector_norm(g.double()).float()
    )
    with caplog.at_level(logging.WARNING):
        assert not grad_clipping.equal(torch.float32, False)
    assert "other bits than this PyTorch" in caplog.text


def test_without_a_core_pytorch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "core", lambda: None)
    gradient = torch.randn(1000)
    (norm,) = grad_clipping.norms([gradient], wide=False)
    assert same_bits(norm, torch.linalg.vector_norm(gradient))
    assert not grad_clipping.equal(torch.float32, False)

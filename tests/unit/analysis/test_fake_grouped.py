"""Grouped products without data have the shapes and strides of those with data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import atomtrain.analysis  # noqa: F401  registers the rule
from atomtrain.analysis.costs.flops import more_counters

grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)
pytestmark = pytest.mark.skipif(grouped_mm is None, reason="torch is older than 2.10")
ROWS, GROUPS, INSIDE = 24, 3, 8
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def cases(columns: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """One for each of the four ways in which groups may lie."""
    stops = torch.tensor([8, 8, 24], dtype=torch.int32)
    experts = torch.randn(GROUPS, columns, INSIDE)
    return [
        (torch.randn(ROWS, INSIDE), experts.mT, stops),
        (torch.randn(INSIDE, ROWS), torch.randn(columns, ROWS).T, stops),
        (experts, torch.randn(INSIDE, ROWS), stops),
        (torch.randn(GROUPS, 5, INSIDE), experts.mT, None),
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("columns", [16, 10, 7])
def test_shapes_types_and_strides_are_those_of_the_operation(
    dtype: torch.dtype, columns: int
) -> None:
    for left, right, stops in cases(columns):
        given = left.to(dtype), right.to(dtype)
        real = grouped_mm(*given, offs=stops)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in given]
            fake = grouped_mm(*fakes, offs=None if stops is None else mode.from_tensor(stops))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.randn(4, 8).double(), torch.randn(3, 8, 16).double()),
        (torch.randn(4, 8), torch.randn(3, 8, 10)),
    ],
    ids=["float64", "unaligned"],
)
def test_what_the_operation_refuses_is_refused_without_data(left: Tensor, right: Tensor) -> None:
    stops = torch.tensor([1, 2, 4], dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError)):
        grouped_mm(left, right, offs=stops)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="grouped_mm"):
        grouped_mm(*(mode.from_tensor(t) for t in (left, right)), offs=mode.from_tensor(stops))


def test_an_older_transformers_has_no_operation_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, backward = object(), object()
    there = SimpleNamespace(grouped_mm_fallback=forward)
    monkeypatch.setattr(torch.ops, "transformers", there, raising=False)
    assert forward in more_counters()
    there.grouped_mm_fallback_backward = backward
    assert {forward, backward} <= more_counters().keys()

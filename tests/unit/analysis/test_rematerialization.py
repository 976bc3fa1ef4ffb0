"""Which chains of cheap operations are done again, and how often each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.costs.rematerialization import RematerializedStorage, Rematerializer


class Counted(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (torch.ops.aten.add.Tensor, torch.ops.aten.native_layer_norm.default)
        return func(*args, **(kwargs or {}))


def rematerializer_of(saved: Tensor) -> Rematerializer:
    """Return recipes that begin at one tensor, which stands for itself."""
    key = saved.untyped_storage()._cdata
    return Rematerializer(lambda tensor: tensor if tensor.untyped_storage()._cdata == key else None)


def doubled(value: Tensor, times: int) -> Tensor:
    for _ in range(times):
        value = value + value
    return value


def again(remade: RematerializedStorage) -> tuple[Tensor, int]:
    """Return what is made again, and by how many operations."""
    with Counted() as counted:
        made = remade.operation.result(remade.index, lambda packed: packed)
    return made, counted.count


def test_each_operation_of_a_chain_is_done_once() -> None:
    """Though two ways lead from each to the one before: a thousand million to the first."""
    saved = torch.randn(3)
    rematerializer = rematerializer_of(saved)
    with rematerializer:
        value = doubled(saved, 30)
    remade = rematerializer.of(value)
    assert remade is not None
    assert [one is saved for one in remade.operation.arguments()] == [True, True]
    made, count = again(remade)
    assert torch.equal(made, value)
    assert count == 30


def test_what_is_on_the_way_and_saved_too_is_made_once_for_both() -> None:
    saved = torch.randn(3)
    rematerializer = rematerializer_of(saved)
    with rematerializer:
        middle = doubled(saved, 10)
        value = doubled(middle, 10)
    first, last = rematerializer.of(middle), rematerializer.of(value)
    assert first is not None
    assert last is not None
    made, count = again(last)
    assert torch.equal(made, value)
    assert count == 20
    made, count = again(first)
    assert torch.equal(made, middle)
    assert count == 0
    assert first.drop()
    assert not first.drop()
    # Without it the way begins at the beginning.
    assert last.drop()
    last = rematerializer.of(value)
    assert last is not None
    assert again(last)[1] == 20


def test_several_results_of_an_operation_on_the_way() -> None:
    saved = torch.randn(4, 8)
    rematerializer = rematerializer_of(saved)
    with rematerializer:
        normal, mean, rstd = torch.native_layer_norm(saved, (8,), None, None, 1e-5)
        value = (normal + mean) + (rstd + normal)
    remade = rematerializer.of(value)
    assert remade is not None
    made, count = again(remade)
    assert torch.equal(made, value)
    assert count == 4


@pytest.mark.parametrize(("times", "known"), [(32, True), (33, False), (60, False)])
def test_what_is_too_far_from_what_is_saved_is_not_made_again(times: int, known: bool) -> None:
    saved = torch.randn(3)
    rematerializer = rematerializer_of(saved)
    with rematerializer:
        value = doubled(saved, times)
    assert (rematerializer.of(value) is not None) == known


def test_memory_that_is_read_as_another_type_is_not_made_again() -> None:
    """What is known of it says how the numbers that lie there were made, not these."""
    saved = torch.randn(3)
    rematerializer = rematerializer_of(saved)
    with rematerializer:
        made = saved * 1.5
        same, other = made.view(3, 1) + 1, made.view(torch.int32) + 1
    assert rematerializer.of(same) is not None
    assert rematerializer.of(other) is None

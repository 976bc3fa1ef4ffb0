"""A program's functions do what autograd does, bit for bit, with any tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.engine.execution.programs import LayerProgram, like, program_of

WIDTH = 16
Function = Callable[[Tensor, Tensor], Tensor]
"""Of a weight `[WIDTH, WIDTH]` and a value `[3, 5, WIDTH]`."""


class Notes:
    """Keeps what is sent, and the gradients of the weight."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self.kept: dict[int, Tensor] = {}
        self.gradients: list[Tensor] = []

    def gradient(self) -> Tensor:
        return self._gradient

    def send(self, number: int, tensor: Tensor) -> None:
        self.kept[number] = tensor

    def take(self, number: int) -> Tensor:
        return self.kept[number]

    def done(self, number: int) -> None:
        del self.kept[number]

    def add(self, number: int, gradient: Tensor) -> None:
        assert number == 0
        self.gradients.append(gradient)


def parts(function: Function) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight and value, what is made of them, and a gradient of that."""
    torch.manual_seed(5)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    value = torch.randn(3, 5, WIDTH, requires_grad=True)
    result = function(weight, value)
    return weight, value, result, torch.randn(result.shape)


def program_for(function: Function, *, remakes: bool = True) -> LayerProgram | None:
    weight, value, _, gradient = parts(function)

    def run(given: Sequence[Any]) -> Sequence[Any]:
        return (function(*given),)

    return program_of(
        run,
        [like(weight, requires_grad=True)],
        [like(value, requires_grad=True)],
        like(gradient, requires_grad=False),
        0,
        remakes=remakes,
    )


FUNCTIONS: dict[str, Function] = {
    "nothing of a value": lambda w, x: torch.cat([x[..., WIDTH:], x[..., 40:], x @ w], -1),
    "nothing of a result": lambda w, x: torch.cat([(x @ w)[..., 40:], x.tanh()], -1),
    "the ends": lambda w, x: torch.cat([(x @ w)[..., -4:], x[..., :3].tanh()], -1),
    "every other": lambda w, x: torch.repeat_interleave((x @ w)[..., ::2], 2, -1),
    "one weight twice": lambda w, x: (x @ w).tanh() @ w.T,
    "sums": lambda w, x: (x @ w).sum((0, 1), keepdim=True) + x,
    "gates": lambda w, x: F.silu(x @ w) * F.mish(x),
    "one number": lambda w, x: (x @ w).mean(),
    "experts": lambda w, x: torch.topk(torch.softmax(x @ w, -1), 2)[0].sum(-1, keepdim=True) * x,
    "convolution": lambda w, x: F.conv1d(x.mT, w[:, None, :4], padding=3, groups=WIDTH).mT,
}


@pytest.mark.parametrize("remakes", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bits(function: Function, remakes: bool) -> None:
    program = program_for(function, remakes=remakes)
    assert program is not None
    weight, value, result, gradient = parts(function)
    expected = torch.autograd.grad(result, (weight, value), gradient)
    run = Notes(gradient)
    with torch.no_grad():
        looked = program.looks(weight.detach())
        [written] = program.forward(run, *looked, value.detach())
        repeated = Notes(gradient)
        assert not program.again(repeated, *looked, value.detach())
        assert repeated.kept.keys() == run.kept.keys()
        assert all(torch.equal(kept, run.kept[n]) for n, kept in repeated.kept.items())
        [found] = program.backward(run, *looked)
    assert torch.equal(written, result)
    assert torch.equal(run.gradients[0], expected[0])
    assert len(run.gradients) == 1
    assert torch.equal(found, expected[1])
    assert not run.kept


def test_again_does_no_product_that_only_the_result_needs() -> None:
    """As the last one of a block."""
    function: Function = lambda w, x: x.tanh() @ w  # noqa: E731
    program = program_for(function, remakes=False)
    assert program is not None
    weight, value, _, gradient = parts(function)
    done = dict[str, int]()
    for name, pass_ in (("forward", program.forward), ("again", program.again)):
        with torch.no_grad(), torch.profiler.profile() as profile:
            pass_(Notes(gradient), *program.looks(weight), value)
        done[name] = sum(each.count for each in profile.key_averages() if each.key == "aten::mm")
    assert done == {"forward": 1, "again": 0}


def test_none_where_autograd_does_otherwise_without_data() -> None:
    assert program_for(lambda w, x: x.prod(-1, keepdim=True) @ w[:1]) is None
    assert program_for(lambda w, x: x.prod() * w) is None

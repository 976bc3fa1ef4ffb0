"""Modules whose forward calls functions with a backward of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.support.any_models import Case


class _Split(torch.autograd.Function):
    """Two results and a whole number, an input without gradient, plain arguments, and a backward
    that is not that of what forward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, keep: Tensor, power: int) -> tuple[Any, ...]:
        ctx.save_for_backward(x, gate)
        ctx.keep, ctx.power = keep, power
        ctx.set_materialize_grads(False)
        signs = torch.sign(x)
        ctx.mark_non_differentiable(signs)
        return x**power, signs, torch.sign(gate) * keep, power + 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gate = ctx.saved_tensors
        first, of_signs, second, plain = gradients
        assert of_signs is plain is None
        grad_x = None if first is None else first.clamp(-0.01, 0.01) * x.abs() * ctx.power
        grad_gate = None if second is None else second * torch.sigmoid(gate)
        return grad_x, grad_gate, None, None


def _takes_names() -> bool:
    """Return whether this torch lets arguments of functions be given by name: 2.11 does not."""
    try:
        _Split.apply(*[torch.ones(1)] * 3, power=2)  # type: ignore[no-untyped-call]
    except TypeError:
        return False
    return True


_NAMED = _takes_names()


class _Noisy(torch.autograd.Function):
    """Draws random numbers, and makes what backward needs in a method of its own."""

    @staticmethod
    def forward(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
        kept = torch.rand_like(x) > share
        return x * kept, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0] * 0.5, None


class Block(nn.Module):
    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("keep", torch.rand(6))
        self.noisy = noisy

    def forward(self, x: Tensor) -> Tensor:
        first, signs, second, next_power = _Split.apply(self.up(x), self.gate(x), self.keep, 2)  # type: ignore[no-untyped-call]
        more = {"keep": self.keep, "power": next_power}
        named = more if _NAMED else {}
        placed = () if _NAMED else more.values()
        _, _, third, _ = _Split.apply(first, x, *placed, **named)  # type: ignore[no-untyped-call]
        if self.noisy and self.training:
            _Noisy.apply(x, 0.5)  # type: ignore[no-untyped-call]
            second, _ = _Noisy.apply(second, 0.3)  # type: ignore[no-untyped-call]
        out: Tensor = x + self.down(first * 0.1 + signs + second + third)
        return torch.tanh(out)


class OwnBackward(nn.Module):
    """Equal blocks, so many that one of them is traced for all."""

    def __init__(self, blocks: int, noisy: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(noisy) for _ in range(blocks))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.pow(2).sum()}


def own_backward(blocks: int = 3, noisy: bool = False) -> Case:
    return Case(OwnBackward(blocks, noisy).train(), lambda: {"x": torch.randn(5, 6)})

"""Calls of `torch.autograd.Function`: one operation each, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import Chain, chain_of
from atomtrain.analysis.export.structure import NotPlainError, Slot, put_together, taken_apart
from atomtrain.errors import AnalysisError
from tests.support.own_backward import own_backward

X = torch.randn(3, 4)


def function(forward: Callable[..., Any], **attributes: Any) -> Any:
    """Return a function whose backward hands on what it gets."""

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), {**methods, **attributes})


class Applies(nn.Linear):
    """Applies a function to what a linear layer makes of its input, and to one thing more."""

    def __init__(self, own: Any, more: Any = 2.0) -> None:
        super().__init__(4, 4)
        self.own, self.more = own, (more,)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.own.apply(super().forward(x), *self.more)
        return made


def chain_with(model: nn.Module) -> Chain:
    return chain_of(model, X, lambda output: output.pow(2).sum()).chain


def operations(chain: Chain) -> list[str]:
    graphs: list[Any] = [layer.module.template.graph for layer in chain.layers]  # type: ignore[union-attr]
    return [str(node.target) for graph in graphs for node in graph.nodes]


def test_a_call_is_one_operation_and_what_its_forward_does_is_not_written_down() -> None:
    case = own_backward(blocks=2)
    chain = chain_of(case.model, case.draw()).chain
    found = operations(chain)
    assert sum("_Split" in name for name in found) == 4
    assert not any("sign" in name for name in found)


def test_blocks_that_call_alike_have_one_template_and_those_that_do_not_have_their_own() -> None:
    def scaled(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    one = function(scaled)

    def kinds(*blocks: Applies) -> int:
        model = nn.Module()
        model.blocks = nn.ModuleList([*blocks, nn.Linear(4, 4)])
        model.forward = lambda x: model.blocks[2](model.blocks[1](model.blocks[0](x)))
        chain = chain_of(model, X, lambda output: output.sum()).chain
        assert len(chain.layers) == 3
        templates: list[Any] = [layer.module.template for layer in chain.layers[:2]]  # type: ignore[union-attr]
        return len({id(template) for template in templates})

    assert kinds(Applies(one), Applies(one)) == 1
    assert kinds(Applies(one), Applies(one, 3.0)) == 2
    assert kinds(Applies(one), Applies(function(scaled))) == 2


_ELSEWHERE = torch.randn(4)


def _counts(ctx: Any, x: Tensor, more: Any) -> Tensor:
    COUNTING.calls += 1
    return x * 2


COUNTING = function(_counts, calls=0)


@pytest.mark.parametrize(
    ("forward", "more", "reason"),
    [
        (lambda ctx, x, more: x, 2.0, "returns a view of what it is given"),
        (lambda ctx, x, more: x.view(-1), 2.0, "returns a view of what it is given"),
        (lambda ctx, x, more: (y := x * 2, y[0]), 2.0, "returns .* or one tensor twice"),
        (lambda ctx, x, more: x.mul_(more), 2.0, "changes a tensor that it is given"),
        (
            lambda ctx, x, more: torch.add(x, x, out=x.view_as(x)) * 1,
            2.0,
            "changes a tensor that it is given",
        ),
        (lambda ctx, x, more: x * _ELSEWHERE, 2.0, "uses a tensor that it is not given"),
        (lambda ctx, x, more: x * float(x.max()), 2.0, "does not run on tensors without data"),
        (lambda ctx, x, more: torch.from_numpy(x.numpy()), 2.0, "does not run on tensors without"),
        (lambda ctx, x, more: more(x), torch.sin, "takes a builtin_function_or_method, not only"),
        (lambda ctx, x, more: (x * 2, {1, 2}), 2.0, "returns a set, not only tensors"),
    ],
)
def test_what_is_more_than_a_function_of_its_tensors_is_refused(
    forward: Callable[..., Any], more: Any, reason: str
) -> None:
    with pytest.raises(AnalysisError, match=f"uses Own, a .*Function that {reason}") as caught:
        chain_with(Applies(function(forward), more))
    assert "custom_op" in str(caught.value)
    assert "layers=[" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(AnalysisError, match="changes attributes of its class"):
        chain_with(Applies(COUNTING))


def test_tracing_leaves_functions_as_they_were() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    chain_with(Applies(function(lambda ctx, x, more: x * more)))
    with pytest.raises(AnalysisError):
        chain_with(Applies(COUNTING))
    assert torch.autograd.Function.__dict__["apply"] is before


def test_skeletons_keep_everything_but_the_tensors() -> None:
    tensors: list[Tensor] = []
    one, two = torch.ones(2), torch.zeros(2)
    value = ([one, 3], {"a": two, "b": (one, None, torch.float16)})
    skeleton = taken_apart(value, tensors)
    assert tensors[0] is one
    assert tensors[1] is two
    assert len(tensors) == 2
    assert put_together(skeleton, [5, 6]) == ([5, 3], {"a": 6, "b": (5, None, torch.float16)})
    assert hash(skeleton) == hash(taken_apart(value, []))
    assert taken_apart(1, []) != taken_apart(True, [])
    assert taken_apart(one, []) == Slot(0)
    with pytest.raises(NotPlainError, match="set"):
        taken_apart([{1}], [])

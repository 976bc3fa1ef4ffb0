"""Compares a chain with the model that it was made of: loss and gradients of one micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.front import unchanged
from atomtrain.analysis.layers.trace import MicroBatch, Traced
from atomtrain.errors import AnalysisError

_log = logging.getLogger("atomtrain.analysis")


class _Result(NamedTuple):
    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    """Of the trained parameters, in the model's order; `None` of one that takes no part."""


def check_chain(model: nn.Module, traced: Traced, example: MicroBatch) -> None:
    """Compare the chain's loss and gradients on a micro-batch with the model's own, bit for bit.

    Both run on the processor with the same random numbers. Parameters, their gradients, buffers and
    random state are left as they were. It takes the gradients twice and what a micro-batch of the
    whole model saves for backward. Not compared are a model that does not repeat itself, and one
    that tells its layers, or whose modules are its layers.

    Args:
        model: Its weights are in the host's memory.
        traced: Of the model, as on the processor.
        example: A micro-batch.

    Raises:
        AnalysisError: they differ; names the first of them.
    """
    if traced.own is None:
        return
    compute = traced.own
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    inputs = traced.bind(example)

    def own() -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with unchanged(model):
            return compute(
                example,
                lambda *args, **kwargs: torch.func.functional_call(model, buffers, args, kwargs),
            )

    expected = _result(own, parameters)
    found = _result(lambda: traced.chain.loss_of(inputs), parameters)
    differing = [
        name
        for (name, _), ours, theirs in zip(named, found.gradients, expected.gradients, strict=True)
        if not _same_bits(ours, theirs)
    ]
    if not differing and _same_bits(found.loss, expected.loss):
        return
    again = _result(own, parameters)
    pairs = zip(again.gradients, expected.gradients, strict=True)
    if not (_same_bits(again.loss, expected.loss) and all(_same_bits(*pair) for pair in pairs)):
        _log.warning(
            "%s gives other bits each time that it runs, so its layers cannot be compared with it",
            type(model).__name__,
        )
        return
    raise AnalysisError(_told(model, [name for name, _ in named], differing, found, expected))


def _result(loss_of: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> _Result:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        loss = loss_of()
        if not parameters or not loss.requires_grad:
            return _Result(loss.detach(), (None,) * len(parameters))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return _Result(loss.detach(), gradients)


def _same_bits(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    left, right = (t.contiguous().view(-1).view(torch.uint8) for t in (one, two))
    return torch.equal(left, right)


def _told(
    model: nn.Module,
    names: Sequence[str],
    differing: Sequence[str],
    found: _Result,
    expected: _Result,
) -> str:
    if differing:
        index = names.index(differing[0])
        what = f"the gradient of {differing[0]!r} ({_by(found, expected, index)}"
        what += f"; {len(differing)} of {len(names)} differ)"
    else:
        what = f"the loss ({float(found.loss)} instead of {float(expected.loss)})"
    return (
        f"the layers found in {type(model).__name__} do not compute what it computes itself: "
        f"{what}, on one micro-batch. If it leaves a mask out where nothing is masked, give an "
        "example in which something is; else please report it with the model's configuration; "
        "check_model=False, or --check-model never, trains it nevertheless"
    )


def _by(found: _Result, expected: _Result, index: int) -> str:
    ours, theirs = found.gradients[index], expected.gradients[index]
    if ours is None or theirs is None:
        return (
            f"{'none' if ours is None else 'one'} instead of {'none' if theirs is None else 'one'}"
        )
    return f"by up to {float((ours.double() - theirs.double()).abs().max()):.2g}"

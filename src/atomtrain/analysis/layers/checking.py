"""Layers given by hand, and whether a chain computes what the model does that it was made of.

Layers given by hand are compared at once, by the loss of the example; on request those that were
found are too, by loss and gradients of a micro-batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.front import unchanged
from atomtrain.analysis.layers.micro_batch import MicroBatch, Traced
from atomtrain.errors import AnalysisError, ConfigError, nearest, reason_of


def layers_by_hand(
    model: nn.Module, paths: Sequence[str], entries: Mapping[str, Any]
) -> list[Layer]:
    """Return one layer for each path; each is called on the previous one's output.

    The first one is called on those entries of the micro-batch whose names its forward takes, or
    on as many as it takes. A tuple that a layer returns becomes several arguments of the next.

    Args:
        model: Holds the modules.
        paths: Such as `"blocks.0"`; a module may occur again.
        entries: The example's entries by name, in the order in which the model takes them.

    Raises:
        ConfigError: there is no module of a name, or no path is given.
        AnalysisError: a layer cannot run on what the one before it returns.
    """
    if isinstance(paths, str) or not paths:
        raise ConfigError("layers must be a list of at least one module path, such as ['embed']")
    known = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    for path in paths:
        if path not in known:
            raise ConfigError(
                f"layers: {type(model).__name__} has no module {path!r}."
                f"{nearest(path, known)} Modules are listed by model.named_modules()"
            )
    reads = _first_reads(known[paths[0]], list(entries))
    layers: list[Layer] = []
    # Layers may hold tensors that are neither parameters nor buffers.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = [_fake(entries[name]) for name in reads]
        for index, path in enumerate(paths):
            count = 1 + sum(earlier == path for earlier in paths[:index])
            name = path if count == 1 else f"{path}#{count}"
            result = _run_fake(name, known[path], values)
            writes: tuple[str, ...] = (f"{name}.out",)
            values = [result]
            if isinstance(result, tuple | list) and index + 1 < len(paths):
                writes = tuple(f"{name}.out{position}" for position in range(len(result)))
                values = list(result)
            layers.append(Layer(name, known[path], tuple(reads), writes))
            reads = list(writes)
    return layers


def _first_reads(module: nn.Module, entries: Sequence[str]) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    same = [name for name in names if name in entries]
    return same or list(entries[: max(1, len(names))])


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return value


def _run_fake(name: str, module: nn.Module, values: Sequence[Any]) -> Any:
    tensors = {
        key: _fake(tensor)
        for key, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    try:
        return torch.func.functional_call(module, tensors, tuple(values), tie_weights=False)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        given = ", ".join(
            str(list(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in values
        )
        reason = reason_of(error)
        raise AnalysisError(
            f"layer {name!r} cannot run on {given}: {reason}; list the modules in the order in "
            "which forward calls them, each on what the one before returns"
        ) from error


def check_against_model(
    model: nn.Module, chain: Chain, inputs: Mapping[str, Any], loss_of: Callable[..., Any]
) -> None:
    """Compare the chain's loss on the example with the model's, bit for bit.

    Does nothing for weights on the meta device. Random numbers and buffers are left as they were.

    Args:
        model: Whose forward is the truth.
        chain: Of the layers given by hand.
        inputs: The example, by the chain's input names.
        loss_of: `loss_of(forward)` gives the loss of what `forward(...)` of the model returns.

    Raises:
        AnalysisError: they differ.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.get_rng_state()
        expected = loss_of(_forward_of(model))
        torch.set_rng_state(state)
        given = chain.loss_of(inputs)
    if not torch.allclose(given, expected, rtol=0, atol=0, equal_nan=True):
        raise AnalysisError(
            f"the layers given by hand compute a loss of {float(given)}, the model itself "
            f"{float(expected)}: forward of {type(model).__name__} does more than to call them one "
            "after the other; move what is missing into a module and list it"
        )


_log = logging.getLogger("atomtrain.analysis")


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the model's forward, which leaves the model's buffers as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return lambda *args, **kwargs: torch.func.functional_call(model, buffers, args, kwargs)


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
        with unchanged(model.modules()):
            return compute(example, _forward_of(model))

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

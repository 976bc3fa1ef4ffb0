"""Layers given by hand: the caller names the modules that the model calls one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.layers.chain import Chain, Layer
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
    with FakeTensorMode(), torch.no_grad():
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
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        expected = loss_of(
            lambda *args, **kwargs: torch.func.functional_call(model, buffers, args, kwargs)
        )
        torch.set_rng_state(state)
        given = chain.loss_of(inputs)
    if not torch.allclose(given, expected, rtol=0, atol=0, equal_nan=True):
        raise AnalysisError(
            f"the layers given by hand compute a loss of {float(given)}, the model itself "
            f"{float(expected)}: forward of {type(model).__name__} does more than to call them one "
            "after the other; move what is missing into a module and list it"
        )

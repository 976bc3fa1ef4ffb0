"""Finds the chain of layers of a model."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from atomtrain.analysis.export.conditions import CPU
from atomtrain.analysis.export.export import loss_in
from atomtrain.analysis.export.structure import take_apart
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.checking import check_against_model, layers_by_hand
from atomtrain.analysis.layers.exported_chain import ExportedLayers, exported_layers
from atomtrain.analysis.layers.front import FREE_SHAPES, Front, Rest, has_front
from atomtrain.analysis.layers.front_parts import front_layers
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.analysis.layers.known_data import known_data
from atomtrain.analysis.layers.larger_images import LargerImages
from atomtrain.analysis.layers.limits import Limit
from atomtrain.analysis.layers.micro_batch import (
    Entry,
    Inputs,
    MicroBatch,
    Ready,
    Traced,
    entries_of,
    numbered,
)
from atomtrain.analysis.layers.own_ending import Ending, Inner, has_ending
from atomtrain.errors import AnalysisError, ConfigError

__all__ = ["HasLayers", "Loss", "MicroBatch", "Traced", "chain_of"]

Loss = Callable[..., Tensor]
LOSS = "loss"
_log = logging.getLogger("atomtrain.analysis")


@runtime_checkable
class HasLayers(Protocol):
    """A model that knows its own chain.

    The layers' modules must be submodules of the model, so that its parameters keep their names.
    Where the layers depend on which of forward's arguments micro-batches have, the model has
    `layers_given(names)` too. With `output_layers(names)`, of which the last one writes `output`,
    what forward returns, the loss may be another one than the model's.
    """

    def chain_layers(self) -> Sequence[Layer]:
        """Return the layers; they read the forward's argument names, the last writes `loss`."""
        ...


class _Example:
    """Holds what a loss is given of the example."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values


class _LossLayer(nn.Module):
    """Runs a loss as it is. Where data decide what it does, its costs are those of the example."""

    def __init__(
        self,
        loss: Loss,
        extra: Sequence[str],
        as_mapping: bool,
        takes_batch: bool,
        example: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._loss, self._extra = loss, tuple(extra)
        self._as_mapping, self._takes_batch = as_mapping, takes_batch
        self._example = _Example([example[name] for name in self._extra])

    def forward(self, output: Any, *batch: Any) -> Tensor:
        try:
            return self._of(output, batch)
        except (DataDependentOutputException, DynamicOutputShapeException):
            given = take_apart(batch).tensors
            data = take_apart(self._example.values).tensors
            if any(tensor.is_meta for tensor in data):
                raise
            pairs = zip(given, (tensor.detach().cpu() for tensor in data), strict=True)
            with known_data(pairs, others_are_zeros=True):
                return self._of(output, batch)

    def _of(self, output: Any, batch: Sequence[Any]) -> Tensor:
        if not self._takes_batch:
            return self._loss(output)
        if self._as_mapping:
            return self._loss(output, dict(zip(self._extra, batch, strict=True)))
        return self._loss(output, batch)


def chain_of(
    model: nn.Module,
    example: MicroBatch,
    loss: Loss | None = None,
    layers: Sequence[str] | None = None,
    device: torch.device = CPU,
) -> Traced:
    """Return the chain of any model.

    A model with `chain_layers` tells its layers, those of an `nn.Sequential` are its modules, and
    any other model is exported and cut (see `exported_layers`).

    Args:
        model: Any module; its weights may be on the meta device.
        example: One micro-batch as the model's forward takes it: a mapping, a tuple or a tensor.
            With `loss`, further entries (targets) may follow those that forward takes.
        loss: `loss(output)` or `loss(output, micro_batch)`, a scalar; `None` takes the output's
            `.loss`.
        layers: Paths of the modules that forward calls one after the other, each on what the one
            before it returns; `None` finds the layers.
        device: Where the layers will run: code that asks for the device takes its branch. The
            model may be elsewhere, and there need not be such a device.

    Raises:
        AnalysisError: the model cannot be taken apart, or has no layers.
        ConfigError: the example does not fit the model's forward, or a loss is missing.
    """
    if layers is not None:
        return _by_hand(model, example, loss, layers)
    if isinstance(model, HasLayers):
        names = _argument_names(model)
        of_given = getattr(model, "layers_given", None)
        own = list(of_given(_given(example, names)) if of_given else model.chain_layers())
        if not own or not own[-1].writes:
            raise AnalysisError(
                f"chain_layers() of {type(model).__name__} must return at least one layer, and the "
                "last one must write the loss"
            )
        if loss is not None:
            return _with_outer_loss(model, names, example, loss)
        used = {name for layer in own for name in layer.reads}
        inputs = tuple(name for name in names if name in used)
        return Traced(_chain(model, own, inputs, own[-1].writes[0]), _binder(names, inputs))
    if _is_only_its_modules(model):
        assert isinstance(model, nn.Sequential)
        return _sequential(model, example, loss)
    return _exported(model, example, loss, device)


def _exported(
    model: nn.Module, example: MicroBatch, loss: Loss | None, device: torch.device
) -> Traced:
    inputs = Inputs(model, example, own_loss=loss is None)
    ending, refused = None, ""
    try:
        first, front, exported = _with_front(model, example, inputs, loss is None, device)
    except AnalysisError as error:
        if loss is not None or not has_ending(model, inputs.tensors(example)):
            raise
        refused = str(error)
    if refused:
        first, front = [], None
        ending, exported = _inner(model, example, inputs, device, refused)
    layers, rebuild, ready, image_tokens = exported
    fixed = {name for layer in layers for name in layer.reads}
    free = {name for layer in first for name in layer.reads} - fixed
    smaller = set[str]() if ending is None else set(inputs.tensor_names) - fixed
    last = layers[-1]
    if loss is None and ending is None:
        layers[-1] = Layer(last.name, last.module, last.reads, (LOSS,))
    else:
        assert isinstance(last.module, GraphLayer)
        judge = ending or loss
        assert judge is not None
        entries = inputs.entries if ending is not None or _takes_batch(judge) else []
        extra = [name for entry in entries for name in entry.tensors or (entry.name,)]
        head = _OnOutput(last.module, rebuild, judge, entries, inputs, example, len(last.reads))
        layers[-1] = Layer(last.name, head, (*last.reads, *extra), (LOSS,))
    layers = [*first, *layers]
    used = {name for layer in layers for name in layer.reads}
    names = [name for entry in inputs.entries for name in entry.tensors or (entry.name,)]
    read = tuple(name for name in names if name in used)
    own = functools.partial(_own_loss, inputs, loss)
    checks = [tokens.check for tokens in image_tokens]
    bind = inputs.binder(read, checks, free, smaller)
    chain = _chain(model, layers, read, LOSS)
    if front is None:
        return Traced(chain, bind, ready, own)
    larger = LargerImages(front, first, [name for name in inputs.tensor_names if name in free])
    return Traced(chain, bind, functools.partial(_ready, front, ready), own, larger)


def _inner(
    model: nn.Module,
    example: MicroBatch,
    inputs: Inputs,
    device: torch.device,
    refused: str,
) -> tuple[Ending, ExportedLayers]:
    """Return the layers of a model's inner model, and what is behind it as one loss of theirs."""
    try:
        ending = Ending(model, inputs, example)
        behind = Layer("", ending, (), ())
        exported = exported_layers(
            model, example, Inner(ending), own_loss=False, device=device, before=[behind]
        )
    except AnalysisError as error:
        raise AnalysisError(f"{refused}; nor is its inner model taken alone: {error}") from error
    _log.info("%s ends by its own code: %s", type(model).__name__, refused)
    return ending, exported


def _ready(
    front: Front,
    ready: Ready,
    training: bool,
    settle: Callable[[], None],
    hold: Callable[[Sequence[Limit]], None],
) -> None:
    ready(training, settle, hold)
    if training:
        front.check_modes()


def _with_front(
    model: nn.Module, example: MicroBatch, inputs: Inputs, own_loss: bool, device: torch.device
) -> tuple[list[Layer], Front | None, ExportedLayers]:
    """Return the layers that come first where not all can be exported, all of them in one, and the
    exported layers.

    Its own code has the model's bits, which ways that are not those of an eager model may not have.
    """
    with_data = has_front(model, inputs.tensors(example))
    free = set(getattr(model, FREE_SHAPES, ())).intersection(inputs.tensor_names)
    whole = functools.partial(
        exported_layers, model, example, inputs, own_loss=own_loss, device=device
    )
    refused = f"{FREE_SHAPES} names {', '.join(free)}"
    if not (with_data and free):
        try:
            return [], None, whole(as_eager=with_data)
        except AnalysisError as error:
            if not with_data:
                raise
            refused = str(error)
    try:
        front = Front(model, inputs, example)
    except AnalysisError as error:
        if not free:
            with suppress(AnalysisError):
                return [], None, whole()
        raise AnalysisError(f"{refused}; {error}") from error
    _log.info("%s runs by its own code up to its language model: %s", type(model).__name__, refused)
    rest = Rest(front, inputs, example)
    exported = exported_layers(
        model, example, rest, own_loss=own_loss, device=device, before=[front.layer]
    )
    most_bytes = max(map(_parameter_bytes, exported.layers))
    return front_layers(front, most_bytes), front, exported


def _parameter_bytes(layer: Layer) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters.values())


def _own_loss(
    inputs: Inputs, loss: Loss | None, example: MicroBatch, forward: Callable[..., Any]
) -> Tensor:
    values = inputs.values(example)
    given = {entry.name: values[entry.name] for entry in inputs.of_forward}
    output = forward(**given) if inputs.as_mapping else forward(*given.values())
    if loss is None:
        return loss_in(output)
    return loss(output, example) if _takes_batch(loss) else loss(output)


def _by_hand(
    model: nn.Module, example: MicroBatch, loss: Loss | None, paths: Sequence[str]
) -> Traced:
    inputs = Inputs(model, example, own_loss=False)
    values = inputs.values(example)
    layers = layers_by_hand(model, paths, {e.name: values[e.name] for e in inputs.of_forward})
    names = tuple(entry.name for entry in inputs.entries)
    traced = _joined(model, layers, names, example, loss or loss_in)
    own = functools.partial(_own_loss, inputs, loss)
    check_against_model(model, traced.chain, traced.bind(example), functools.partial(own, example))
    return traced._replace(own=own)


class _OnOutput(nn.Module):
    def __init__(
        self,
        module: GraphLayer,
        rebuild: Callable[[Sequence[Any]], Any],
        loss: Loss,
        entries: Sequence[Entry],
        inputs: Inputs,
        example: MicroBatch,
        reads: int,
    ) -> None:
        super().__init__()
        self.module = module
        extra, values = [entry.name for entry in entries], inputs.values(example)
        self.loss = _LossLayer(loss, extra, inputs.as_mapping, bool(entries), values)
        self._rebuild, self._entries, self._reads = rebuild, tuple(entries), reads

    def forward(self, *values: Any) -> Tensor:
        other = self.module.other if self.module.mode.is_other else None
        rebuild = other.rebuild if other is not None else self._rebuild
        output = rebuild(self.module(*values[: self._reads]))
        batch, start = [], self._reads
        for entry in self._entries:
            stop = start + max(1, len(entry.tensors))
            given = values[start:stop]
            batch.append(entry.rebuild(given) if entry.tensors else given[0])
            start = stop
        result: Tensor = self.loss(output, *batch)
        return result


def _is_only_its_modules(model: nn.Module) -> bool:
    """Return whether a model calls its modules one after the other, and does nothing else."""
    if not isinstance(model, nn.Sequential) or "forward" in vars(model):
        return False
    own = type(model).forward is not nn.Sequential.forward
    own |= type(model).__call__ is not nn.Module.__call__
    hooks = model._forward_pre_hooks, model._forward_hooks, model._backward_hooks
    return not (own or any(hooks) or model._backward_pre_hooks)


def _sequential(model: nn.Sequential, example: MicroBatch, loss: Loss | None) -> Traced:
    if len(model) == 0:
        raise AnalysisError("the nn.Sequential is empty; nothing can be trained")
    if not isinstance(example, Tensor) and len(example) == 0:
        raise ConfigError("the example is empty; give one micro-batch as training will use it")
    entries = tuple(entries_of(example, numbered(())))
    first = next(iter(inspect.signature(model.forward).parameters))
    source = first if first in entries else entries[0]
    layers, value = [], source
    # Not `named_children`, which leaves out a module that was used before (one nn.ReLU for all).
    for name, module in zip(model._modules, model, strict=True):
        layers.append(Layer(name, module, (value,), (f"{name}.out",)))
        value = f"{name}.out"
    return _joined(model, layers, entries, example, loss or loss_in)


def _with_outer_loss(
    model: HasLayers, names: Sequence[str], example: MicroBatch, loss: Loss
) -> Traced:
    """Return the chain of a model that knows its layers, with the caller's loss on its output."""
    assert isinstance(model, nn.Module)
    of_given = getattr(model, "output_layers", None)
    if of_given is None:
        raise ConfigError(f"{type(model).__name__} computes its own loss; leave out loss=...")
    entries = _given(example, names)
    layers = list(of_given(entries))
    return _joined(model, layers, entries, example, loss)


def _joined(
    model: nn.Module,
    layers: list[Layer],
    entries: tuple[str, ...],
    example: MicroBatch,
    loss: Loss,
) -> Traced:
    """Return the chain of layers whose last value is the model's output, followed by the loss."""
    takes_batch = _takes_batch(loss)
    extra = entries if takes_batch else ()
    # The loss has no parameters: it joins the last layer, so that it is never a segment alone.
    last = layers[-1]
    own = len(last.reads)
    as_mapping, values = isinstance(example, Mapping), entries_of(example, entries)
    judge = _LossLayer(loss, extra, as_mapping, takes_batch, values)
    head = _Joined(last.module, judge, own)
    layers[-1] = Layer(last.name, head, (*last.reads, *extra), (LOSS,))
    used = {name for layer in layers for name in layer.reads}
    inputs = tuple(name for name in entries if name in used)
    return Traced(_chain(model, layers, inputs, LOSS), _binder(entries, inputs))


class _Joined(nn.Module):
    def __init__(self, module: nn.Module, loss: nn.Module, reads: int) -> None:
        super().__init__()
        self.module, self.loss, self._reads = module, loss, reads

    def forward(self, *values: Any) -> Any:
        return self.loss(self.module(*values[: self._reads]), *values[self._reads :])


def _binder(names: Sequence[str], inputs: Sequence[str]) -> Callable[[MicroBatch], dict[str, Any]]:
    def bind(micro_batch: MicroBatch) -> dict[str, Any]:
        given = entries_of(micro_batch, names)
        if missing := [name for name in inputs if given.get(name) is None]:
            raise ConfigError(
                f"the micro-batch lacks {', '.join(missing)}; "
                f"it has {', '.join(given) or 'nothing'}"
            )
        return {name: given[name] for name in inputs}

    return bind


def _chain(model: nn.Module, layers: Sequence[Layer], inputs: tuple[str, ...], loss: str) -> Chain:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    chain = Chain(tuple(layers), inputs, loss, names)
    if stray := [name for key, name in names.items() if key not in chain.users]:
        raise AnalysisError(f"parameter {stray[0]!r} belongs to no layer of the chain")
    return chain


def _given(example: MicroBatch, names: Sequence[str]) -> tuple[str, ...]:
    entries = entries_of(example, numbered(names)).items()
    return tuple(n for n, value in entries if not isinstance(example, Mapping) or value is not None)


def _argument_names(model: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _takes_batch(loss: Loss) -> bool:
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is inspect.Parameter.empty
    ]
    return len(positional) >= 2

"""A model as a chain of layers that pass named values to each other.

Values are written once: the micro-batch's inputs by the caller, all others by one layer. What must
travel from one segment to the next follows from who writes and who reads, so side inputs and skips
need no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.errors import AnalysisError


class Aside:
    """A module that another one runs and that is not part of it; a replica gets its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module


@dataclass(frozen=True)
class Layer:
    """Indivisible link of the chain: `writes = module(*reads)`."""

    name: str
    module: nn.Module
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def fixed(self) -> bool:
        """Whether the shapes of what it reads, and the mode, tell all operations that it does.

        A module says so by an attribute `fixed_operations`; others may do otherwise each time.
        """
        return bool(getattr(self.module, "fixed_operations", False))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters by its own names; a weight with two names appears under both."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.module.named_buffers(remove_duplicate=False))

    def run(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values the layer writes, with `tensors` as its parameters and buffers.

        Raises:
            AnalysisError: the module returned another number of values.
        """
        result = self.call(tensors, values)
        written = (
            (result,)
            if len(self.writes) == 1 and not isinstance(result, tuple | list)
            else tuple(result)
        )
        if len(written) != len(self.writes):
            raise AnalysisError(
                f"layer {self.name!r} returned {len(written)} values, "
                f"{len(self.writes)} were expected: {', '.join(self.writes)}"
            )
        return written

    def call(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> Any:
        """Return what the module returns with `tensors` as its parameters and buffers.

        As `torch.func.functional_call`, which looks for the places anew each time: for a block
        that takes as long as some of its operations. One thread at a time.
        """
        if isinstance(self.module, GraphLayer):
            return self.module.run(tensors, values)
        before = []
        try:
            for name, tensor in tensors.items():
                holder, key = self._places[name]
                before.append((holder, key, holder[key]))
                holder[key] = tensor
            return self.module(*values)
        finally:
            for holder, key, own in reversed(before):
                holder[key] = own

    @cached_property
    def _places(self) -> dict[str, tuple[dict[str, Any], str]]:
        places: dict[str, tuple[dict[str, Any], str]] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for holder in (module._parameters, module._buffers):
                places.update({f"{prefix}{name}": (holder, name) for name in holder})
        return places


@dataclass(frozen=True)
class Chain:
    """Layers in the order of execution; the value `loss` is a scalar written by the last one."""

    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    loss: str
    names: Mapping[int, str] = field(repr=False)
    """The model's own name of each parameter, by `id`; a shared weight has its first name."""
    gradient_factor: int = 1
    """Bytes of a gradient over those of its parameter: 2 where those of parameters of 16 bits add
    up in float32."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise AnalysisError("the model has no layers; nothing can be trained")
        written = set(self.inputs)
        for layer in self.layers:
            if missing := [name for name in layer.reads if name not in written]:
                raise AnalysisError(f"layer {layer.name!r} reads {missing[0]!r} before it exists")
            if repeated := [name for name in layer.writes if name in written]:
                raise AnalysisError(f"layer {layer.name!r} writes {repeated[0]!r} a second time")
            written.update(layer.writes)
        if self.loss not in self.layers[-1].writes:
            raise AnalysisError(f"the last layer must write {self.loss!r}")

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """The layers that use each parameter, by the parameter's `id`, in order."""
        users: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for parameter in layer.parameters.values():
                entry = users.setdefault(id(parameter), [])
                if index not in entry:
                    entry.append(index)
        return {key: tuple(value) for key, value in users.items()}

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Each parameter once, in the order of first use."""
        unique: dict[int, nn.Parameter] = {}
        for layer in self.layers:
            for parameter in layer.parameters.values():
                unique.setdefault(id(parameter), parameter)
        return tuple(unique.values())

    def loss_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a micro-batch, computed where the weights are; buffers stay."""
        copies = {id(b): b.clone() for layer in self.layers for b in layer.buffers.values()}
        values = dict(inputs)
        for layer in self.layers:
            buffers = {name: copies[id(buffer)] for name, buffer in layer.buffers.items()}
            written = layer.run({**layer.parameters, **buffers}, [values[n] for n in layer.reads])
            values.update(zip(layer.writes, written, strict=True))
        loss: Tensor = values[self.loss]
        return loss

    # Asked for each micro-batch of each visit.
    @cached_property
    def _reads(self) -> dict[tuple[int, int], tuple[str, ...]]:
        return {}

    @cached_property
    def _writes(self) -> dict[tuple[int, int], tuple[str, ...]]:
        return {}

    def reads(self, start: int, stop: int) -> tuple[str, ...]:
        """Values that layers `start` to `stop` take from outside, in the order of first use."""
        if (start, stop) not in self._reads:
            self._reads[start, stop] = self._find_reads(start, stop)
        return self._reads[start, stop]

    def _find_reads(self, start: int, stop: int) -> tuple[str, ...]:
        inside: set[str] = set()
        outside: dict[str, None] = {}
        for layer in self.layers[start:stop]:
            outside.update({name: None for name in layer.reads if name not in inside})
            inside.update(layer.writes)
        return tuple(outside)

    def writes(self, start: int, stop: int) -> tuple[str, ...]:
        """Values that layers `start` to `stop` write and later layers read (or the loss)."""
        if (start, stop) not in self._writes:
            self._writes[start, stop] = self._find_writes(start, stop)
        return self._writes[start, stop]

    def _find_writes(self, start: int, stop: int) -> tuple[str, ...]:
        later = {name for layer in self.layers[stop:] for name in layer.reads} | {self.loss}
        return tuple(
            name for layer in self.layers[start:stop] for name in layer.writes if name in later
        )

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Values that layers write before `cut` and read at or after it (inputs not included)."""
        later = {name for layer in self.layers[cut:] for name in layer.reads}
        return tuple(name for layer in self.layers[:cut] for name in layer.writes if name in later)

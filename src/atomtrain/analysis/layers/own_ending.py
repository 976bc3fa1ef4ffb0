"""What a model does behind its inner model, by its own code, within the last layer.

Some heads compare what they found with what is there: they match boxes, or count labels. Data
decide what runs then, which cannot be exported. So the inner model is exported alone, and the last
layer runs the model's own forward as it is, in which a call of the inner model gives what the
layers before gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.export.conditions import only_torch_draws
from atomtrain.analysis.export.export import loss_in
from atomtrain.analysis.export.structure import (
    NotPlainError,
    put_together,
    take_apart,
    taken_apart,
)
from atomtrain.analysis.layers.chain import Aside
from atomtrain.analysis.layers.front import elsewhere, instead, unchanged
from atomtrain.analysis.layers.known_data import known_data
from atomtrain.analysis.layers.micro_batch import Inputs, MicroBatch
from atomtrain.errors import AnalysisError, ConfigError, reason_of


@dataclass(frozen=True, eq=False)
class _Parts:
    inner: nn.Module
    inside: list[nn.Module]
    """The modules of the inner model."""
    outside: list[nn.Module]


class _ReachedError(Exception):
    """Ends a forward where enough of it has run."""


class Inner:
    """The inner model alone: what export takes in place of the micro-batch."""

    def __init__(self, ending: Ending) -> None:
        self._inputs, self._skeleton = ending.inputs, ending.skeleton
        self.tensor_names = ending.inputs.tensor_names

    def tensors(self, example: MicroBatch) -> list[Tensor]:
        return self._inputs.tensors(example)

    def call(self, model: Any, tensors: Sequence[Tensor]) -> Any:
        """Call the inner model as the model calls it."""
        args, kwargs = put_together(self._skeleton, tensors)
        return model.base_model(*args, **kwargs)


class Ending(nn.Module):
    """Returns the loss of a model whose inner model has run: `ending(output, micro_batch)`."""

    def __init__(self, model: Any, inputs: Inputs, example: MicroBatch) -> None:
        """Take the modules that are not the inner model.

        Args:
            model: One that `has_ending`.
            inputs: Of the example.
            example: A micro-batch with data.

        Raises:
            AnalysisError: the model does not call its inner model, or gives it other tensors than
                those of the micro-batch.
        """
        super().__init__()
        self._model, self.inputs = Aside(model), inputs
        self._known_parts: list[_Parts] = []
        """Of the inner model that there was last, at most one; no state of forward."""
        for name, child in model.named_children():
            if child is not model.base_model:
                self.add_module(name, child)
        if own := [name for name, _ in model.named_parameters(recurse=False)]:
            raise AnalysisError(f"{own[0]} lies beside its modules")
        self.skeleton = self._reached(model, example)

    def _reached(self, model: Any, example: MicroBatch) -> Any:
        """Return what the model gives its inner model, with places of the micro-batch's tensors."""
        data = [tensor.detach().cpu() for tensor in self.inputs.tensors(example)]
        given: list[Any] = []

        def inner(*args: Any, **kwargs: Any) -> Any:
            given.append((args, kwargs))
            raise _ReachedError

        with FakeTensorMode(), torch.no_grad(), only_torch_draws(), unchanged(model.modules()):
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in data]
            try:
                with (
                    known_data(zip(tensors, data, strict=True)),
                    instead(model.base_model, "forward", inner),
                ):
                    self.inputs.call(model, tensors)
            except _ReachedError:
                return self._skeleton_of(given[0], tensors)
            except Exception as error:  # whatever forward raises
                raise AnalysisError(
                    "its own code cannot run without data up to its inner model "
                    f"({reason_of(error)})"
                ) from error
        raise AnalysisError("forward does not call its inner model")

    def _skeleton_of(self, given: Any, tensors: Sequence[Tensor]) -> Any:
        found = list(tensors)
        try:
            skeleton = taken_apart(given, found)
        except NotPlainError as error:
            raise AnalysisError(f"the inner model is given a {error}") from error
        if len(found) > len(tensors):
            raise AnalysisError("the inner model is given a tensor that forward makes")
        return skeleton

    def forward(self, output: Any, batch: Any) -> Tensor:
        model = self._model.module
        values = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
        tensors = take_apart(list(values.values())).tensors
        calls = 0

        def inner(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise AnalysisError(f"{type(model).__name__} calls its inner model twice")
            if self._skeleton_of((args, kwargs), tensors) != self.skeleton:
                raise ConfigError(
                    "a micro-batch has the model call its inner model otherwise than the example; "
                    "swap the model with such an example"
                )
            return output

        parts = self._parts()
        with (
            unchanged(parts.outside),
            elsewhere(parts.inside, tensors[0].device),
            instead(model.base_model, "forward", inner),
        ):
            made = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        return loss_in(made)

    def _parts(self) -> _Parts:
        """Return the model's modules: looking for them takes as long as some of them."""
        inner = self._model.module.base_model
        if not self._known_parts or self._known_parts[0].inner is not inner:
            inside = list(inner.modules())
            known = {id(module) for module in inside}
            outside = [each for each in self._model.module.modules() if id(each) not in known]
            self._known_parts[:] = [_Parts(inner, inside, outside)]
        return self._known_parts[0]


def has_ending(model: Any, example: Sequence[Tensor]) -> bool:
    """Return whether a model is an inner model and what is behind it, and there are data."""
    if any(tensor.is_meta for tensor in example):
        return False
    inner = getattr(model, "base_model", None)
    return inner is not model and any(child is inner for child in model.children())

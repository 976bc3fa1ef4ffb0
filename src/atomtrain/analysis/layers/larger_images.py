"""Images that are larger than those of the example: they take their place, and are planned for.

What runs by a model's own code takes images of any size, but its costs are those of the example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.front import Front, OwnCode
from atomtrain.analysis.layers.front_calls import Calls, recorded_calls
from atomtrain.analysis.layers.front_parts import Part, unlike


class LargerImages:
    """Finds them, and has them be the example of the layers that run own code."""

    def __init__(self, front: Front, layers: Sequence[Layer], free: Sequence[str]) -> None:
        """Take a front, the layers that it became, and what may have any shape."""
        self._front, self._free = front, tuple(free)
        self._code = {front, *(at.module for at in layers if isinstance(at.module, OwnCode))}
        self._parts = [code for code in self._code if isinstance(code, Part)]
        names = front.inputs.tensor_names
        self._bytes = self._bytes_of(dict(zip(names, front.example, strict=True)))

    def among(self, micro_batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the micro-batch with the largest images, if no example had such large ones."""
        largest = max(micro_batches, key=self._bytes_of)
        return largest if self._bytes_of(largest) > self._bytes else None

    @contextmanager
    def as_example(self, micro_batch: Mapping[str, Any]) -> Iterator[None]:
        """Have a micro-batch be the example from now on, but not if what is done within fails.

        Raises:
            ConfigError: the model does otherwise with it than with the one before.
        """
        front, before = self._front, [(part, part.calls) for part in self._parts]
        example = front.example
        tensors = [micro_batch[name].detach().cpu() for name in front.inputs.tensor_names]
        try:
            self._set_example(tensors)
            front.run_without_data()
            if before:
                calls = recorded_calls(front)
                if any(_kinds(calls) != _kinds(known) for _, known in before):
                    raise unlike()
                for part, _ in before:
                    part.calls = calls
            yield
        except BaseException:
            self._set_example(example)
            for part, known in before:
                part.calls = known
            raise
        self._bytes = self._bytes_of(micro_batch)

    def _set_example(self, tensors: list[Tensor]) -> None:
        for code in self._code:
            code.example = tensors

    def _bytes_of(self, micro_batch: Mapping[str, Any]) -> int:
        return sum(int(micro_batch[name].nbytes) for name in self._free)


def _kinds(calls: Calls) -> Any:
    """Return what calls are but for the sizes of what they give."""
    of_each = [
        (call.path, call.reads, call.skeleton, [(len(s.shape), s.dtype) for s in call.specs])
        for call in calls.calls
    ]
    return of_each, calls.read_last

"""Logits that are never computed: they wait until a loss takes the cross-entropy of them.

For losses that are Python functions of a model's output: what they do to the logits before
cross-entropy (reshape, shift by a token, cast) is done to the hidden state instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis.head.pieces import linear_cross_entropy
from atomtrain.errors import AnalysisError


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Stands for `linear(hidden, weight, bias)`, in the place of a tensor.

    Raises:
        AnalysisError: something is asked of it that needs the logits themselves.
    """

    hidden: Tensor
    """`[..., D]`."""
    weight: Tensor
    """`[V, D]`."""
    bias: Tensor | None
    pieces: int
    dtype: torch.dtype
    """What the loss takes the logits to be."""
    classes_second: bool = False
    """`[B, V, T]`, as cross-entropy wants several dimensions."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Say that this is a tensor: losses may take another path if it is none."""
        return Tensor

    @property
    def shape(self) -> torch.Size:
        *rows, _ = self.hidden.shape
        size = self.weight.shape[0]
        return torch.Size([rows[0], size, rows[1]] if self.classes_second else [*rows, size])

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        """False: gradients do not pass it, but the loss that is taken of it (asked by hooks)."""
        return False

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyLogits:
        return self

    def float(self) -> LazyLogits:
        """Return the logits as float32."""
        return self.to(torch.float32)

    def to(self, dtype: torch.dtype) -> LazyLogits:
        """Return the logits in a type that is no narrower, at most float32."""
        if dtype != self.dtype and not (self.dtype.itemsize < 4 and dtype == torch.float32):
            raise _needed(f"casts them to {dtype}")
        return self._with(dtype=dtype)

    def view(self, *shape: Any) -> LazyLogits:
        *rows, last = shape[0] if isinstance(shape[0], Sequence) else shape
        size = self.weight.shape[0]
        if last == -1 and -1 not in rows:
            last = math.prod(self.shape) // max(1, math.prod(rows))
        if self.classes_second or last != size:
            raise _needed("reshapes them so that the vocabulary is not the last dimension")
        return self._with(hidden=self.hidden.reshape(*rows, self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> LazyLogits:
        if self.classes_second or end_dim % self.ndim == self.ndim - 1:
            raise _needed("flattens the vocabulary")
        return self._with(hidden=self.hidden.flatten(start_dim, end_dim))

    def transpose(self, dim0: int, dim1: int) -> LazyLogits:
        """Return `[B, V, T]` of `[B, T, V]`, or back."""
        if self.ndim != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
            raise _needed("transposes them")
        return self._with(classes_second=not self.classes_second)

    def permute(self, *dims: Any) -> LazyLogits:
        """Return `[B, V, T]` of `[B, T, V]`, or back."""
        order = dims[0] if isinstance(dims[0], Sequence) else dims
        if self.ndim != 3 or [dim % 3 for dim in order] != [0, 2, 1]:
            raise _needed("permutes them")
        return self.transpose(1, 2)

    def __getitem__(self, index: Any) -> LazyLogits:
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [item if item is Ellipsis else None for item in given]:
            place = next(i for i, item in enumerate(given) if item is Ellipsis)
            rest = self.ndim - (len(given) - 1)
            given = (*given[:place], *[slice(None)] * rest, *given[place + 1 :])
        touches = len(given) == self.ndim and given[-1] != slice(None)
        if self.classes_second or touches or any(item is None for item in given):
            raise _needed("takes a part of the vocabulary")
        return self._with(hidden=self.hidden[given])

    def cross_entropy(self, labels: Tensor, **options: Any) -> Tensor:
        if options.pop("weight") is not None:
            raise _needed("weighs the classes")
        if labels.is_floating_point() or (self.ndim > 2 and not self.classes_second):
            raise _needed("takes a cross-entropy with probabilities or over another dimension")
        rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        loss = linear_cross_entropy(
            rows, self.weight, self.bias, labels.reshape(-1), pieces=self.pieces, **options
        )
        if options["reduction"] == "none":
            loss = loss.view(labels.shape)
        return loss.to(self.dtype) if self.dtype.itemsize < 4 else loss

    def _with(self, **changes: Any) -> LazyLogits:
        return LazyLogits(**{**vars(self), **changes})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        raise _needed(f"uses .{name} of them")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what torch's functions do; torch calls this instead of them."""
        given = dict(kwargs or {})
        if function is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **given)
            bound.apply_defaults()
            options = bound.arguments
            logits, labels = options.pop("input"), options.pop("target")
            if type(logits) is cls and isinstance(labels, Tensor):
                old = (options.pop("size_average"), options.pop("reduce"))
                if old == (None, None):
                    return logits.cross_entropy(labels, **options)
        method = _METHODS.get(function)
        if method is not None and args and type(args[0]) is cls:
            return getattr(args[0], method)(*args[1:], **given)
        raise _needed(f"calls {getattr(function, '__name__', function)} on them")


class LazyLinear(nn.Module):
    def __init__(self, linear: nn.Linear, pieces: int) -> None:
        super().__init__()
        self.linear, self.pieces = linear, pieces

    def forward(self, hidden: Tensor) -> LazyLogits:
        linear = self.linear
        return LazyLogits(hidden, linear.weight, linear.bias, self.pieces, hidden.dtype)


_METHODS: dict[Any, str] = {
    torch.flatten: "flatten",
    torch.reshape: "reshape",
    torch.transpose: "transpose",
    torch.permute: "permute",
}


def _needed(what: str) -> AnalysisError:
    return AnalysisError(
        f"the head cannot be split: the loss {what}, so all logits are needed at once; give "
        "cross_entropy the logits as the model returns them, or leave out head_pieces"
    )

"""Cross-entropy of a linear layer, a piece of the vocabulary at a time: full logits never exist.

The softmax over the vocabulary is computed online (Milakov and Gimelshein 2018, arXiv 1805.02867):
forward keeps the logarithm of each row's sum of exponentials and nothing else. Backward computes
each piece's logits again, turns them into their gradient in place, and is done with the piece.

Shapes: N rows (tokens), D width, V vocabulary, v one piece of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from atomtrain.errors import ConfigError

Reduction = Literal["mean", "sum", "none"]

_ALIGN_FROM = 1024
_ALIGNED = 64
"""Pieces of `_ALIGN_FROM` and more are rounded up to multiples of this, for the matrix units."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    pieces: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), labels)` without the full logits.

    Besides the gradients, about `N * V / pieces` elements are needed at a time, in float32 (and
    once more in the inputs' type if that is a half). Backward computes the logits again: a third
    more arithmetic than the unsplit loss. The additions are in another order than those of the
    unsplit loss, so the last bits differ; they depend on `pieces`, and on nothing else.

    Under autocast all is computed in autocast's type, as `linear` is. Gradients can be taken once.

    Args:
        hidden: `[N, D]` floating point.
        weight: `[V, D]` of the same type.
        bias: `[V]` of the same type, or `None`.
        labels: `[N]` int64, from 0 to V - 1, or `ignore_index`.
        pieces: Into how many pieces the vocabulary is split, at least 1.
        ignore_index: Rows with this label do not count.
        label_smoothing: Share of the probability that is spread evenly, from 0 to 1.
        reduction: `mean` over the rows that count (NaN if there are none), `sum`, or `none`: each
            row's own, 0 where it does not count.

    Returns:
        0-d loss in nats (`[N]` with `none`); float64 for float64 inputs, float32 for all others.

    Raises:
        ConfigError: `pieces`, `label_smoothing` or `reduction` out of range, or shapes that do not
            fit.
        RuntimeError: a label is neither in the vocabulary nor `ignore_index`, as torch reports it.
    """
    if pieces < 1:
        raise ConfigError(f"pieces must be at least 1, not {pieces}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    fits = hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or labels.shape != hidden.shape[:1]:
        raise ConfigError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)} must be [N, D], [V, D] and [N]; flatten batch and sequence"
        )
    loss: Tensor = OPERATION(
        hidden, weight, bias, labels, pieces, ignore_index, label_smoothing, reduction
    )
    return loss


def _compute(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # Here, because backward runs outside of autocast and must compute the same logits.
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, *others
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        pieces: int,
        ignore_index: int,
        label_smoothing: float,
        reduction: Reduction,
    ) -> Tensor:
        counts = labels != ignore_index
        dtype = _wide(hidden.dtype)
        # Where the largest is -inf, exp(x - largest) would be NaN: hence the least finite number.
        largest = hidden.new_full(labels.shape, torch.finfo(dtype).min, dtype=dtype)
        total = torch.zeros_like(largest)
        # Gathering from V zeros costs nothing and lets torch check that the labels are in range.
        zeros = total.new_zeros(1).expand(weight.shape[0])
        chosen = zeros.gather(0, labels.where(counts, 0))
        summed = torch.zeros_like(largest) if label_smoothing else None
        for start, stop in _ranges(weight.shape[0], pieces):
            logits = _logits(hidden, weight, bias, start, stop)
            index, inside = _places(labels, start, stop)
            chosen = logits.gather(1, index).squeeze(1).where(inside, chosen)
            if summed is not None:
                summed += logits.sum(1)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            total *= (before - largest).exp_()
            total += logits.sub_(largest[:, None]).exp_().sum(1)
            del logits  # before the next piece's are made
        normaliser = largest + total.log()
        loss = normaliser - (1 - label_smoothing) * chosen
        if summed is not None:
            loss -= label_smoothing / weight.shape[0] * summed
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser)
        ctx.pieces, ctx.ignore_index = pieces, ignore_index
        ctx.label_smoothing, ctx.reduction = label_smoothing, reduction
        loss = loss.where(counts, 0)
        if reduction == "none":
            return loss
        return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normaliser = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        counts = labels != ctx.ignore_index
        if ctx.reduction == "mean":
            upstream = upstream / counts.sum()
        scale = upstream.to(normaliser.dtype).where(counts, 0)[:, None]
        # Sums over pieces are in float32; each row of the weight's gradient is one matrix product.
        d_hidden = torch.zeros_like(hidden, dtype=normaliser.dtype) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        d_bias = torch.empty_like(bias) if wants_bias else None
        for start, stop in _ranges(weight.shape[0], ctx.pieces):
            logits = _logits(hidden, weight, bias, start, stop)
            gradient = logits.sub_(normaliser[:, None]).exp_()
            if ctx.label_smoothing:
                gradient -= ctx.label_smoothing / weight.shape[0]
            index, inside = _places(labels, start, stop)
            share = inside[:, None].to(gradient.dtype) * (ctx.label_smoothing - 1)
            # One element of each row: no two threads add to the same, as `scatter_add_` may.
            gradient.scatter_(1, index, gradient.gather(1, index) + share)
            gradient *= scale
            del logits
            if d_bias is not None:
                d_bias[start:stop] = gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if d_weight is not None:
                torch.mm(gradient.t(), hidden, out=d_weight[start:stop])
            if d_hidden is not None:
                _add_product(d_hidden, gradient, weight[start:stop])
            del gradient
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32 for halves."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _ranges(vocabulary: int, pieces: int) -> Iterator[tuple[int, int]]:
    size = -(-vocabulary // pieces)
    if size >= _ALIGN_FROM:
        size = -(-size // _ALIGNED) * _ALIGNED
    for start in range(0, vocabulary, max(1, size)):
        yield start, min(vocabulary, start + size)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """Return a piece's logits `[N, v]` in the type of sums."""
    part = None if bias is None else bias[start:stop]
    logits = F.linear(hidden, weight[start:stop], part)
    return logits.to(_wide(logits.dtype))


def _places(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return each label's place in a piece, `[N, 1]`, and whether it is there at all, `[N]`."""
    inside = (labels >= start) & (labels < stop)
    return (labels - start).where(inside, 0)[:, None], inside


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        # Not `addmm_`, which torch's FLOP counter does not know.
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


# An operation of torch, so that an exported graph has it as one node: else export would write down
# what forward does and leave backward to autograd. Composite, so that all others see the operations
# inside.
_LIBRARY = torch.library.Library("atomtrain", "FRAGMENT")
_LIBRARY.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int pieces, "
    "int ignore_index, float label_smoothing, str reduction) -> Tensor"
)
_LIBRARY.impl("linear_cross_entropy", _compute, "CompositeImplicitAutograd")
OPERATION = torch.ops.atomtrain.linear_cross_entropy.default
"""What `linear_cross_entropy` calls, with all arguments by position."""

"""Exact masters of parameters of 16 bits: float32, or the 16 bits that bfloat16 leaves out.

A *stream* is what the device gets: the parameter, in bfloat16. Its *master* is the float32 value
that updates add to; without it, updates smaller than half a unit in the last place of bfloat16
would be lost. After each update the stream is the master rounded to nearest, ties away from zero.

| master    | beside the stream                 | bytes each |
|-----------|-----------------------------------|------------|
| `float32` | `master`: the value               | 4          |
| `split`   | `rest`: the value's lower 16 bits | 2          |

**The split is exact.** With the bits of a float32 as an integer `m`, rounding is

    stream = (m + 2^15) >> 16            rest = the lower 16 bits of m, read as int16

and since `rest` is at least 2^15 as an unsigned number just when the addition carried,

    m = (stream << 16) + rest            modulo 2^32, rest with its sign

for each of the 2^32 patterns: a carry may run through the exponent (the largest finite values have
an infinite stream, as nearest values do) and subnormals, infinities and zeros of either sign need
no special case. Ties to even would not do: then an even stream would stand for 2^16 + 1 masters.
NaN stays NaN where arithmetic made it; patterns of NaN that are made by hand come back exactly, but
their stream need not be NaN.

Both masters hold the same values, so training with either gives the same bits.

A stream can be float16 as well, of a `float32` master only; it is rounded to nearest, ties to even.

Updates compute in float32 *scratch*, through which narrow numbers pass; each thread keeps its own.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, nearest

MASTER_BYTES = {"float32": 4.0, "split": 2.0}
"""Bytes that the master of one parameter takes beside its stream, by format."""
KEYS = {"float32": "master", "split": "rest"}
"""Where a parameter's state has its master, by format."""
_DTYPES = {"float32": torch.float32, "split": torch.int16}
_HALF = 1 << 15
_SLICE_ELEMENTS = 1 << 18
"""Rounded at once."""
STREAMS = (torch.bfloat16, torch.float16)
"""Types of parameters that have masters."""
_local = threading.local()


class Scaling(NamedTuple):
    """What gradients are multiplied by on their way into an update."""

    factor: float = 1.0
    """Of parameters with masters, in float32; after the coefficient."""
    coefficient: Tensor | None = None
    """A single number; the product is rounded to the gradient's own type. `None` is 1."""


UNSCALED = Scaling()


def check_master(name: object) -> None:
    """Raise a `ConfigError` if there is no such format."""
    if name not in KEYS:
        raise ConfigError(
            f"master {name!r} is not a format of masters.{nearest(str(name), KEYS)} "
            f"Formats: {', '.join(KEYS)}"
        )


def check_stream(dtype: torch.dtype, kind: str) -> None:
    """Raise a `ConfigError` if parameters of a type cannot have masters of a format."""
    if dtype is torch.float16 and kind == "split":
        raise ConfigError(
            "a split master is what bfloat16 leaves out of a float32; parameters of float16 need "
            "master='float32'"
        )


def round_stream(values: Tensor) -> Tensor:
    """Return float32 values in bfloat16: the nearest, ties away from zero."""
    stream = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    bits = values.detach().contiguous().view(torch.int32) + _HALF
    stream.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    return stream


def new_master(stream: Tensor, kind: str) -> dict[str, Tensor]:
    """Return the state of a master that is what its stream says."""
    if kind == "split":
        return {KEYS[kind]: torch.zeros(stream.shape, dtype=torch.int16, device=stream.device)}
    return {KEYS[kind]: stream.detach().float()}


def stored_master(state: dict[str, Any], stream: Tensor, kind: str) -> Tensor:
    """Return what a state has of a master; made of the stream if the state is empty.

    Raises:
        ConfigError: the state has no master of this format and shape.
    """
    if not state:
        state.update(new_master(stream, kind))
    found = state.get(KEYS[kind])
    if not (
        isinstance(found, Tensor)
        and found.dtype is _DTYPES[kind]
        and found.shape == stream.shape
        and found.is_contiguous()
    ):
        raise ConfigError(
            f"the optimizer state has no {KEYS[kind]} of a bfloat16 parameter of shape "
            f"{list(stream.shape)}, which master={kind!r} needs; continue with the master= that "
            "it was saved with"
        )
    check_aligned(found, f"the optimizer state's {KEYS[kind]}")
    return found


def check_aligned(tensor: Tensor, name: str) -> None:
    """Raise a `ConfigError` if a tensor begins where its elements cannot lie in memory."""
    if tensor.data_ptr() % tensor.element_size():
        raise ConfigError(
            f"{name} of shape {list(tensor.shape)} does not begin at a multiple of its element's "
            "size in memory; make it so with .clone()"
        )


def read(stream: Tensor, stored: Tensor) -> Tensor:
    """Return the master as float32; of a `float32` master it is the memory itself."""
    if stored.dtype is torch.float32:
        return stored
    values = torch.empty(stream.shape, dtype=torch.float32, device=stream.device)
    flat, rest, out = stream.detach().view(-1), stored.view(-1), values.view(-1)
    count = min(_SLICE_ELEMENTS, flat.numel())
    spare = torch.empty(count, dtype=torch.float32, device=stream.device)
    for begin in range(0, flat.numel(), _SLICE_ELEMENTS):
        some = slice(begin, begin + _SLICE_ELEMENTS)
        join(flat[some], rest[some], out[some], spare[: out[some].numel()])
    return values


def write(stream: Tensor, stored: Tensor, values: Tensor) -> None:
    """Set master and stream to float32 values; needs little memory beside them."""
    if stored.dtype is torch.float32:
        if values.data_ptr() != stored.data_ptr():
            stored.copy_(values)
    else:
        stored.copy_(values.contiguous().view(torch.int32))
    if stream.dtype is not torch.bfloat16:
        stream.copy_(values)
        return
    # Row by row, or several at once: rounding makes copies of what it rounds.
    rows = max(1, _SLICE_ELEMENTS * len(values) // max(1, values.numel())) if values.ndim else 0
    if not rows or len(values) <= rows:
        stream.copy_(round_stream(values))
        return
    for part, from_part in zip(stream.split(rows), values.split(rows), strict=True):
        part.copy_(round_stream(from_part))


def join(stream: Tensor, rest: Tensor, out: Tensor, spare: Tensor) -> None:
    """Write the values of a split master.

    Args:
        stream: `[n]` bfloat16.
        rest: `[n]` int16.
        out: `[n]` float32.
        spare: `[n]` float32; overwritten. Without it each addition would allocate as much.
    """
    out.copy_(stream)  # its bits are the stream's, 16 to the left
    wide = spare.view(torch.int32)
    wide.copy_(rest)
    out.view(torch.int32).add_(wide)


def part(values: Tensor, stream: Tensor, rest: Tensor | None, spare: Tensor) -> None:
    """Write stream and, if there is one, rest of values; the values are lost unless `rest` is None.

    Args:
        values: `[n]` float32; overwritten if `rest` is given.
        stream: `[n]` bfloat16, or float16 if there is no rest.
        rest: `[n]` int16, or `None` for a master that is `values` itself.
        spare: `[n]` float32; overwritten.
    """
    if stream.dtype is torch.float16:
        stream.copy_(values)
        return
    bits = values.view(torch.int32)
    if rest is None:
        bits = torch.add(bits, _HALF, out=spare.view(torch.int32))
    else:
        rest.copy_(bits)  # conversion cuts off the upper half
        bits.add_(_HALF)
    stream.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def scratch(
    buffers: int, count: int, device: torch.device, purpose: str = "moments"
) -> list[Tensor]:
    """Return float32 buffers of `count` elements that are this thread's own; contents are old."""
    kept: list[Tensor] = _local.__dict__.setdefault(f"{purpose} {device}", [])
    while len(kept) < buffers:
        kept.append(torch.empty(0, dtype=torch.float32, device=device))
    for index in range(buffers):
        if kept[index].numel() < count:
            kept[index] = torch.empty(count, dtype=torch.float32, device=device)
    return [buffer[:count] for buffer in kept[:buffers]]


def free_scratch() -> None:
    _local.__dict__.clear()


def widened(
    stream: Tensor, gradient: Tensor, stored: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Return a slice's master (the memory itself if it is float32) and its gradient, as float32.

    Args:
        stream: `[n]` of 16 bits.
        gradient: `[n]`; read only.
        stored: `[n]` of the master.
        factor: What the gradient is multiplied by.
    """
    if stored.dtype is torch.float32:
        (wide,) = scratch(1, stream.numel(), stream.device, "wide")
        values = stored
    else:
        wide, values = scratch(2, stream.numel(), stream.device, "wide")
        join(stream, stored, values, wide)
    wide.copy_(gradient)
    return values, wide if factor == 1.0 else wide.mul_(factor)


def narrowed(stream: Tensor, stored: Tensor, values: Tensor, wide: Tensor) -> None:
    """Store updated values of `widened`: the stream, and the rest of a split master.

    Args:
        stream: `[n]` of 16 bits.
        stored: `[n]` of the master.
        values: `[n]` float32; lost if the master is split.
        wide: `[n]` float32, the gradient's scratch; overwritten.
    """
    part(values, stream, stored if stored.dtype is torch.int16 else None, wide)


def wide_buffers(parameter: Tensor, master: str) -> int:
    """Return how many buffers `widened` takes: of the gradient, and of a split master."""
    if parameter.dtype not in STREAMS:
        return 0
    return 2 if master == "split" else 1

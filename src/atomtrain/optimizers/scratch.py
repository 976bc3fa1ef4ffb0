"""Float32 memory through which narrow numbers pass in an update; each thread keeps its own."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from atomtrain.optimizers import masters

_local = threading.local()


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
    """Free this thread's scratch, which it otherwise keeps for its next update."""
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
        masters.join(stream, stored, values, wide)
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
    masters.part(values, stream, stored if stored.dtype is torch.int16 else None, wide)


def wide_buffers(parameter: Tensor, master: str) -> int:
    """Return how many buffers `widened` takes: of the gradient, and of a split master."""
    if parameter.dtype not in masters.STREAMS:
        return 0
    return 2 if master == "split" else 1

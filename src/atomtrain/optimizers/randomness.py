"""Random numbers for stochastic rounding: a pure function of seed, step and position.

No generator is involved, so nothing has to be saved, and neither the number of threads, nor the
order of the parameters, nor which of them are updated together changes a bit.

The number of the element at `position` is `table[start + position]`. The table is a fixed hash of
its indices; `start` is a hash of whatever words the caller gives (seed, step, which slice).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLICE = 1 << 20
"""Most elements that one call may ask for. It is part of what defines the numbers: changing it
changes every run with rounded moments."""
WHOLE = 256
"""What `fractions` are above 0 to 1: then what they are added to is above 0 (cutting off is the
floor), and the sum modulo 256 is a code."""
_STARTS = 1 << 18
_HOST = torch.device("cpu")
_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashed(*words: int) -> int:
    """Return 64 well mixed bits of the words (finaliser of SplitMix64, Steele et al. 2014)."""
    value = 0
    for word in words:
        value = (value + _INCREMENT + word) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= value >> 31
    return value


def offsets(count: int, *words: int, device: torch.device = _HOST) -> Tensor:
    """Return what stochastic rounding to bfloat16 adds to the bits of a float32.

    Args:
        count: At most `SLICE`.
        words: What the numbers depend on.
        device: Where they are needed.

    Returns:
        `[count]` int32, uniform in 0 to 65535: less than a unit in the last place of bfloat16, so
        that cutting off afterwards leaves a value that bfloat16 holds exactly. Read only.
    """
    begin = start(*words)
    return _offsets_on(device)[begin : begin + count]


def fractions(count: int, *words: int, device: torch.device = _HOST) -> Tensor:
    """Return what stochastic rounding to an integer adds before the floor.

    Args:
        count: At most `SLICE`.
        words: What the numbers depend on.
        device: Where they are needed.

    Returns:
        `[count]` float32, `WHOLE` and one of the 4096 middles of 0 to 1, uniform: at least 2^-13
        from either end, so that a whole number which is off by rounding errors still becomes
        itself. Read only.
    """
    begin = start(*words)
    return _fractions_on(device)[begin : begin + count]


def start(*words: int) -> int:
    """Return where in the table the numbers that depend on these words begin."""
    return hashed(*words) % _STARTS


@functools.cache
def compact(kind: str) -> Tensor:
    """Return the whole table for the compiled core, of moments in `bfloat16` or `int8`.

    Returns:
        `[n]` of 16 bits without sign, though int16 is what they are called: `offsets`, or which of
        the 4096 parts `fractions` are the middle of.
    """
    table = _table()
    words = table >> np.uint64(48) if kind == "bfloat16" else table & np.uint64(0xFFF)
    return torch.from_numpy(words.astype(np.uint16).view(np.int16))


@functools.cache
def _offsets_on(device: torch.device) -> Tensor:
    return torch.from_numpy((_table() >> np.uint64(48)).astype(np.int32)).to(device)


@functools.cache
def _fractions_on(device: torch.device) -> Tensor:
    parts = ((_table() & np.uint64(0xFFF)).astype(np.float32) + np.float32(0.5)) / np.float32(4096)
    return torch.from_numpy(parts + np.float32(WHOLE)).to(device)


def _table() -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = (np.arange(SLICE + _STARTS, dtype=np.uint64) + np.uint64(1)) * np.uint64(_INCREMENT)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
        value ^= value >> np.uint64(31)
    return value

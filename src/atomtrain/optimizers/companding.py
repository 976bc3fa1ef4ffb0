"""Moments in 8 bits: blockwise scales, square roots before rounding, rounding at random.

A block of 128 elements has one scale, its largest magnitude, so that an outlier costs its own block
only (Dettmers et al. 2021, arXiv 2110.02861). Before rounding, values are companded by a square
root, which gives small values small steps; FlashOptim (arXiv 2602.23349) takes the root of the
second moment likewise, and a softsign for the first. Rounding is stochastic: rounding to nearest
would leave a second moment where it is, since its change in a step is far less than a code.

With `s` the block's scale and codes `c` (int8):

    first moment    m = s * (c / 127) * |c / 127|           c in -127..127
    second moment   v = s * ((c + 129) / 256)^2             c in -128..127

No code of the second moment is zero, so an update is never divided by a vanished denominator; a
root below a 256th of the block's largest is raised to it, which only makes the step smaller.

Random numbers, also those of moments in bfloat16, come from no generator, so nothing has to be
saved, and neither the number of threads nor the order of the parameters changes a bit. That of the
element at `position` is `table[start + position]`. The table is a fixed hash of its indices;
`start` is a hash of words that the caller gives (seed, step, which slice).
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

    Returns:
        `[count]` int32, uniform in 0 to 65535: less than a unit in the last place of bfloat16, so
        that cutting off afterwards leaves a value that bfloat16 holds exactly. Read only.
    """
    begin = start(*words)
    return _offsets_on(device)[begin : begin + count]


def fractions(count: int, *words: int, device: torch.device = _HOST) -> Tensor:
    """Return what stochastic rounding to an integer adds before the floor.

    Returns:
        `[count]` float32, `WHOLE` and one of the 4096 middles of 0 to 1, uniform: at least 2^-13
        from either end, so that a whole number which is off by rounding errors still becomes
        itself. Read only.
    """
    begin = start(*words)
    return _fractions_on(device)[begin : begin + count]


def start(*words: int) -> int:
    return hashed(*words) % _STARTS


@functools.cache
def compact(kind: str) -> Tensor:
    """Return the whole table for the compiled core, of moments in `bfloat16` or `int8`.

    Returns:
        `[n]` of 16 bits without sign, though int16 is what they are called: `offsets`, or the lower
        16 bits of `fractions`.
    """
    table = _table()
    if kind == "bfloat16":
        words = table >> np.uint64(48)
    else:
        words = (table & np.uint64(0xFFF)) << np.uint64(3) | np.uint64(4)
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


BLOCK = 128
"""Elements that share a scale."""
_TINY = 1.2e-38
"""Least normal float32: below it, precision is of no use to an update."""


class Buffer:
    """Float32 scratch for whole blocks, with the views of it that each pass needs."""

    def __init__(self, memory: Tensor, count: int) -> None:
        """Make the views.

        Args:
            memory: `[b * BLOCK]` float32.
            count: Elements that there are; the last block may have fewer than others.
        """
        self.all = memory
        self.rows = memory.view(-1, BLOCK)
        self.used, self.rest = memory[:count], memory[count:]
        shorts = memory.view(torch.int16)
        self.low, self.high = shorts[:count], shorts[memory.numel() :][:count]


def decode_first(codes: Tensor, scales: Tensor, out: Buffer, spare: Buffer) -> None:
    """Write the first moment into `out`.

    Args:
        codes: `[n]` int8.
        scales: `[b]` float32, one a block.
        out: Of `n` elements; what is beyond them becomes 0.
        spare: As `out`; overwritten.
    """
    # |c| c has 15 bits: half the bytes of a float32 to pass over.
    spare.low.copy_(codes)
    torch.abs(spare.low, out=spare.high)
    spare.low.mul_(spare.high)
    out.used.copy_(spare.low)
    _scale(out, scales, 127.0)


def decode_second(codes: Tensor, scales: Tensor, out: Buffer) -> None:
    """Write the second moment into `out`; arguments as for `decode_first`."""
    out.used.copy_(codes)
    out.all.add_(129.0).square_()
    _scale(out, scales, 256.0)


def encode_first(
    values: Buffer, codes: Tensor, scales: Tensor, fractions: Tensor, spare: Buffer
) -> None:
    """Write codes and scales of a first moment.

    Args:
        values: 0 beyond the codes; overwritten.
        codes: `[n]` int8.
        scales: `[b]` float32.
        fractions: `[b * BLOCK]` float32 in `WHOLE` to `WHOLE + 1`, random.
        spare: As `values`; overwritten.
    """
    torch.abs(values.all, out=spare.all)
    torch.amax(spare.rows, 1, out=scales)
    _root(spare.all)
    torch.copysign(spare.all, values.all, out=values.all)
    _round(values, scales, 127.0, fractions, spare)
    codes.copy_(spare.low)  # modulo 256


def encode_second(
    values: Buffer, codes: Tensor, scales: Tensor, fractions: Tensor, spare: Buffer
) -> None:
    """Write codes and scales of a second moment; arguments as for `encode_first`."""
    torch.amax(values.rows, 1, out=scales)
    _root(values.all)
    _round(values, scales, 256.0, fractions, spare)
    spare.low.clamp_(WHOLE + 1, WHOLE + 256)  # the least root that has a code is 1/256
    codes.copy_(spare.low).add_(256 - 129)  # both modulo 256


def _scale(squares: Buffer, scales: Tensor, most: float) -> None:
    """Multiply squares of at most `most` squared by their block's scale, which is the most then."""
    squares.rows.mul_((scales / most**2).unsqueeze_(1))
    if squares.rest.numel():
        squares.rest.zero_()


def _root(values: Tensor) -> None:
    """Take square roots in place, each the nearest float32. PyTorch's, MKL's on a CPU, are
    a unit off for a fifth of all numbers on some processors."""
    if values.device.type != "cpu":
        values.sqrt_()
        return
    numbers = values.numpy()
    with np.errstate(invalid="ignore"):
        np.sqrt(numbers, out=numbers)


def _round(roots: Buffer, scales: Tensor, most: float, fractions: Tensor, whole: Buffer) -> None:
    """Scale roots to `most` at the block's largest, and round them at random.

    They are in `whole.low` then, with `WHOLE` added.
    """
    factors = scales.clamp(min=_TINY).rsqrt_().unsqueeze_(1)
    torch.addcmul(fractions.view(-1, BLOCK), roots.rows, factors, value=most, out=roots.rows)
    whole.low.copy_(roots.used)  # cuts off, which is the floor of what is above 0

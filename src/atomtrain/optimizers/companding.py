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
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale."""
_TINY = 1.2e-38
"""Least normal float32: below it, precision is of no use to an update."""


def decode_first(codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor) -> None:
    """Write the first moment into `out`.

    Args:
        codes: `[n]` int8.
        scales: `[b]` float32, one a block.
        out: `[b * BLOCK]` float32; what is beyond `n` becomes 0.
        spare: As `out`; overwritten.
    """
    out[: codes.numel()].copy_(codes)
    torch.abs(out, out=spare)
    out.mul_(spare)
    out.view(-1, BLOCK).mul_((scales / 127**2).unsqueeze(1))
    out[codes.numel() :].zero_()


def decode_second(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the second moment into `out`; arguments as for `decode_first`."""
    out[: codes.numel()].copy_(codes)
    out.add_(129.0).square_()
    out.view(-1, BLOCK).mul_((scales / 256**2).unsqueeze(1))
    out[codes.numel() :].zero_()


def encode_first(
    values: Tensor, codes: Tensor, scales: Tensor, fractions: Tensor, spare: Tensor
) -> None:
    """Write codes and scales of a first moment.

    Args:
        values: `[b * BLOCK]` float32, 0 beyond the codes; overwritten.
        codes: `[n]` int8.
        scales: `[b]` float32.
        fractions: `[b * BLOCK]` float32 in 0 to 1, random.
        spare: As `values`; overwritten.
    """
    torch.abs(values, out=spare)
    torch.amax(spare.view(-1, BLOCK), 1, out=scales)
    # x / sqrt(|x|) is the root with the sign of x; cheaper than a root and a sign of their own.
    spare.clamp_(min=_TINY).rsqrt_()
    values.mul_(spare)
    _round(values, scales, 127.0, fractions)
    codes.copy_(values[: codes.numel()])


def encode_second(values: Tensor, codes: Tensor, scales: Tensor, fractions: Tensor) -> None:
    """Write codes and scales of a second moment; arguments as for `encode_first`."""
    torch.amax(values.view(-1, BLOCK), 1, out=scales)
    torch.sqrt(values, out=values)
    _round(values, scales, 256.0, fractions)
    # The code 0 of the formula above stands for the root 1/256.
    values.sub_(129.0).clamp_(min=-128.0)
    codes.copy_(values[: codes.numel()])


def _round(roots: Tensor, scales: Tensor, most: float, fractions: Tensor) -> None:
    """Scale roots to `most` at the block's largest, and round them at random."""
    factors = scales.sqrt().clamp_(min=_TINY**0.5).reciprocal_().mul_(most).unsqueeze_(1)
    rows = roots.view(-1, BLOCK)
    torch.addcmul(fractions.view(-1, BLOCK), rows, factors, out=rows)
    roots.floor_()

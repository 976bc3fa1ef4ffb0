"""Weights in 8 or 4 bits, blockwise: held and carried narrow, made wide where they are multiplied.

A matrix `[O, I]` is cut into blocks of at most 64 inputs; each block has a float32 scale, its
largest absolute value. 8 bits are equal steps of 1/127 of it. 4 bits are indices of the 16 levels
of NF4, the quantiles of a normal distribution (Dettmers et al. 2023, appendix E).

4 bits of MXFP4 (OCP Microscaling, 2023) are numbers e2m1, in blocks of 32 inputs whose scale is a
power of two, kept as its exponent plus 127. What is published so is held without loss. Scales of
one byte tell it from NF4.

Scales may also be float32 whose bits are held as int32: see `models/forms.py`. A negative one then
tells equal steps, a positive one FP8 (e4m3) or NF4. Of equal steps in 4 bits a zero point is taken,
which is in the lowest four bits of the scale. Whole numbers of 8 bits less a zero point have a NaN
with a sign in its place: behind its nine bits come their scale, float16 without its sign, and in
the lowest eight the zero point plus 128.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from atomtrain.analysis.costs.storages import takes_inside, uncounted
from atomtrain.errors import ConfigError
from atomtrain.native import library
from atomtrain.native.library import GRADIENTS, address

_BLOCK = 64
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
MX_BLOCK = 32
"""Inputs of a block of MXFP4."""
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_SIZES, *(-size for size in _SIZES))
"""What the 16 codes of MXFP4 mean."""
FP8_TYPE = torch.float8_e4m3fn
E4M3 = tuple(torch.arange(256).to(torch.uint8).view(FP8_TYPE).float().tolist())
"""What the 256 codes of FP8 mean."""
ZERO_POINT = 15
"""The bits of a scale that have the zero point of equal steps in 4 bits."""
COUNTED = -1 << 23
"""The least word that is such a NaN, or minus infinity; all up to -1 are."""
_AT_ONCE, _BESIDE_BYTES = 1 << 22, 20
"""Elements that PyTorch makes wide at a time, and what each takes meanwhile."""
_LARGEST_EXPONENT = 2
"""Of `E2M1`: its largest level is 1.5 times four."""


class Quantised(NamedTuple):
    """A matrix in few bits."""

    codes: Tensor  # [O, I] int8, or [O, I/2] uint8 with the earlier input in the low half
    scales: Tensor  # [O, I/block] float32, uint8 in MXFP4, or the bits of float32 as int32


def block_of(inputs: int) -> int:
    """Return the inputs of a block: the largest even divisor of `inputs` up to 64.

    Raises:
        ConfigError: there is none.
    """
    for size in range(_BLOCK, 1, -2):
        if inputs % size == 0:
            return size
    raise ConfigError(f"a matrix of {inputs} inputs cannot be quantised; their number must be even")


def _inputs_of(codes: Tensor) -> int:
    """Return the columns of a matrix."""
    return codes.shape[1] * (1 if codes.dtype == torch.int8 else 2)


def empty_quantised(rows: int, inputs: int, bits: int, like: Tensor) -> Quantised:
    """Return room for a matrix on the device of another.

    Raises:
        ConfigError: as `block_of`.
    """
    packed, kind = (inputs, torch.int8) if bits == 8 else (inputs // 2, torch.uint8)
    scales = like.new_empty((rows, inputs // block_of(inputs)), dtype=torch.float32)
    return Quantised(like.new_empty((rows, packed), dtype=kind), scales)


def quantise(weight: Tensor, bits: int) -> Quantised:
    """Return `[O, I]` float32 in 8 or 4 bits."""
    blocks = weight.float().unflatten(1, (-1, block_of(weight.shape[1])))  # [O, I/block, block]
    scales = blocks.abs().amax(-1)
    unit = blocks / torch.where(scales > 0, scales, torch.ones_like(scales))[..., None]
    if bits == 8:
        return Quantised((unit * 127).round().flatten(1).to(torch.int8), scales)
    levels = torch.tensor(_NF4)
    borders = (levels[1:] + levels[:-1]) / 2
    indices = torch.bucketize(unit.flatten(1), borders).to(torch.uint8)
    return Quantised(indices[:, ::2] | (indices[:, 1::2] << 4), scales)


def empty_mxfp4(rows: int, inputs: int, like: Tensor) -> Quantised:
    """Return room for a matrix in MXFP4 on the device of another; `inputs` divide by 32."""
    codes = like.new_empty((rows, inputs // 2), dtype=torch.uint8)
    return Quantised(codes, like.new_empty((rows, inputs // MX_BLOCK), dtype=torch.uint8))


def to_mxfp4(weight: Tensor) -> Quantised:
    """Return `[O, I]` float32 in MXFP4: the same numbers, if they were made of it.

    A block's largest number gets the largest exponent of e2m1. The codes may differ from published
    ones: those of a block whose numbers are small for its scale have smaller steps here.
    """
    blocks = weight.float().contiguous().unflatten(1, (-1, MX_BLOCK))
    _, exponent = torch.frexp(blocks.abs().amax(-1))  # of a number in [0.5, 1)
    kept = (exponent - 1 - _LARGEST_EXPONENT + 127).clamp(0, 254).to(torch.uint8)
    unit = (blocks / exponents(kept)[..., None]).flatten(1)
    levels = torch.tensor(_SIZES)
    indices = torch.bucketize(unit.abs(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    indices |= unit.signbit().to(torch.uint8) << 3
    return Quantised(indices[:, ::2] | (indices[:, 1::2] << 4), kept)


def exponents(scales: Tensor) -> Tensor:
    """Return `2^(byte - 127)` of bytes, float32: scales of E8M0 (OCP Microscaling, 2023)."""
    # By the bits of float32: a GPU's powers of two need not be exact. 2^-127 is subnormal.
    words = torch.where(scales == 0, 1 << 22, scales.to(torch.int32) << 23)
    return words.to(torch.int32).view(torch.float32)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[O, I]` in a float type; computed in float32 and rounded once.

    On a CPU the compiled core does it in one pass, with the bits of `dequantise_in_torch`.
    """
    core = library.core() if codes.device.type == "cpu" else None
    # Others than real tensors have no memory, and a compiler must see what is done.
    real = type(codes) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    per_byte = 1 if codes.dtype == torch.int8 else 2
    block = per_byte * codes.numel() // max(1, scales.numel())
    # The core trusts what it is told; of shapes that do not fit PyTorch says what is wrong.
    fits = (
        scales.dtype in (torch.uint8, torch.int32, *GRADIENTS)
        and 0 < block <= _BLOCK
        and block % per_byte == 0
    )
    fits &= codes.shape[0] == scales.shape[0] and block * scales.numel() == per_byte * codes.numel()
    if core is None or not real or dtype not in GRADIENTS or not fits:
        return dequantise_in_torch(codes, scales, dtype)
    levels, signs = _levels_for(codes, scales), scales.dtype == torch.int32
    codes, scales = codes.contiguous(), _factors(scales).contiguous()
    out = torch.empty((codes.shape[0], per_byte * codes.shape[1]), dtype=dtype)

    def write(begin: int, end: int) -> None:
        core.atom_dequantise(
            ctypes.c_void_p(codes.data_ptr() + begin // per_byte),
            ctypes.c_void_p(scales.data_ptr() + begin // block * scales.element_size()),
            *(ctypes.c_int64((end - begin) // block), ctypes.c_int64(block)),
            *(None, ctypes.c_int32(0))
            if levels is None
            else (address(levels), ctypes.c_int32(len(levels))),
            ctypes.c_int32(signs),
            ctypes.c_int32(GRADIENTS[dtype]),
            ctypes.c_void_p(out.data_ptr() + begin * out.element_size()),
        )

    library.run(write, out.numel(), block)
    return out


def dequantise_in_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same by PyTorch, on any device: what defines the bits.

    Beside the result it takes `_BESIDE_BYTES` an element, of some rows at a time.
    """
    rows, inputs = codes.shape[0], _inputs_of(codes)
    at_once = max(1, _AT_ONCE // inputs)
    if rows <= at_once or type(codes) not in (Tensor, nn.Parameter):
        return _dequantised(codes, scales, dtype)
    out = codes.new_empty((rows, inputs), dtype=dtype)
    parts = (each.split(at_once) for each in (codes, scales, out))
    for some, factors, target in zip(*parts, strict=True):
        target.copy_(_dequantised(some, factors, dtype))
    return out


def _dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    if codes.dtype == torch.int8:
        # By a tensor: a GPU multiplies by what a number is the inverse of, and rounds otherwise.
        unit = codes.float() / _there(codes, (127.0,))
    else:
        levels = _levels_for(codes, scales)
        assert levels is not None
        halves = torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()  # [O, I]
        unit = levels[halves]
    blocks, factors = unit.unflatten(1, (scales.shape[1], -1)), _factors(scales)[..., None]
    if scales.dtype == torch.int32:
        steps = factors < 0  # not of NaN
        if codes.dtype == torch.int8:
            numbers = codes.view(FP8_TYPE).float().view_as(blocks)
            blocks = torch.where(steps, blocks, numbers)
            del numbers
            whole, scale, zero = (each[..., None] for each in counting(scales))
            blocks = torch.where(whole, codes.view_as(blocks) - zero, blocks)
            factors = torch.where(whole, scale, factors.abs())
        else:
            counts = halves.view_as(blocks) - (scales & ZERO_POINT)[..., None]
            blocks = torch.where(steps, counts.float(), blocks)
            factors = torch.where(steps, -_factors(scales & ~ZERO_POINT)[..., None], factors)
    out: Tensor = (blocks * factors).flatten(1).to(dtype)
    return out


def counting(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which of the words held as int32 tell whole numbers of 8 bits; their scales and zero
    points, float32."""
    halves = (scales >> 8 & 0x7FFF).to(torch.int16).view(torch.float16)
    return (scales >= COUNTED) & (scales < 0), halves.float(), (scales & 255).float() - 128


def counted(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the words of scales and zero points: what `counting` takes apart."""
    halves = scales.to(torch.float16).view(torch.int16).int()
    return COUNTED | halves << 8 | zeros.int() + 128


def in_places(matrix: Tensor, order: Tensor) -> Tensor:
    """Return `[O, I]` whose columns were sorted as they were before.

    Args:
        matrix: With its columns sorted.
        order: `[I]`, for each of them where it was.
    """
    return torch.empty_like(matrix).index_copy(1, order.long(), matrix)


def _factors(scales: Tensor) -> Tensor:
    if scales.dtype == torch.int32:
        return scales.view(torch.float32)
    return exponents(scales) if scales.dtype == torch.uint8 else scales.float()


def _levels_for(codes: Tensor, scales: Tensor) -> Tensor | None:
    """Return the levels where codes are, `None` if they are equal steps; for real ones always the
    same tensor, since a GPU makes the host wait for each that is made anew."""
    if codes.dtype == torch.int8:
        return _there(codes, E4M3) if scales.dtype == torch.int32 else None
    return _there(codes, E2M1 if scales.dtype == torch.uint8 else _NF4)


def _there(codes: Tensor, levels: tuple[float, ...]) -> Tensor:
    if type(codes) in (Tensor, nn.Parameter):
        return _levels_on(codes.device, levels)
    return torch.tensor(levels, device=codes.device)  # of an analysis, which has no data


@functools.cache
def _levels_on(device: torch.device, levels: tuple[float, ...]) -> Tensor:
    with uncounted(), torch.inference_mode(False):
        return torch.tensor(levels, device=device)


@torch.library.custom_op("atomtrain::wide", mutates_args=())
def wide(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `dequantise` returns, as one operation of a graph."""
    return dequantise(codes, scales, dtype)


@wide.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    inputs = _inputs_of(codes)
    return codes.new_empty((codes.shape[0], inputs), dtype=dtype)


@torch.library.custom_op("atomtrain::quantised_linear", mutates_args=())
def quantised_linear(inputs: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return `inputs @ weight.T`; backward makes the weight wide again, so that it is not kept."""
    return inputs @ dequantise(codes, scales, inputs.dtype).T


@torch.library.custom_op("atomtrain::quantised_linear_backward", mutates_args=())
def _backward(gradient: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return gradient @ dequantise(codes, scales, gradient.dtype)


@quantised_linear.register_fake
def _(inputs: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], codes.shape[0]))


@_backward.register_fake
def _(gradient: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    inputs = _inputs_of(codes)
    return gradient.new_empty((*gradient.shape[:-1], inputs))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    codes, scales = ctx.saved_tensors
    return _backward(gradient, codes, scales), None, None


quantised_linear.register_autograd(_gradients, setup_context=_setup)


def _flops(first: Any, codes: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    rows = 1
    for size in first[:-1]:
        rows *= size
    return 2 * rows * int(first[-1]) * int(out_shape[-1])


for _operation in (
    torch.ops.atomtrain.quantised_linear,
    torch.ops.atomtrain.quantised_linear_backward,
):
    register_flop_formula(_operation)(_flops)


def _inside(of: Tensor, codes: Tensor, _: Tensor) -> int:
    """Return what a product takes at a time: the wide matrix, and the result or what is beside."""
    inputs = _inputs_of(codes)
    other = codes.shape[0] if of.shape[-1] == inputs else inputs
    result_bytes = of.numel() // of.shape[-1] * other * of.element_size()
    elements = codes.shape[0] * inputs
    return elements * of.element_size() + max(result_bytes, _beside(codes, elements))


def _wide_inside(codes: Tensor, _: Tensor, dtype: torch.dtype) -> int:
    elements = codes.shape[0] * _inputs_of(codes)
    return elements * dtype.itemsize + _beside(codes, elements)


def _beside(codes: Tensor, elements: int) -> int:
    # The compiled core takes nothing.
    return 0 if codes.device.type == "cpu" else _BESIDE_BYTES * min(elements, _AT_ONCE)


takes_inside(torch.ops.atomtrain.quantised_linear.default, _inside)
takes_inside(torch.ops.atomtrain.quantised_linear_backward.default, _inside)
takes_inside(torch.ops.atomtrain.wide.default, _wide_inside)

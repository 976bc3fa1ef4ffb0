"""AdamW's two moments in memory, in one of three formats, and the update that reads them.

| format     | state of a parameter (beside `step`)                                | bytes each |
|------------|---------------------------------------------------------------------|------------|
| `float32`  | `exp_avg`, `exp_avg_sq`                                             | 8          |
| `bfloat16` | the same, in bfloat16, rounded at random                            | 4          |
| `int8`     | the same as int8 codes; `exp_avg_scale`, `exp_avg_sq_scale` a block | 2.0625     |

The arithmetic is float32 always, in torch's fused kernel. Narrow moments, gradients and split
masters pass through float32 scratch part by part, small enough to stay in the processor's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, nearest
from atomtrain.optimizers import companding, masters, randomness
from atomtrain.optimizers.companding import BLOCK
from atomtrain.optimizers.randomness import SLICE

BYTES_PER_PARAMETER = {"float32": 8.0, "bfloat16": 4.0, "int8": 2 * (1 + 4 / BLOCK)}
"""Bytes of both moments of one parameter, by format."""
_DTYPES: dict[str, dict[str, torch.dtype]] = {
    "float32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bfloat16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "int8": {
        "exp_avg": torch.int8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq": torch.int8,
        "exp_avg_sq_scale": torch.float32,
    },
}
_FIRST, _SECOND = 1, 2
_UPPER_HALF = -(1 << 16)
"""The bits of a float32 that bfloat16 keeps."""
HOST_PASS = 1 << 18
"""Elements that pass through scratch at once on the host; divides `SLICE`. More take more memory
and leave the cache, fewer spend the time on calls. No bit depends on it. A GPU takes whole slices,
since there each call counts."""
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
_local = threading.local()


def check_format(name: object) -> None:
    """Raise a `ConfigError` if there is no such format."""
    if name not in _DTYPES:
        raise ConfigError(
            f"state {name!r} is no format of moments.{nearest(str(name), _DTYPES)} "
            f"Formats: {', '.join(_DTYPES)}"
        )


def new_state(parameter: Tensor, kind: str) -> dict[str, Tensor]:
    """Return the moments before the first update: all zero."""
    blocks = -(-parameter.numel() // BLOCK)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for key, dtype in _DTYPES[kind].items():
        shape = (blocks,) if key.endswith("_scale") else parameter.shape
        state[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
    if kind == "int8":
        state["exp_avg_sq"].fill_(-128)  # what a block of zeros is encoded as
    return state


def part_bytes(parameter: Tensor, kind: str) -> dict[str, int]:
    """Return the bytes of each tensor of a parameter's moments."""
    blocks = -(-parameter.numel() // BLOCK)
    return {
        key: dtype.itemsize * (blocks if key.endswith("_scale") else parameter.numel())
        for key, dtype in _DTYPES[kind].items()
    }


def cast_state(state: dict[str, Any], kind: str) -> None:
    """Undo `Optimizer.load_state_dict`'s cast to the parameter's type; exact for its formats."""
    for key, dtype in _DTYPES[kind].items():
        if isinstance(state.get(key), Tensor):
            state[key] = state[key].to(dtype)


def check_state(state: dict[str, Any], kind: str) -> None:
    """Raise a `ConfigError` if a loaded state is not of this format."""
    for key, dtype in _DTYPES[kind].items():
        found = getattr(state.get(key), "dtype", None)
        if found is not dtype:
            raise ConfigError(
                f"the optimizer state has {key} as {found}, state={kind!r} needs {dtype}; continue "
                "with the state= that it was saved with"
            )


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    gradient_factor: float = 1.0,
) -> None:
    """Update a parameter and its state by one step of AdamW (Loshchilov and Hutter 2019).

    Args:
        parameter: Contiguous, float32 or the bfloat16 stream of a master; updated in place.
        gradient: Contiguous, of the same shape, type and device; read only.
        state: As of `new_state`, with the master of a bfloat16 parameter; updated in place.
        group: With `lr`, `betas`, `eps`, `weight_decay`, `state` and `seed`; with `master` for
            bfloat16 parameters.
        gradient_factor: What the gradient of a stream is multiplied by, in float32.
    """
    kind: str = group["state"]
    state["step"] += 1
    kernel = _kernel(group, _on(parameter.device, state["step"]))
    streamed = parameter.dtype in masters.STREAMS
    if kind == "float32" and not streamed:
        kernel(parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        return
    update = _UPDATES[kind]
    stored = state[masters.KEYS[group["master"]]].view(-1) if streamed else None
    flat, flat_gradient = parameter.view(-1), gradient.view(-1)
    words, starts = (group["seed"], int(state["step"])), range(0, flat.numel(), SLICE)
    if kind == "float32":  # nothing is rounded at random
        salts = [0] * len(starts)
    else:
        salts = _salts(flat_gradient, gradient_factor if streamed else 1.0)
    at_once = min(HOST_PASS, SLICE) if parameter.device.type == "cpu" else SLICE
    for begin in range(0, flat.numel(), at_once):
        part = slice(begin, min(begin + at_once, flat.numel()))
        number, at = divmod(begin, SLICE)
        values, wide = flat[part], flat_gradient[part]
        if stored is not None:
            values, wide = _widened(values, wide, stored[part], gradient_factor)
        update(kernel, values, wide, state, part, (*words, starts[number], salts[number]), at)
        if stored is not None:
            split = stored.dtype is torch.int16
            # The gradient has been used: its scratch is free.
            masters.part(values, flat[part], stored[part] if split else None, wide)


def _salts(gradient: Tensor, factor: float) -> list[int]:
    """Return the bits of each slice's first gradient, as float32 and multiplied.

    They keep parameters of one size from sharing their random numbers, without naming or numbering
    parameters. A GPU has done all that it was given before the host knows them, so all are asked
    for at once.
    """
    first = gradient[::SLICE].float()
    return (first if factor == 1.0 else first * factor).view(torch.int32).tolist()


def _widened(
    stream: Tensor, gradient: Tensor, stored: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Return a slice's master (the memory itself if it is float32) and its gradient, as float32."""
    if stored.dtype is torch.float32:
        (wide,) = _scratch(1, stream.numel(), stream.device, "wide")
        values = stored
    else:
        wide, values = _scratch(2, stream.numel(), stream.device, "wide")
        masters.join(stream, stored, values, wide)
    wide.copy_(gradient)
    return values, wide if factor == 1.0 else wide.mul_(factor)


def _on(device: torch.device, step: Tensor) -> Tensor:
    """Return the count of steps on a device. On a GPU it is made there: a copy from ordinary memory
    would wait for all that the GPU was given before."""
    if step.device == device:
        return step
    return torch.full((), float(step), dtype=step.dtype, device=device)


def _kernel(group: dict[str, Any], step: Tensor) -> Kernel:
    beta1, beta2 = group["betas"]
    numbers = {
        "lr": float(group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
    }

    def update(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
        torch._fused_adamw_(
            [parameter], [gradient], [first], [second], [], [step],
            amsgrad=False, maximize=False, **numbers,
        )  # fmt: skip

    return update


def _float32_slice(
    kernel: Kernel,
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    part: slice,
    words: tuple[int, ...],
    at: int,
) -> None:
    moments = (state[key].view(-1)[part] for key in ("exp_avg", "exp_avg_sq"))
    kernel(parameter, gradient, *moments)


def _bfloat16_slice(
    kernel: Kernel,
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    part: slice,
    words: tuple[int, ...],
    at: int,
) -> None:
    count = parameter.numel()
    stored = [state[key].view(-1)[part] for key in ("exp_avg", "exp_avg_sq")]
    wide = _scratch(2, count, parameter.device)
    for narrow, scratch in zip(stored, wide, strict=True):
        scratch.copy_(narrow)
    kernel(parameter, gradient, *wide)
    for which, narrow, scratch in zip((_FIRST, _SECOND), stored, wide, strict=True):
        # Less than a unit is added to the magnitude, whatever the sign; then it is cut off.
        bits = scratch.view(torch.int32)
        bits.add_(randomness.offsets(count, *words, which, at=at, device=bits.device))
        bits.bitwise_and_(_UPPER_HALF)
        narrow.copy_(scratch)


def _int8_slice(
    kernel: Kernel,
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    part: slice,
    words: tuple[int, ...],
    at: int,
) -> None:
    count = parameter.numel()
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    padded = (blocks.stop - blocks.start) * BLOCK
    first, second, spare = _scratch(3, padded, parameter.device)
    codes1, codes2 = (state[key].view(-1)[part] for key in ("exp_avg", "exp_avg_sq"))
    scales1, scales2 = state["exp_avg_scale"][blocks], state["exp_avg_sq_scale"][blocks]
    companding.decode_first(codes1, scales1, first, spare)
    companding.decode_second(codes2, scales2, second)
    kernel(parameter, gradient, first[:count], second[:count])
    random1, random2 = (
        randomness.fractions(padded, *words, which, at=at, device=first.device)
        for which in (_FIRST, _SECOND)
    )
    companding.encode_first(first, codes1, scales1, random1, spare)
    companding.encode_second(second, codes2, scales2, random2)


_MOMENT_BUFFERS = {"float32": 0, "bfloat16": 2, "int8": 3}
_SCALE_BUFFERS = 4
"""Of a float32 for each block of an 8 bit moment."""
_UPDATES = {"float32": _float32_slice, "bfloat16": _bfloat16_slice, "int8": _int8_slice}


def scratch_bytes(parameter: Tensor, group: dict[str, Any], *, on_gpu: bool = False) -> int:
    """Return the scratch that updating a parameter needs, the same memory for all of them."""
    buffers = _MOMENT_BUFFERS[group["state"]]
    if parameter.dtype in masters.STREAMS:
        # The gradient, then bits that are rounded; a master that is put together.
        buffers += 2 if group["master"] == "split" else 1
    count = min(SLICE if on_gpu else HOST_PASS, parameter.numel())
    scales = _SCALE_BUFFERS * -(-count // BLOCK) if group["state"] == "int8" else 0
    return 4 * (buffers * count + scales)


def free_scratch() -> None:
    """Free this thread's scratch, which it otherwise keeps for its next update."""
    _local.__dict__.clear()


def _scratch(
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

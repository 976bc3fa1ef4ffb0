"""AdamW's two moments in memory, in one of three formats, and the update that reads them.

| format     | state of a parameter (beside `step`)                                | bytes each |
|------------|---------------------------------------------------------------------|------------|
| `float32`  | `exp_avg`, `exp_avg_sq`                                             | 8          |
| `bfloat16` | the same, in bfloat16, rounded at random                            | 4          |
| `int8`     | the same as int8 codes; `exp_avg_scale`, `exp_avg_sq_scale` a block | 2.0625     |

The arithmetic is float32 always, in torch's fused kernel. Narrow moments, gradients and split
masters pass through float32 scratch part by part, small enough to stay in the processor's cache.
On a CPU the compiled core does all that in one pass (`compiled`). What is here defines its bits,
and does the work where there is no core, and on GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from atomtrain.errors import ConfigError, nearest
from atomtrain.optimizers import companding, masters
from atomtrain.optimizers.companding import BLOCK
from atomtrain.optimizers.masters import UNSCALED, Scaling, narrowed, scratch, wide_buffers, widened

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
SLICE = companding.SLICE
_FIRST, _SECOND = 1, 2
_UPPER_HALF = -(1 << 16)
"""The bits of a float32 that bfloat16 keeps."""
HOST_PASS = 1 << 18
"""Elements that pass through scratch at once on the host; divides `SLICE`. More take more memory
and leave the cache, fewer spend the time on calls. No bit depends on it."""
GPU_SLICES = 4
"""Slices that pass at once on a GPU, where each call counts and memory does too."""
_VECTOR = 16
"""Elements of a float32 vector of any processor, or several."""
Words = tuple[int, int, int, int]
"""Seed, step, first element of a slice, and its salt."""
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
Tensors = tuple[Tensor, ...]


def check_format(name: object) -> None:
    """Raise a `ConfigError` if there is no such format."""
    if name not in _DTYPES:
        raise ConfigError(
            f"state {name!r} is not a format of moments.{nearest(str(name), _DTYPES)} "
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


def check_state(state: dict[str, Any], parameter: Tensor, kind: str) -> None:
    """Raise a `ConfigError` if a loaded state is not of this format, or of another parameter."""
    blocks = -(-parameter.numel() // BLOCK)
    for key, dtype in _DTYPES[kind].items():
        found = getattr(state.get(key), "dtype", None)
        if found is not dtype:
            raise ConfigError(
                f"the optimizer state has {key} as {found}, state={kind!r} needs {dtype}; continue "
                "with the state= that it was saved with"
            )
        check_place(state, key, (blocks,) if key.endswith("_scale") else parameter.shape, parameter)


def check_place(state: dict[str, Any], key: str, shape: Sequence[int], parameter: Tensor) -> None:
    """Raise a `ConfigError` if a tensor of the state is not where an update can write it."""
    found = state[key]
    if found.shape != tuple(shape) or found.device != parameter.device:
        raise ConfigError(
            f"the optimizer state has {key} of shape {list(found.shape)} on {found.device}; this "
            f"parameter needs {list(shape)} on {parameter.device}: continue with its own state"
        )
    if not found.is_contiguous():
        raise ConfigError(
            f"the optimizer state has {key} of shape {list(shape)} that is not contiguous in "
            "memory; make it so with .contiguous()"
        )
    masters.check_aligned(found, f"the optimizer state's {key}")


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
) -> None:
    """Update a parameter and its state by one step of AdamW (Loshchilov and Hutter 2019).

    Args:
        parameter: Contiguous, float32 or the bfloat16 stream of a master; updated in place.
        gradient: Contiguous, of the same shape and device; overwritten if it is clipped.
        state: As of `new_state`, with the master of a bfloat16 parameter; updated in place.
        group: With `lr`, `betas`, `eps`, `weight_decay`, `state` and `seed`; with `master` for
            bfloat16 parameters.
        scaling: What the gradient is multiplied by.
    """
    kind: str = group["state"]
    state["step"] += 1
    if scaling.coefficient is not None:
        gradient.mul_(scaling.coefficient)
    kernel = _kernel(group, _on(parameter.device, state["step"]))
    streamed = parameter.dtype in masters.STREAMS
    if kind == "float32" and not streamed:
        kernel(parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        return
    flat, flat_gradient = parameter.view(-1), gradient.view(-1)
    factor = scaling.factor if streamed else 1.0
    stored = [state[masters.KEYS[group["master"]]].view(-1)] if streamed else []
    begins = range(0, flat.numel(), SLICE)
    # With float32 nothing is rounded at random.
    drawn = [0] * len(begins) if kind == "float32" else salts(flat_gradient, factor)
    if kind != "float32" and flat.device.type == "cpu":
        kernel = _in_whole_vectors(kernel)
    update = _UPDATES[kind]
    slices = slices_at_once(flat.device)
    at_once = pass_elements(on_gpu=slices > 1)
    space = _Space(kind, flat.device)
    words = [
        (group["seed"], int(state["step"]), begin, salt)
        for begin, salt in zip(begins, drawn, strict=True)
    ]
    for first in range(0, len(words), slices):
        part = slice(first * SLICE, (first + slices) * SLICE)
        whole = [flat[part], flat_gradient[part], *(master[part] for master in stored)]
        split = zip(*(tensor.split(at_once) for tensor in whole), strict=True)
        narrow = _moment_passes(state, kind, part, at_once)
        some_words = words[first : first + slices]
        random = _random_passes(kind, len(whole[0]), some_words, flat.device, at_once)
        for (some, narrow_gradient, *master), moments, randoms in zip(
            split, narrow, random, strict=False
        ):
            buffers = space.of(some.numel())
            if not master:
                update(kernel, some, narrow_gradient, moments, randoms, buffers)
                continue
            values, wide = widened(some, narrow_gradient, master[0], factor)
            update(kernel, values, wide, moments, randoms, buffers)
            narrowed(some, master[0], values, wide)


def slices_at_once(device: torch.device) -> int:
    return 1 if device.type == "cpu" else GPU_SLICES


def pass_elements(*, on_gpu: bool) -> int:
    """Return how many elements pass through scratch at once."""
    return GPU_SLICES * SLICE if on_gpu else min(HOST_PASS, SLICE)


def _moment_passes(
    state: dict[str, Any], kind: str, part: slice, at_once: int
) -> Iterator[Tensors]:
    """Return the moments of a slice, part by part; views are cheapest when made many at once."""
    columns = []
    for key in _DTYPES[kind]:
        each = BLOCK if key.endswith("_scale") else 1
        some = state[key].view(-1)[part.start // each : -(-part.stop // each)]
        columns.append(some.split(max(1, at_once // each)))
    return zip(*columns, strict=True)


def _random_passes(
    kind: str, count: int, words: Sequence[Words], device: torch.device, at_once: int
) -> Iterator[Tensors]:
    """Return the random numbers of both moments of some slices, part by part."""
    if kind == "float32":
        return itertools.repeat(())
    draw = companding.offsets if kind == "bfloat16" else companding.fractions
    if kind == "int8":
        count = -(-count // BLOCK) * BLOCK

    def drawn(which: int) -> Tensor:
        counts = (min(SLICE, count - SLICE * index) for index in range(len(words)))
        each = [draw(n, *some, which, device=device) for n, some in zip(counts, words, strict=True)]
        return each[0] if len(each) == 1 else torch.cat(each)

    both = (drawn(which) for which in (_FIRST, _SECOND))
    return zip(*(numbers.split(at_once) for numbers in both), strict=True)


def salts(gradient: Tensor, factor: float, coefficient: Tensor | None = None) -> list[int]:
    """Return the bits of each slice's first gradient, as float32 and multiplied.

    They keep parameters of one size from sharing their random numbers, without naming or numbering
    parameters. A GPU has done all that it was given before the host knows them, so all are asked
    for at once.
    """
    first = gradient[::SLICE]
    first = (first if coefficient is None else first.clone().mul_(coefficient)).float()
    return (first if factor == 1.0 else first * factor).view(torch.int32).tolist()


def starts(seed: int, step: int, drawn: Sequence[int]) -> list[tuple[int, int]]:
    """Return where the random numbers of both moments begin, for each slice.

    Args:
        step: Of the parameter, from 1.
        drawn: What `salts` returned.
    """
    begins = (index * SLICE for index in range(len(drawn)))
    return [
        (companding.start(*words, _FIRST), companding.start(*words, _SECOND))
        for words in ((seed, step, begin, salt) for begin, salt in zip(begins, drawn, strict=True))
    ]


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


def _in_whole_vectors(kernel: Kernel) -> Kernel:
    """Return a kernel whose bits do not depend on how many elements a processor's vectors have.

    Elements that fill no vector are computed in another way. Here they come in a vector filled up.
    """

    def update(*tensors: Tensor) -> None:
        count = tensors[0].numel()
        whole = count - count % _VECTOR
        kernel(*(tensor[:whole] for tensor in tensors))
        if whole == count:
            return
        ends = [pad(tensor[whole:], (0, _VECTOR - count % _VECTOR)) for tensor in tensors]
        kernel(*ends)
        for index in (0, 2, 3):  # all but the gradient
            tensors[index][whole:].copy_(ends[index][: count - whole])

    return update


def _float32_pass(
    kernel: Kernel, values: Tensor, gradient: Tensor, moments: Tensors, *_: Any
) -> None:
    kernel(values, gradient, *moments)


def _bfloat16_pass(
    kernel: Kernel,
    values: Tensor,
    gradient: Tensor,
    moments: Tensors,
    randoms: Tensors,
    scratch: list[Any],
) -> None:
    for narrow, wide in zip(moments, scratch, strict=True):
        wide.copy_(narrow)
    kernel(values, gradient, *scratch)
    for narrow, wide, random in zip(moments, scratch, randoms, strict=True):
        # Less than a unit is added to the magnitude, whatever the sign; then it is cut off.
        wide.view(torch.int32).add_(random).bitwise_and_(_UPPER_HALF)
        narrow.copy_(wide)


def _int8_pass(
    kernel: Kernel,
    values: Tensor,
    gradient: Tensor,
    moments: Tensors,
    randoms: Tensors,
    scratch: list[Any],
) -> None:
    first, second, spare = scratch
    codes1, scales1, codes2, scales2 = moments
    companding.decode_first(codes1, scales1, first, spare)
    companding.decode_second(codes2, scales2, second)
    kernel(values, gradient, first.used, second.used)
    companding.encode_first(first, codes1, scales1, randoms[0], spare)
    companding.encode_second(second, codes2, scales2, randoms[1], spare)


class _Space:
    def __init__(self, kind: str, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._count = 0
        self._scratch: list[Any] = []

    def of(self, count: int) -> list[Any]:
        if count != self._count:
            self._count = count
            whole = -(-count // BLOCK) * BLOCK if self._kind == "int8" else count
            self._scratch = [*scratch(_MOMENT_BUFFERS[self._kind], whole, self._device)]
            if self._kind == "int8":
                self._scratch = [companding.Buffer(memory, count) for memory in self._scratch]
        return self._scratch


_MOMENT_BUFFERS = {"float32": 0, "bfloat16": 2, "int8": 3}
_SCALE_BUFFERS = 4
"""Of a float32 for each block of an 8 bit moment."""
_UPDATES = {"float32": _float32_pass, "bfloat16": _bfloat16_pass, "int8": _int8_pass}


def scratch_bytes(parameter: Tensor, group: dict[str, Any], *, on_gpu: bool = False) -> int:
    """Return the scratch that updating a parameter needs, the same memory for all of them."""
    buffers = _MOMENT_BUFFERS[group["state"]] + wide_buffers(parameter, group["master"])
    count = min(pass_elements(on_gpu=on_gpu), parameter.numel())
    if on_gpu and count > SLICE and group["state"] != "float32":
        buffers += 2  # random numbers of several slices, of either moment
    scales = _SCALE_BUFFERS * -(-count // BLOCK) if group["state"] == "int8" else 0
    return 4 * (buffers * count + scales)

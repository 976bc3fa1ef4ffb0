"""Updates by the compiled core, or by PyTorch where it cannot be had; both give the same bits.

The core does the arithmetic of `moments`, `companding`, `masters` and SGD in one pass over memory.
Gradients may be clipped on the way: the product is rounded to their own type, as `mul_` does.

Before the core is used for a format the first time, it is tried beside PyTorch, also with float32
moments; where a bit differs (another PyTorch may compute otherwise), PyTorch does the work.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atomtrain.native import library
from atomtrain.native.library import address
from atomtrain.optimizers import companding, masters, moments
from atomtrain.optimizers.masters import STREAMS, UNSCALED, Scaling

_LOG = logging.getLogger(__name__)
_TRIED_ELEMENTS = 1 << 10 | 13
"""Some blocks, and an end that fills neither a block nor a vector."""
_TRIED_STEPS = 3
_NARROW = ("bfloat16", "int8")
_GROUP = {
    **{"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "seed": 7},
    **{"momentum": 0.9, "dampening": 0.25, "nesterov": False},
}
Prepare = Callable[[dict[str, Any], Tensor, dict[str, Any]], dict[str, Any]]
"""Called with state, parameter and group; makes and checks the state of a parameter. Returns what
else an update is called with."""
Update = Callable[..., None]
"""Called with parameter, gradient, state, group, scaling, and what `Prepare` said."""


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
) -> None:
    """Do what `moments.adamw_update` does; the gradient is read only. All is on the CPU."""
    kind = group["state"]
    state["step"] += 1
    memory = _memory(parameter, gradient, state, group, scaling)
    memory.moments_kind = library.MOMENTS[kind]
    memory.first, memory.second = address(state["exp_avg"]), address(state["exp_avg_sq"])
    starts, base = list[tuple[int, int]](), 0
    if kind == "int8":
        memory.first_scale = address(state["exp_avg_scale"])
        memory.second_scale = address(state["exp_avg_sq_scale"])
    if kind != "float32":  # only then anything is rounded at random
        salts = moments.salts(gradient.view(-1), memory.factor, scaling.coefficient)
        base = companding.compact(kind).data_ptr()
        starts = moments.starts(group["seed"], int(state["step"]), salts)
    random = (library.Random * len(starts))(
        *(library.Random(base + 2 * one, base + 2 * two) for one, two in starts)
    )
    slices = library.Slices(moments.SLICE, ctypes.addressof(random))
    _run(_core().atom_adamw, memory, _adamw_numbers(group, float(state["step"])), slices)


def sgd_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
    *,
    first: bool,
) -> None:
    """Do what `elementwise.sgd_update` does; the gradient is read only. All is on the CPU."""
    memory = _memory(parameter, gradient, state, group, scaling)
    if group["momentum"]:
        memory.first = address(state["momentum_buffer"])
    numbers = library.SGDNumbers(
        float(group["lr"]),
        group["weight_decay"],
        group["momentum"],
        1 - group["dampening"],
        group["nesterov"],
        first,
    )
    _run(_core().atom_sgd, memory, numbers)


def _core() -> ctypes.CDLL:
    core = library.core()
    assert core is not None
    return core


def _run(kernel: Callable[..., Any], memory: library.Parameter, *others: ctypes.Structure) -> None:
    given = [ctypes.byref(one) for one in (memory, *others)]

    def update(begin: int, end: int) -> None:
        kernel(*given, ctypes.c_int64(begin), ctypes.c_int64(end))

    library.run(update, memory.count, library.BLOCK)


def _memory(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling,
) -> library.Parameter:
    streamed = parameter.dtype in STREAMS
    master = group["master"] if streamed else "float32"
    memory = library.Parameter(
        count=parameter.numel(),
        values_kind=library.VALUES[parameter.dtype, master],
        gradient_kind=library.GRADIENTS[gradient.dtype],
        factor=scaling.factor if streamed else 1.0,
        values=address(parameter),
        gradient=address(gradient),
    )
    if streamed:
        memory.master = address(state[masters.KEYS[master]])
    if scaling.coefficient is not None:
        memory.clipped, memory.coefficient = True, float(scaling.coefficient)
    return memory


def _adamw_numbers(group: dict[str, Any], step: float) -> library.AdamWNumbers:
    """Return the numbers of a step, computed in double and rounded once, as PyTorch does."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return library.AdamWNumbers(
        keep=1 - lr * group["weight_decay"],
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step),
        eps=group["eps"],
        step=lr / (1 - beta1**step),
    )


class Paths:
    """Both ways of one optimizer's update."""

    def __init__(
        self,
        prepare: Prepare,
        torch_update: Update,
        compiled_update: Update,
        kind: str,
        fused: Callable[[dict[str, Any]], bool],
    ) -> None:
        """Take over both ways.

        Args:
            prepare: Of this optimizer.
            torch_update: Of PyTorch operations.
            compiled_update: Of the compiled core.
            kind: What of a group the arithmetic depends on, beside types.
            fused: Returns whether PyTorch's own kernel updates float32 parameters of a group in
                one pass, so that the core is of use only to clip.
        """
        self._prepare = prepare
        self._torch, self._compiled = torch_update, compiled_update
        self._kind, self._fused = kind, fused
        self._equal: dict[tuple[Any, ...], bool] = {}

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        scaling: Scaling,
    ) -> None:
        """Make the state of a parameter if there is none, check it, and update.

        Raises:
            ConfigError: the state is not that of the parameter and the group.
        """
        more = self._prepare(state, parameter, group)
        update = self.choose(parameter, gradient, group, scaling)
        update(parameter, gradient, state, group, scaling, **more)

    def check(self, state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
        """Do what `update` does before it writes; what is missing stays missing.

        Raises:
            ConfigError: the state is not that of the parameter and the group.
        """
        self._prepare(dict(state), parameter, group)

    def choose(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], scaling: Scaling
    ) -> Update:
        alone = parameter.dtype is torch.float32 and self._fused(group)
        if alone and scaling.coefficient is None:
            return self._torch
        use = self.compiled_for(parameter, gradient.dtype, group)
        return self._compiled if use else self._torch

    def name(self, parameter: Tensor, group: dict[str, Any], scaling: Scaling) -> str:
        """Return the name of what `choose` returns: `compiled` or `torch`."""
        gradient = parameter if parameter.grad is None else parameter.grad
        chosen = self.choose(parameter, gradient, group, scaling)
        return "compiled" if chosen is self._compiled else "torch"

    def compiled_for(
        self, parameter: Tensor, gradient_dtype: torch.dtype, group: dict[str, Any]
    ) -> bool:
        """Return whether the core can update a parameter, and gives the bits of PyTorch."""
        if parameter.device.type not in ("cpu", "meta") or library.core() is None:
            return False
        master = group["master"] if parameter.dtype in STREAMS else None
        kind = (parameter.dtype, master, gradient_dtype, group[self._kind])
        if kind not in self._equal:
            # Noted first: a second thread that comes meanwhile takes PyTorch's way, which is right.
            self._equal[kind] = False
            # Narrow moments are rounded so far that other bits seldom show; in float32 each does.
            plain = (*kind[:3], "float32") if kind[3] in _NARROW else kind
            self._equal[kind] = self._try(*plain) and (plain == kind or self._try(*kind))
            if not self._equal[kind]:
                _LOG.warning(
                    "updates of %s parameters with %s %s run on PyTorch, which is slower: the "
                    "compiled core gives other bits than this PyTorch (%s)",
                    *(parameter.dtype, kind[3], self._kind, torch.__version__),
                )
        return self._equal[kind]

    def _try(
        self, dtype: torch.dtype, master: str | None, gradient_dtype: torch.dtype, kind: object
    ) -> bool:
        group = {**_GROUP, self._kind: kind, "master": master}
        drawn = torch.Generator().manual_seed(1)
        start = torch.randn(_TRIED_ELEMENTS, generator=drawn)
        scaling = Scaling(0.5, torch.tensor(0.7))
        ends: list[list[Tensor]] = []
        gradients = [
            _with_extremes(torch.randn(_TRIED_ELEMENTS, generator=drawn)).to(gradient_dtype)
            for _ in range(_TRIED_STEPS)
        ]
        for update in (self._torch, self._compiled):
            parameter = start.to(dtype, copy=True)
            state: dict[str, Any] = {}
            for gradient in gradients:
                more = self._prepare(state, parameter, group)
                update(parameter, gradient.clone(), state, group, scaling, **more)
            ends.append([parameter, *(state[key] for key in sorted(state))])
        return all(same_bits(one, other) for one, other in zip(*ends, strict=True))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same bits; all NaN are one."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_floating_point():
        nan = left.isnan()
        if not torch.equal(nan, right.isnan()):
            return False
        left, right = left.masked_fill(nan, 0), right.masked_fill(nan, 0)
    pair = (t.contiguous().view(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(*pair)


def _with_extremes(values: Tensor) -> Tensor:
    """Return gradients of all magnitudes, a block of zeros, and blocks with what is not finite."""
    values = values * 10.0 ** torch.linspace(-20, 2, values.numel())
    values[128:256] = 0
    values[300], values[400], values[-1] = torch.inf, torch.nan, -torch.inf
    return values

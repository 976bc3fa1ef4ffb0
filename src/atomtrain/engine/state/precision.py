"""Computing in 16 bits with exact float32 masters in the optimizer's state.

With `precision="bf16"` the model's parameters become bfloat16 (with `"fp16"` float16): what the
arena holds, the link carries and the device computes with. They are the *streams* of float32
masters, which the optimizer keeps and updates; after each update it writes the stream from the
master. So everything between arena and device stays as it is for a model that is bfloat16 by
itself.

**Loss scaling.** Float16 has no numbers below 6e-8, so small gradients would become zero. So they
are computed from a loss that is multiplied by a scale, a power of two, so that dividing by it is
exact. If a gradient overflows, the step is skipped as if it had not been and the scale is halved;
after many good steps in a row it is doubled (Micikevicius et al. 2018, arXiv 1710.03740, section
3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.limits import Limit
from atomtrain.engine.devices.host_memory import give_back
from atomtrain.errors import ConfigError, nearest

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type that is computed in, by name."""
Part = Literal["values", "moments"]
"""Parameters and masters, or the rest of the optimizer's state."""
Wrote = Callable[[nn.Parameter, Part], None]
Workers = Callable[[nn.Parameter], torch.optim.Optimizer | None]
"""Gives the optimizer that updates a parameter, `None` for one that is never updated."""
Present = Callable[[nn.Parameter, Collection[str] | None, bool], AbstractContextManager[None]]
"""Has a parameter's state in memory meanwhile, where part of it lies on disk."""
_LEAST, _MOST = 2.0**-24, 2.0**60
_KEYS = ("scale", "good_steps", "skipped_steps")


def _in_memory(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


@runtime_checkable
class KeepsMasters(Protocol):
    """An optimizer that updates float32 masters of bfloat16 parameters."""

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the master as float32: the memory itself, or a copy."""
        ...

    def set_master(self, parameter: Tensor, values: Tensor) -> None:
        """Set master and parameter; the optimizer may keep the memory of `values`."""
        ...

    def master_keys(self) -> frozenset[str]:
        """Return the keys of a parameter's state that are its master."""
        ...


class Narrowed:
    """A model whose parameters were made bfloat16, with what they were before."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        """Make parameters and saved buffers of `model` 16 bits wide, in place.

        Buffers that are not saved (tables that the model computes, such as rotary frequencies) stay
        as they are, as in a model that is loaded with `dtype=bfloat16`.

        Raises:
            ConfigError: a parameter is neither float32 nor of that type; nothing is changed.
        """
        narrow = PRECISIONS[precision]
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype not in (torch.float32, narrow):
                raise ConfigError(
                    f"precision={precision!r} takes models of float32 or "
                    f"{str(narrow).removeprefix('torch.')}, {name!r} is "
                    f"{parameter.dtype}; convert the model with model.float()"
                )
        self._parameters = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
        self._buffers = [(buffer, buffer.data) for buffer in _saved_buffers(model)]
        for tensor, data in (*self._parameters, *self._buffers):
            tensor.grad = None
            tensor.data = data.to(narrow)

    def give_masters(self, masters: Masters) -> None:
        """Hand what the parameters that are updated were before to the optimizer; call once.

        Raises:
            ConfigError: the optimizer keeps no masters.
        """
        updated = [(p, data) for p, data in self._parameters if masters.requires(p)]
        self._parameters.clear()
        self._buffers.clear()
        while updated:  # what is not kept goes one by one, so that memory falls steadily
            parameter, data = updated.pop()
            masters.adopt(parameter, _own(data))
        give_back()

    def restore(self) -> None:
        """Give the model back what it had, unless that was handed over."""
        for tensor, data in (*self._parameters, *self._buffers):
            tensor.data = data


class Masters:
    """The values of parameters: their own, or those of their masters in the optimizer's state."""

    def __init__(
        self, worker_of: Workers, present: Present | None = None, wrote: Wrote | None = None
    ) -> None:
        """`wrote` hears of every parameter that is written to, and which part of it."""
        self._worker_of, self._present = worker_of, present or _in_memory
        self._wrote = wrote or (lambda *_: None)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is the stream of a master."""
        return self._keeper(parameter) is not None

    def requires(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter of 16 bits needs a master: whether it is ever updated.

        Raises:
            ConfigError: it needs one, but its optimizer keeps none.
        """
        worker = self._worker_of(parameter)
        if worker is not None and not self.has(parameter):
            raise ConfigError(
                "computing in 16 bits needs an optimizer that keeps float32 masters, "
                f"{type(worker).__name__} does not; use AdamW, Muon or SGD of "
                "atomtrain.optimizers"
            )
        return worker is not None

    def adopt(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a master for the first time; `values` belong to the optimizer from then on."""
        keeper = self._keeper(parameter)
        assert keeper is not None
        with self._present(parameter, keeper.master_keys(), True):
            keeper.set_master(parameter, values)
        self._wrote(parameter, "values")

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the values; float32 of a master (shared memory, or a copy), else as they are."""
        keeper = self._keeper(parameter)
        if keeper is None:
            return parameter.detach()
        with self._present(parameter, keeper.master_keys(), False):
            return keeper.master_of(parameter)

    def write(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the values, exactly if there is a master; `values` stay the caller's."""
        keeper = self._keeper(parameter)
        if keeper is None:
            parameter.data.copy_(values)
        else:
            own = values.to(torch.float32, copy=True).contiguous()
            with self._present(parameter, keeper.master_keys(), True):
                keeper.set_master(parameter, own)
        self._wrote(parameter, "values")

    def hold(self, limits: Iterable[Limit]) -> None:
        """Hold parameters within limits, as the model's own forward would."""
        for parameter, least, most in limits:
            values = self.read(parameter)
            held = values.clamp(least, most)
            if not torch.equal(held, values):
                self.write(parameter, held)

    def moments(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state without the master; shares memory, or copies what is on
        disk."""
        keeper, worker = self._keeper(parameter), self._worker_of(parameter)
        hidden = frozenset() if keeper is None else keeper.master_keys()
        with self._present(parameter, None, False):
            state = {} if worker is None else worker.state.get(parameter, {})
            return {key: value for key, value in state.items() if key not in hidden}

    def set_moments(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state but for the master."""
        keeper, worker = self._keeper(parameter), self._worker_of(parameter)
        if worker is None:
            return
        hidden = frozenset() if keeper is None else keeper.master_keys()
        with self._present(parameter, None, True):
            before = worker.state.get(parameter, {})
            kept = {key: value for key, value in before.items() if key in hidden}
            worker.state[parameter] = {**kept, **state}
        self._wrote(parameter, "moments")

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's whole state, the master as the optimizer keeps it included; shares
        memory, or copies what is on disk."""
        worker = self._worker_of(parameter)
        with self._present(parameter, None, False):
            return {} if worker is None else dict(worker.state.get(parameter, {}))

    def set_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's whole state; a master stays if `state` has none."""
        keeper = self._keeper(parameter)
        hidden = frozenset() if keeper is None else keeper.master_keys()
        master = {key: value for key, value in state.items() if key in hidden}
        self.set_moments(parameter, state)
        if master:
            self._wrote(parameter, "values")

    def _keeper(self, parameter: nn.Parameter) -> KeepsMasters | None:
        if parameter.dtype not in PRECISIONS.values():
            return None
        worker = self._worker_of(parameter)
        return worker if isinstance(worker, KeepsMasters) else None


def check_precision(precision: object) -> None:
    """Raise a `ConfigError` if it is none that a model can be swapped with."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(
            f"precision must be 'bf16' or 'fp16', or None for the model's own type, not "
            f"{precision!r}"
        )


def _own(data: Tensor) -> Tensor:
    """Return values as float32 in memory that holds nothing else: the same, if it is so."""
    values = data.float().contiguous()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _saved_buffers(model: nn.Module) -> list[Tensor]:
    unique: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            saved = name not in module._non_persistent_buffers_set
            if saved and buffer.dtype is torch.float32:
                unique[id(buffer)] = buffer
    return list(unique.values())


class LossScale:
    """The scale and what it depends on; `decide` is told the outcome of every step."""

    def __init__(self, scale: float, steps_to_double: int) -> None:
        check_scale(scale, steps_to_double)
        self.scale = float(scale)
        self.good_steps = 0
        """Steps since the scale was changed or a step was skipped."""
        self.skipped_steps = 0
        self._steps_to_double = steps_to_double

    def decide(self, finite: bool) -> None:
        """Take note of a step whose gradients were all finite, or not."""
        if not finite:
            self.scale = max(self.scale / 2, _LEAST)
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self._steps_to_double:
            self.scale = min(self.scale * 2, _MOST)
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """Return what to save, as plain JSON values."""
        return {key: getattr(self, key) for key in _KEYS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` says.

        Raises:
            ConfigError: it is not what `state` returned.
        """
        for key in state:
            if key not in _KEYS:
                raise ConfigError(f"the loss scale has no {key!r}.{nearest(key, _KEYS)}")
        if missing := [key for key in _KEYS if key not in state]:
            raise ConfigError(f"the state of the loss scale lacks {missing[0]!r}")
        check_scale(state["scale"], 1)
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])


def check_scale(scale: float, steps_to_double: int) -> None:
    """Raise a `ConfigError` if loss scaling cannot begin so."""
    if not _LEAST <= scale <= _MOST or math.frexp(scale)[0] != 0.5:
        raise ConfigError(f"loss_scale must be a power of two, such as 65536, not {scale}")
    if steps_to_double < 1:
        raise ConfigError(f"loss_scale_steps must be at least 1, not {steps_to_double}")

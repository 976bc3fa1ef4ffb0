"""How long the optimizer that is to be used takes on this host, measured once and remembered.

The planner counts updates in parameters of a fused float32 AdamW, whose rate is part of a machine.
So what is measured is a share: an update of a probe by the very optimizer, class and options, by
one of as many parameters by that AdamW. Both take turns, so a busy moment counts for both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.calibration.probes import (
    adamw_parameters,
    adamw_step,
    timed_through,
    uncached_bytes,
)
from atomtrain.engine.calibration.profile_cache import ProfileCache, profile_folder
from atomtrain.engine.devices.streams import Stream
from atomtrain.engine.state.gradients import accept_wide
from atomtrain.engine.updates.optimizer import (
    KnowsItsProducts,
    KnowsItsState,
    copied,
    tell_scaling,
)
from atomtrain.planning.plan.updating import ParameterUpdate, UpdateModel

_COLUMNS = 1024
"""Of a probe; with as many rows as make it more than caches hold."""
_MOST_FLOPS = 6.5e9
"""Of the products in an update that is measured; a larger matrix is measured smaller, but so that
it is multiplied in the same way (`Muon` up to 1 by 8)."""
_COEFFICIENT = 0.75
"""By which gradients are clipped: exact in every type."""
_RANDOM = 1 << 16
"""Random numbers in a probe; they come again and again."""
_REPEATS, _PRODUCT_REPEATS = 3, 2
_logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What the time of an update depends on."""

    optimizer: type[torch.optim.Optimizer]
    group: Mapping[str, Any]
    """Options of the parameter's group."""
    dtype: torch.dtype
    gradient_factor: int
    """Bytes of a gradient over those of its parameter."""
    shape: tuple[int, ...]
    """Of the probe."""
    flops: int
    """Of matrix products in the probe's update."""
    clips: bool
    """Whether gradients are multiplied by a coefficient on the way."""

    @property
    def key(self) -> str:
        """A name for it, the same in every process."""
        options = [(k, _said(value)) for k, value in sorted(self.group.items()) if k != "seed"]
        kind = self.optimizer
        said = (kind.__module__, kind.__qualname__, options, str(self.dtype), *self[3:])
        return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def _said(value: Any) -> str:
    """Return what matters of an option: of numbers, whether they are 0."""
    if isinstance(value, str | bool) or value is None:
        return repr(value)
    return str(value != 0) if isinstance(value, int | float) else type(value).__name__


def measured_updates(
    model: UpdateModel,
    optimizer: torch.optim.Optimizer,
    chain: Chain,
    machine: Mapping[str, Any],
    *,
    one_processor: bool,
    clips: bool,
    folder: Path | None = None,
) -> UpdateModel:
    """Return what an optimizer takes, its time measured on this host or found in the cache.

    Args:
        model: What it takes by what it moves and multiplies.
        optimizer: Of all parameters, which may be on the meta device; it is not changed.
        chain: The model.
        machine: Of `machine_key`.
        one_processor: Whether the device computes on the host's processor: then an update takes
            there what it takes here. A GPU's time stays an estimate.
        clips: Whether steps clip their gradients.
        folder: Of the cache; `None` is the user's.
    """
    cache = ProfileCache(folder or profile_folder(), machine)
    kinds: dict[int, tuple[Kind, float]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds[id(parameter)] = _kind_of(
                optimizer, group, parameter, chain.gradient_factor, clips=clips
            )
    wanted = {kind.key: kind for kind, _ in kinds.values()}
    if any(cache.update(key) is None for key in wanted):
        with cache.turn():
            cache.reload()
            unit = adamw_step(adamw_parameters())
            for key, kind in wanted.items():
                if cache.update(key) is None:
                    share = _measured(optimizer, kind, unit)
                    if share is not None:
                        cache.put_update(key, share)
            cache.save()

    def timed(key: int, one: ParameterUpdate) -> ParameterUpdate:
        kind, probes = kinds[key]
        share = cache.update(kind.key)
        if share is None:
            return one
        host_work = share * probes * math.prod(kind.shape)
        return one._replace(
            host_work=host_work, device_work=host_work if one_processor else one.device_work
        )

    return dataclasses.replace(
        model, parameters={key: timed(key, one) for key, one in model.parameters.items()}
    )


def _kind_of(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    factor: int,
    *,
    clips: bool,
) -> tuple[Kind, float]:
    """Return what the time of a parameter's update depends on, and how many probes it takes."""
    options = {name: value for name, value in group.items() if name != "params"}
    flops = optimizer.flops_of(parameter) if isinstance(optimizer, KnowsItsProducts) else 0
    dtype = parameter.dtype
    wide = factor if parameter.element_size() == 2 else 1
    if not flops:
        # Of the largest, so that all of a group have the same probe.
        held_bytes = _held_bytes(optimizer, max(group["params"], key=Tensor.numel), wide)
        rows = max(1, math.ceil(uncached_bytes() / held_bytes / _COLUMNS))
        shape = (rows, _COLUMNS) if parameter.ndim >= 2 else (rows * _COLUMNS,)
        probes = parameter.numel() / math.prod(shape)
        return Kind(type(optimizer), options, dtype, wide, shape, 0, clips), probes
    # Products grow with the cube of both sides: what is smaller by that is of the same form.
    shrink = min(1.0, (_MOST_FLOPS / flops) ** (1 / 3))
    shape = tuple(max(1, round(shrink * size)) for size in parameter.shape)
    kind = Kind(type(optimizer), options, dtype, wide, shape, round(shrink**3 * flops), clips)
    return kind, shrink**-3


def _held_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor, wide: int) -> float:
    """Return the bytes that a parameter's update goes through, for each of its elements.

    Of an optimizer that does not tell its state, parameter and gradient only: then a probe is
    larger than it must be.
    """
    state = optimizer.state_bytes_of(parameter) if isinstance(optimizer, KnowsItsState) else 0
    return (1 + wide) * parameter.element_size() + state / max(1, parameter.numel())


def _measured(
    optimizer: torch.optim.Optimizer, kind: Kind, unit: Callable[[], None]
) -> float | None:
    """Return the AdamW parameters that updating one of the probe's takes; `None` if it fails."""
    if _is_the_unit(kind):
        return 1.0
    stream = Stream("probe")
    try:
        with torch.random.fork_rng([]):
            step = _step(optimizer, kind)
            seconds = []
            for _ in range(1 + (_PRODUCT_REPEATS if kind.flops else _REPEATS)):
                seconds.append((timed_through(stream, step), timed_through(stream, unit)))
        # The first ones make the state.
        taken_s, unit_s = (statistics.median(of) for of in zip(*seconds[1:], strict=True))
        share: float = (taken_s / math.prod(kind.shape)) / (unit_s / adamw_parameters())
        return share
    except Exception as error:  # noqa: BLE001  whatever a foreign optimizer raises
        _logger.warning(
            "updates by %s cannot be measured (%s); their time is estimated",
            kind.optimizer.__name__,
            error,
        )
        return None
    finally:
        stream.close()


def _is_the_unit(kind: Kind) -> bool:
    """Return whether the kind is what machines are rated by."""
    fused = kind.group.get("fused") and not kind.group.get("amsgrad")
    alone = bool(fused) and not kind.clips and kind.dtype is torch.float32
    return kind.optimizer is torch.optim.AdamW and alone


def _step(optimizer: torch.optim.Optimizer, kind: Kind) -> Callable[[], None]:
    """Return an update of a probe, by an optimizer of the same class and options for it alone."""
    random = torch.Generator().manual_seed(0)
    probe = torch.nn.Parameter(_values(kind.shape, random).to(kind.dtype))
    accept_wide(probe, kind.gradient_factor)
    gradient = _values(kind.shape, random)
    probe.grad = gradient if kind.gradient_factor > 1 else gradient.to(kind.dtype)
    worker = copied(optimizer, [{**kind.group, "params": [probe]}])
    # Hooks are the caller's, and of his own steps.
    worker._optimizer_step_pre_hooks = OrderedDict()
    worker._optimizer_step_post_hooks = OrderedDict()
    coefficient = torch.tensor(_COEFFICIENT) if kind.clips else None
    rewrite = tell_scaling(worker, 1.0, coefficient)

    def step() -> None:
        if rewrite is not None and probe.grad is not None:  # as the engine does for it
            probe.grad.mul_(rewrite)
        worker.step()

    return step


def _values(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return float32 values of a shape; drawing each would take longer than measuring."""
    count = math.prod(shape)
    drawn = torch.randn(min(count, _RANDOM), generator=random)
    return drawn.repeat(-(-count // drawn.numel()))[:count].view(shape)

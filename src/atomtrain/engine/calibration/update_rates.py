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
from atomtrain.engine.calibration.probes import PARAMETERS, adamw_step, timed_through
from atomtrain.engine.calibration.profile_cache import ProfileCache, profile_folder
from atomtrain.engine.devices.streams import Stream
from atomtrain.engine.state.gradients import accept_wide
from atomtrain.engine.updates.optimizer import KnowsItsProducts
from atomtrain.planning.plan.updating import ParameterUpdate, UpdateModel

_MATRIX = (2048, 1024)
"""As many parameters as those by which a machine's AdamW is measured: more than caches hold."""
_MOST_FLOPS = 2e9
"""Of the products in an update that is measured; a larger matrix is measured smaller."""
_REPEATS = 5
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
        folder: Of the cache; `None` is the user's.
    """
    cache = ProfileCache(folder or profile_folder(), machine)
    kinds: dict[int, tuple[Kind, float]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds[id(parameter)] = _kind_of(optimizer, group, parameter, chain.gradient_factor)
    wanted = {kind.key: kind for kind, _ in kinds.values()}
    if any(cache.update(key) is None for key in wanted):
        with cache.turn():
            cache.reload()
            for key, kind in wanted.items():
                if cache.update(key) is None and (share := _measured(optimizer, kind)) is not None:
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
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, factor: int
) -> tuple[Kind, float]:
    """Return what the time of a parameter's update depends on, and how many probes it takes."""
    options = {name: value for name, value in group.items() if name != "params"}
    flops = optimizer.flops_of(parameter) if isinstance(optimizer, KnowsItsProducts) else 0
    dtype = parameter.dtype
    wide = factor if parameter.element_size() == 2 else 1
    if not flops:
        shape = _MATRIX if parameter.ndim >= 2 else (math.prod(_MATRIX),)
        probes = parameter.numel() / math.prod(shape)
        return Kind(type(optimizer), options, dtype, wide, shape, 0), probes
    # Products grow with the cube of both sides: what is smaller by that is of the same form.
    shrink = min(1.0, (_MOST_FLOPS / flops) ** (1 / 3))
    shape = tuple(max(1, round(shrink * size)) for size in parameter.shape)
    kind = Kind(type(optimizer), options, dtype, wide, shape, round(shrink**3 * flops))
    return kind, shrink**-3


def _measured(optimizer: torch.optim.Optimizer, kind: Kind) -> float | None:
    """Return the AdamW parameters that updating one of the probe's takes; `None` if it fails."""
    if _is_the_unit(kind):
        return 1.0
    stream = Stream("probe")
    try:
        with torch.random.fork_rng([]):
            step, unit = _step(optimizer, kind), adamw_step()
            seconds = []
            for _ in range(1 + _REPEATS):
                seconds.append((timed_through(stream, step), timed_through(stream, unit)))
        # The first ones make the state.
        taken_s, unit_s = (statistics.median(of) for of in zip(*seconds[1:], strict=True))
        share: float = (taken_s / math.prod(kind.shape)) / (unit_s / PARAMETERS)
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
    return kind.optimizer is torch.optim.AdamW and bool(fused) and kind.dtype is torch.float32


def _step(optimizer: torch.optim.Optimizer, kind: Kind) -> Callable[[], None]:
    """Return an update of a probe, by an optimizer of the same class and options for it alone."""
    random = torch.Generator().manual_seed(0)
    probe = torch.nn.Parameter(torch.randn(kind.shape, generator=random).to(kind.dtype))
    accept_wide(probe, kind.gradient_factor)
    gradient = torch.randn(kind.shape, generator=random)
    probe.grad = gradient if kind.gradient_factor > 1 else gradient.to(kind.dtype)
    worker = optimizer.__class__.__new__(optimizer.__class__)
    worker.__dict__.update(optimizer.__dict__)
    worker.param_groups = [{**kind.group, "params": [probe]}]
    worker.state = type(optimizer.state)(dict)
    # Hooks are the caller's, and of his own steps.
    worker._optimizer_step_pre_hooks = OrderedDict()
    worker._optimizer_step_post_hooks = OrderedDict()

    def step() -> None:
        worker.step()

    return step

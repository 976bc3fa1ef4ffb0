"""Whether layers run compiled: as was chosen or, with `auto`, if that is faster in the profile.

With `auto` each kind of layer is measured as it is and compiled, for one micro-batch. All layers
of the model together decide, since one that is compiled takes others' shorter ways from them:
without any, segments run by operations that are listed once, and what is offloaded is made again
where that is quicker. So the gain must be more than the noise of measurements.

The ratio is kept in the profile's cache, or why compiling failed: as long as it is there, later
runs choose the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.calibration.profile_cache import (
    ProfileCache,
    chain_key,
    machine_key,
    profile_folder,
)
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.device_names import GPU_KINDS
from atomtrain.engine.execution.compiled import CompiledLayer, require_compilable
from atomtrain.errors import AtomError, ConfigError, PlanError, reason_of
from atomtrain.progress import Progress

LEAST_SPEED_RATIO = 1.05
"""By which compiled layers must compute faster: what less is may be noise."""
TRIED_ON = frozenset(GPU_KINDS)
"""Types of devices on which `auto` tries to compile. On a processor it takes half a minute, and the
bits would no more be those of an ordinary loop."""
_NO_MEMORY = (PlanError, MemoryError, torch.OutOfMemoryError)
"""Other programs may leave more the next time."""
_AT_AN_EARLIER_START = "at an earlier start; --profile-again tries anew"
_logger = logging.getLogger(__name__)


class CompileChoice(NamedTuple):
    """Whether layers run compiled, and why."""

    compiled: bool
    why: str

    def __str__(self) -> str:
        return f"{'compiled' if self.compiled else 'not compiled'}: {self.why}"


class Profiled(NamedTuple):
    """Layers in one of the two ways, and what is known of them."""

    chain: Chain
    costs: ChainCosts
    profile: Profile


def choice_of(
    wanted: bool | Literal["auto"],
    devices: Sequence[Device],
    *,
    deterministic: bool,
    images_grow: bool,
    profile: bool | Literal["again"],
) -> CompileChoice | None:
    """Return what is chosen without a measurement; `None`: `auto` is to try both ways.

    Args:
        wanted: Whether to compile.
        devices: That train.
        deterministic: Whether each run shall have the same bits.
        images_grow: Whether images may become larger than the example's: what is compiled takes
            none that are.
        profile: Whether there is one.
    """
    if wanted != "auto":
        return CompileChoice(wanted, "as chosen")
    if devices[0].torch_device.type not in TRIED_ON:
        return CompileChoice(False, "auto compiles for GPUs only")
    if len(devices) > 1:  # for the others compiling would begin, and might fail, in a step
        return CompileChoice(False, "auto compiles for one GPU only; --compile on does for several")
    if deterministic:
        return CompileChoice(False, "auto leaves layers as they are in deterministic runs")
    if images_grow:
        return CompileChoice(False, "auto leaves layers as they are where images may become larger")
    if not profile:
        return CompileChoice(False, "auto compiles by what a profile shows, and none is made")
    return None


def faster_of(
    plain: Profiled,
    compile_all: Callable[[], Profiled],
    device: Device,
    folder: Path | None = None,
) -> tuple[Profiled, CompileChoice]:
    """Return the layers in the way that is faster in the profile.

    Nothing is compiled if the cache knows that it is not worth it, or fails. Where it fails, layers
    stay as they are, and the choice and the log say why. What lacks a compiler, or memory, is tried
    again at the next start.

    Args:
        plain: The layers as they are.
        compile_all: Compiles and measures them; may raise anything.
        device: Idle.
        folder: Of the cache; `None` is the user's.
    """
    cache = ProfileCache(folder or profile_folder(), machine_key(device))
    key = chain_key(plain.chain, plain.costs)
    ratio, failure = cache.speed_ratio(key), cache.compile_failure(key)
    if failure is not None:
        return plain, CompileChoice(False, f"{failure} ({_AT_AN_EARLIER_START})")
    if ratio is not None and ratio < LEAST_SPEED_RATIO:
        return plain, _by_ratio(ratio)
    try:
        require_compilable(device)
    except ConfigError as error:
        return plain, _failed(error)
    try:
        with Progress("compiling the model's layers"):
            found = compile_all()
    except Exception as error:  # noqa: BLE001 (a compiler may raise anything, and none is needed)
        device.trim()
        choice = _failed(error)
        if not isinstance(error, _NO_MEMORY):
            with _changed(cache):
                cache.put_compile_failure(key, choice.why)
        return plain, choice
    if not any(isinstance(layer, CompiledLayer) for layer in found.chain.layers):
        return plain, CompileChoice(False, "no layer of the model can be")
    if ratio is None:
        ratio = compute_s(plain.costs, plain.profile.times) / compute_s(
            found.costs, found.profile.times
        )
        with _changed(cache):
            cache.put_speed_ratio(key, ratio)
    choice = _by_ratio(ratio)
    return (found if choice.compiled else plain), choice


def compute_s(costs: ChainCosts, times: Mapping[str, LayerTime]) -> float:
    """Return the seconds of all layers for one micro-batch: forward alone, then with backward."""
    return sum(times[cost.kind].forward_s + times[cost.kind].backward_s for cost in costs.layers)


def _failed(error: Exception) -> CompileChoice:
    name = "" if isinstance(error, AtomError) else f"{type(error).__name__}: "
    choice = CompileChoice(False, f"{name}{reason_of(error)}")
    _logger.warning("%s", choice)
    return choice


@contextmanager
def _changed(cache: ProfileCache) -> Iterator[None]:
    """Change what the cache has by now."""
    with cache.turn():
        cache.reload()
        yield
        cache.save()


def _by_ratio(ratio: float) -> CompileChoice:
    taken = ratio >= LEAST_SPEED_RATIO
    less = "" if taken else f", less than {LEAST_SPEED_RATIO:.2f}"
    return CompileChoice(taken, f"{ratio:.2f} times as fast in the profile{less}")

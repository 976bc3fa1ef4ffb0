"""What would do, where nothing fits: the least catalogue GPU and host, found by planning again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from atomtrain.errors import PlanError
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import DEVICE_MEMORY_SHARE, GPUS
from atomtrain.planning.plan.disk import kinds_for
from atomtrain.planning.search.batch_search import Prospect

_ENDLESS_BYTES = 1 << 59
_GIB = 1 << 30
_MOST_NAMED = 4
_LEAN_BYTES = 9
"""Of host memory a parameter: what bfloat16 parameters with 8-bit moments take, and a little."""


class Fitting(NamedTuple):
    """A machine that a model fits."""

    device_memory_bytes: int
    """The given budget, or the least of a GPU in the catalogue."""
    host_bytes: int
    """That the least plan takes: one micro-batch a device, nothing offloaded unless asked for."""
    cards: tuple[str, ...]
    """Names of the GPUs that do, by memory."""
    host_bytes_per_parameter: float


def least_fitting(setting: Setting, forecast: Callable[[Setting], Prospect]) -> Fitting | None:
    """Return the least device and host memory that would do; `None` if no GPU is large enough."""
    budgets = {int(DEVICE_MEMORY_SHARE * card.memory_bytes) for card in GPUS.values()}
    given = setting.machine.device_memory_bytes
    asked = setting.workload
    # The fastest plan would spend host memory on offloaded activations and waiting values.
    workload = dataclasses.replace(
        asked,
        micro_batch=asked.micro_batch or 1,
        tokens_per_step=asked.tokens_per_step or asked.devices * asked.context_tokens,
        activations=asked.activations or "recompute",
        on_disk=kinds_for(asked.devices)[-1] if asked.disk else None,
    )
    for budget in sorted({given, *(b for b in budgets if b > given)}):
        machine = dataclasses.replace(
            setting.machine, device_memory_bytes=budget, host_memory_bytes=_ENDLESS_BYTES
        )
        try:
            found = forecast(dataclasses.replace(setting, machine=machine, workload=workload))
        except PlanError:
            continue
        cards = sorted(GPUS.values(), key=lambda card: card.memory_bytes)
        names = [c.name for c in cards if DEVICE_MEMORY_SHARE * c.memory_bytes >= budget]
        host_bytes, parameters = found.plan.host_bytes, found.analysis.parameters
        return Fitting(budget, host_bytes, tuple(names), host_bytes / parameters)
    return None


def explained(error: PlanError, setting: Setting, fitting: Fitting | None) -> PlanError:
    """Return the planner's error with what would do."""
    if fitting is None:
        return PlanError(f"{error}; no GPU of the catalogue has memory enough for this micro-batch")
    advice = []
    if fitting.device_memory_bytes > setting.machine.device_memory_bytes:
        names = ", ".join(fitting.cards[:_MOST_NAMED])
        more = " and larger ones" if len(fitting.cards) > _MOST_NAMED else ""
        advice.append(f"GPUs with memory enough: {names}{more}")
    if fitting.host_bytes > setting.machine.host_memory_bytes:
        least = -(-fitting.host_bytes // _GIB)
        advice.append(f"raise --host-memory to at least {least}GiB")
        halved = setting.dtype in ("bf16", "fp16")
        if not halved or fitting.host_bytes_per_parameter > _LEAN_BYTES:
            advice.append(
                "or hold fewer bytes of each parameter: --precision bf16 with --optimizer "
                "adamw-split (14), adamw-bfloat16-split (10) or adamw-int8 (8)"
            )
    if not advice:
        return error
    return PlanError(f"{error}; {'; '.join(advice)}")

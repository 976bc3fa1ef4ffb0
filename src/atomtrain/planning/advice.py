"""What to change to train faster: one thing is changed at a time, and really planned again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atomtrain.errors import PlanError
from atomtrain.planning.catalogue import GPUS, Gpu, machine_for
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.search.batch_search import Prospect, Workload
from atomtrain.units import format_bytes

WORTH_SAYING = 1.02
"""Changes that help less are not told: predictions are hardly better than that."""
_NEWEST_PCIE = 5
_DOUBLE = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    machine: Machine
    workload: Workload
    card: Gpu | None = None
    """Whose compute times count; `None` is the machine at hand."""
    dtype: str = "fp32"
    """Of the matrix products: `fp32` or `tf32`."""


@dataclass(frozen=True, kw_only=True)
class Change:
    text: str
    setting: Setting


@dataclass(frozen=True, kw_only=True)
class Advice:
    text: str
    speed_ratio: float
    """Tokens per second, changed to unchanged."""
    tokens_per_s: float
    tokens_per_step: int
    step_s: float
    bound: str
    """What bounds the changed plan."""


Replan = Callable[[Setting, float], Prospect]
"""Gives the best plan in a setting; slower ones than so many tokens a second need not be found."""


def advice(now: Prospect, changes: Sequence[Change], replan: Replan) -> tuple[Advice, ...]:
    """Return the changes that help by more than 2%, the best first.

    A pure function of its arguments. Changes under which nothing fits are left out; for those
    that do not help no whole plan is made.
    """
    found = []
    for change in changes:
        try:
            then = replan(change.setting, WORTH_SAYING * now.tokens_per_s)
        except PlanError:
            continue
        ratio = then.tokens_per_s / now.tokens_per_s
        if ratio > WORTH_SAYING:
            found.append(
                Advice(
                    text=change.text,
                    speed_ratio=ratio,
                    tokens_per_s=then.tokens_per_s,
                    tokens_per_step=then.tokens_per_step,
                    step_s=then.plan.step_s,
                    bound=then.plan.bound,
                )
            )
    return tuple(sorted(found, key=lambda item: -item.speed_ratio))


def possible_changes(now: Prospect, setting: Setting) -> tuple[Change, ...]:
    """Return what could be changed about a setting whose plan is `now`, one thing each.

    The tokens of a step stay as they were chosen, unless they are the change; the size of the
    micro-batch may only grow, where memory or GPU change and it is not fixed. Where compute waits
    for less than 2% of the step, nothing is said about what it waits for: a faster link or host,
    more tokens a step.
    """
    workload = dataclasses.replace(
        setting.workload,
        tokens_per_step=now.tokens_per_step,
        least_micro_batch=now.micro_batch,
    )
    growing = dataclasses.replace(setting, workload=workload)
    fixed = dataclasses.replace(
        setting, workload=dataclasses.replace(workload, micro_batch=now.micro_batch)
    )
    waits = now.plan.step_s > WORTH_SAYING * now.plan.compute_s
    return (
        _more_memory(growing),
        *(_less_waiting(now, fixed) if waits else ()),
        *(_micro_batches(now, fixed) if setting.workload.micro_batch is not None else ()),
        *_devices(growing),
    )


def _more_memory(setting: Setting) -> Change:
    n_bytes = _DOUBLE * setting.machine.device_memory_bytes
    machine = dataclasses.replace(setting.machine, device_memory_bytes=n_bytes)
    text = f"twice the device memory: {format_bytes(n_bytes)}"
    return Change(text=text, setting=dataclasses.replace(setting, machine=machine))


def _less_waiting(now: Prospect, setting: Setting) -> list[Change]:
    machine, card = setting.machine, setting.card
    link = "a link twice as fast"
    if card is not None and card.pcie_generation < _NEWEST_PCIE:
        link = f"PCIe {card.pcie_generation + 1} instead of {card.pcie_generation}"
    faster_link = dataclasses.replace(
        machine,
        load_bytes_per_s=_DOUBLE * machine.load_bytes_per_s,
        unload_bytes_per_s=_DOUBLE * machine.unload_bytes_per_s,
    )
    faster_host = dataclasses.replace(
        machine, update_parameters_per_s=_DOUBLE * machine.update_parameters_per_s
    )
    tokens = _DOUBLE * now.tokens_per_step
    more_tokens = dataclasses.replace(setting.workload, tokens_per_step=tokens)
    return [
        Change(text=link, setting=dataclasses.replace(setting, machine=faster_link)),
        Change(
            text="host memory twice as fast (the optimizer's rate)",
            setting=dataclasses.replace(setting, machine=faster_host),
        ),
        Change(
            text=f"twice the tokens a step: {tokens:,}",
            setting=dataclasses.replace(setting, workload=more_tokens),
        ),
    ]


def _micro_batches(now: Prospect, setting: Setting) -> list[Change]:
    """Return other sizes of a micro-batch that the user fixed; else it is the best already."""
    per_step = now.tokens_per_step // now.context_tokens // now.devices  # on each device
    changes = []
    for size in (now.micro_batch // _DOUBLE, _DOUBLE * now.micro_batch):
        if size > 0 and per_step % size == 0:
            workload = dataclasses.replace(setting.workload, micro_batch=size)
            changes.append(
                Change(
                    text=f"micro-batches of {size} {'sequence' if size == 1 else 'sequences'}",
                    setting=dataclasses.replace(setting, workload=workload),
                )
            )
    return changes


def _devices(setting: Setting) -> list[Change]:
    card = setting.card
    if card is None:
        return []
    changes = []
    if setting.dtype == "fp32" and card.flops_per_s.get("tf32", 0.0) > card.flops_per_s["fp32"]:
        changes.append(
            Change(
                text="matrix products in TF32 (torch.set_float32_matmul_precision('high'))",
                setting=dataclasses.replace(setting, dtype="tf32"),
            )
        )
    better = next_gpu(card, setting.dtype)
    if better is not None:
        machine = _with_disk_of(
            setting.machine, machine_for(better, setting.machine.host_memory_bytes)
        )
        changes.append(
            Change(
                text=f"{better.title} instead of {card.title}",
                setting=dataclasses.replace(setting, machine=machine, card=better),
            )
        )
    return changes


def _with_disk_of(machine: Machine, other: Machine) -> Machine:
    return dataclasses.replace(
        other,
        storage_read_bytes_per_s=machine.storage_read_bytes_per_s,
        storage_write_bytes_per_s=machine.storage_write_bytes_per_s,
        storage_both_ways_share=machine.storage_both_ways_share,
    )


def next_gpu(card: Gpu, dtype: str) -> Gpu | None:
    """Return the catalogue's next faster GPU of the same class with no less memory, or `None`.

    Classes are those of laptops, of desktops and of data centres: one is no way out for another.
    """
    faster = [
        other
        for other in GPUS.values()
        if other.flops_per_s.get(dtype, 0.0) > card.flops_per_s[dtype]
        and other.memory_bytes >= card.memory_bytes
        and _class(other) == _class(card)
    ]
    return min(faster, key=lambda other: other.flops_per_s[dtype], default=None)


def _class(card: Gpu) -> str:
    if "laptop" in card.name:
        return "laptop"
    return "desktop" if "GeForce" in card.title else "data centre"

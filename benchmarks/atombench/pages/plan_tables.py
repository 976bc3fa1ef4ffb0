"""What `atom plan` predicts for the GPT-3 family on several GPUs: the tables of docs/plans.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from atombench.pages import table
from atomtrain.errors import PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.optimizers import AdamW, decay_groups
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import HOSTS, Gpu, gpu, machine_for
from atomtrain.planning.search.batch_search import Workload
from atomtrain.training.config.optimizing import named_optimizer, precision_of
from atomtrain.units import format_bytes, format_count
from atomtrain.views.plans.report import Report, make_report
from atomtrain.views.plans.subject import Subject, subject
from atomtrain.views.plans.table import (
    format_duration,
    format_tokens_per_s,
)

CARDS = ("gtx-1080-ti", "rtx-3090", "rtx-4090", "h100")
_STATE_BYTES = 16
_LEANEST_BYTES = 8.0625
"""A bfloat16 parameter and its gradient (2 + 2), the rest of its exact master (2), two moments of 8
bits (2.06)."""
COMPARED = "gpt3-6.7b"
PUBLISHED: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "RoundPipe": {"rtx-4090": {"Qwen3-1.7B": 8881, "Llama-3.1-8B": 3142, "Qwen3-32B": 740}},
    "LLM.Q, bf16": {"rtx-4090": {"Qwen2.5-7B": 1900}, "h100": {"Qwen2.5-7B": 14000}},
}
"""Tokens a second of other systems on one GPU and a model, as their READMEs state them (arXiv
2604.27085 and 2512.15306)."""
_SPARE_HOST = 1.1
"""Host memory beyond the state: for the system and the values kept for backward."""


def host_table() -> str:
    """Return host bytes of each model: the state, and the whole of a plan."""
    head = (
        "model", "parameters", "16 bytes a parameter", "plan on the H100", "tokens/s",
        "leanest exact", "plan on the H100", "tokens/s",
    )  # fmt: skip
    return table(head, map(_host_row, GPT3))


def _host_row(name: str) -> list[str]:
    card = gpu("h100")
    whole, lean = as_planned(name, card), subject(name).trained_with(_leanest, "bf16")
    cells = [name, format_count(whole.parameters)]
    for model, each_bytes in ((whole, _STATE_BYTES), (lean, _LEANEST_BYTES)):
        report = report_of(model, card, "bf16")
        cells.append(_decimal(each_bytes * model.parameters))
        if isinstance(report, PlanError):
            cells += ["-", "-"]
            continue
        cells.append(_decimal(report.prospect.plan.host_bytes))
        cells.append(format_tokens_per_s(report.prospect.tokens_per_s))
    return cells


def _leanest(model: nn.Module) -> AdamW:
    """Return the optimizer of the least state whose masters are exact."""
    return AdamW(decay_groups(model), state="int8", master="split")


def as_planned(name: str, card: Gpu) -> Subject:
    """Return a model as `atom plan` takes it: AdamW, in the precision of the GPU."""
    precision = card.native_precision
    return subject(name).trained_with(
        lambda model: named_optimizer(model, "adamw", precision), precision_of(precision)
    )


def beside_table() -> str:
    """Return what is predicted for a middling model, beside what other systems have published."""
    head = ("GPU", "ATOM, planned", *(f"{system}, published" for system in PUBLISHED))
    rows = []
    for name in CARDS[1:]:
        card = gpu(name)
        report = auto_report(COMPARED, card)
        planned: Mapping[str, float] = {}
        if not isinstance(report, PlanError):
            planned = {COMPARED: report.prospect.tokens_per_s}
        others = (published.get(name, {}) for published in PUBLISHED.values())
        rows.append([card.title, *map(_speeds, (planned, *others))])
    return table(head, rows)


def _speeds(tokens_per_s: Mapping[str, float]) -> str:
    return ", ".join(f"{model} {speed:,.0f}" for model, speed in tokens_per_s.items()) or "-"


def auto_report(name: str, card: Gpu) -> Report | PlanError:
    """Return what `atom plan` says of a model on a GPU, or why nothing fits."""
    return report_of(as_planned(name, card), card, card.native_precision)


def card_table(name: str) -> str:
    """Return the plans of all models on one GPU."""
    head = (
        "model", "host", "device peak", "segments", "tokens a step", "step", "tokens/s", "of peak",
        "bound by",
    )  # fmt: skip
    return table(head, (plan_row(model, auto_report(model, gpu(name))) for model in GPT3))


def plan_row(name: str, report: Report | PlanError) -> list[str]:
    """Return the cells of one model on one GPU."""
    if isinstance(report, PlanError):
        return [name, *["-"] * 7, _reason(report)]
    found, plan = report.prospect, report.prospect.plan
    return [
        name,
        _decimal(plan.host_bytes),
        format_bytes(plan.device_peak_bytes),
        f"{plan.segments}",
        f"{found.tokens_per_step:,} ({plan.micro_batches} x {found.micro_batch})",
        format_duration(plan.step_s),
        format_tokens_per_s(found.tokens_per_s),
        f"{100 * (report.peak_share or 0):.0f}%",
        plan.bound,
    ]


def _host_bytes(model: Subject, card: Gpu) -> int:
    """Return a power of two that holds the model, and at least what a usual host holds."""
    needed = int(_SPARE_HOST * _STATE_BYTES * model.parameters)
    return max(HOSTS[card.host].most_memory_bytes, 1 << (needed - 1).bit_length())


def report_of(model: Subject, card: Gpu, dtype: str = "fp32") -> Report | PlanError:
    """Return the plan of a model on one GPU, or why nothing fits."""
    setting = Setting(
        machine=machine_for(card, _host_bytes(model, card)),
        workload=Workload(context_tokens=model.context_tokens, clips=True),
        card=card,
        dtype=dtype,
    )
    try:
        return make_report(model, setting, advise=False)
    except PlanError as error:
        return error


def _reason(error: PlanError) -> str:
    """Return why nothing fits, without what to do about it."""
    return f"does not fit: {str(error).partition(';')[0]}"


def _decimal(n_bytes: float) -> str:
    """Return decimal bytes, as papers print them, such as `"2.80 TB"`."""
    unit, name = (1e12, "TB") if n_bytes >= 1e12 else (1e9, "GB")
    return f"{n_bytes / unit:.3g} {name}"


PARTS: dict[str, Callable[[], str]] = {
    "plans-beside": beside_table,
    "plans-host": host_table,
    **{f"plans-{name}": partial(card_table, name) for name in CARDS},
}
"""By the names that marks have. They take minutes."""

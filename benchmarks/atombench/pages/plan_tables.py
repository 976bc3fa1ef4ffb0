"""What `atom plan` predicts for the GPT-3 family on several GPUs: the tables of docs/plans.md."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from atombench.pages import table
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.optimizers import AdamW, decay_groups
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import HOSTS, Gpu, gpu, machine_for
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.plan.shape import training_visits
from atomtrain.planning.search.batch_search import Analysis, Prospect, Workload
from atomtrain.planning.search.search import least_budget_bytes, make_plan
from atomtrain.training.config.optimizing import named_optimizer, precision_of
from atomtrain.units import format_bytes, format_count
from atomtrain.views.plans.report import Report, make_report
from atomtrain.views.plans.subject import Subject, compute_of, subject
from atomtrain.views.plans.table import (
    block_names,
    format_duration,
    format_tokens_per_s,
    host_names,
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
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
"""The published sizes of Llama 3 8B (Grattafiori et al. 2024, table 3): 128k vocabulary, not
tied."""
HEAD_PIECES = 8
Times = Mapping[str, LayerTime]


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


def treatment_table() -> str:
    """Return what each treatment of embedding and head gives for a Llama of 8 billion."""
    model, card = _llama(), gpu("rtx-4090")
    rows = []
    for text, least_bytes, found in treatments(model, card, _host_bytes(model, card), 8):
        if isinstance(found, PlanError):
            rows.append([text, format_bytes(least_bytes), _reason(found), *["-"] * 6])
            continue
        plan = found.plan
        rows.append(
            [
                text,
                format_bytes(least_bytes),
                format_bytes(plan.device_peak_bytes),
                f"{plan.slots} x {format_bytes(plan.slot_bytes)}",
                ", ".join(host_names(found)) or "-",
                ", ".join(block_names(found, found.plan.resident_blocks)) or "-",
                format_bytes(loaded_bytes(found)),
                format_duration(plan.step_s),
                format_tokens_per_s(found.tokens_per_s),
            ]
        )
    head = (
        "treatment", "least device memory", "device peak", "slots", "on the host", "resident",
        "to device a step", "step", "tokens/s",
    )  # fmt: skip
    return table(head, rows)


class Treatment(NamedTuple):
    """One way to treat the weights of the vocabulary, and what it gives."""

    text: str
    least_bytes: int
    """Device memory with which some plan works, however slow."""
    found: Prospect | PlanError
    """Micro-batches of one sequence."""


class _Fixed(NamedTuple):
    """Fields of a request."""

    resident: tuple[int, ...] | None
    device_blocks: tuple[int, ...] | None
    host_layers: int | None


def treatments(
    model: Subject, card: Gpu, host_memory_bytes: int, micro_batches: int
) -> Iterator[Treatment]:
    """Yield the plans of a model with every treatment pinned off, then on.

    Args:
        model: With its head whole.
        card: Where it trains.
        host_memory_bytes: Of its host.
        micro_batches: Of one sequence each, in a step.
    """
    split = dataclasses.replace(model, head_pieces=HEAD_PIECES, _analyses={})
    for text, treated, fixed in (
        ("none", model, _Fixed((), (), 0)),
        ("embedding on the host", model, _Fixed((), (), 1)),
        ("resident where it pays", model, _Fixed(None, (), 0)),
        ("optimizer on the device where it pays", model, _Fixed(None, None, 0)),
        (f"head in {HEAD_PIECES} pieces", split, _Fixed((), (), 0)),
        ("all, where they pay", split, _Fixed(None, None, None)),
    ):
        request = Request(micro_batches=micro_batches, **fixed._asdict())
        machine = machine_for(card, host_memory_bytes)
        analysis = treated.analyse(1, on_gpu=True)
        times = compute_of(card, "fp32").estimate(analysis)
        found = _planned(treated, analysis, times, machine, request)
        least_bytes = least_budget_bytes(analysis.chain, analysis.costs, times, machine, request)
        yield Treatment(text, least_bytes, found)


def loaded_bytes(found: Prospect) -> int:
    """Return the parameters that cross the link to the device in a step, in bytes."""
    layout, shape = Layout(found.analysis.chain), found.plan.shape
    resident = shape.resident_blocks
    coming = set(resident) - set(shape.device_blocks)
    loads = [visit.layers for visit in training_visits(shape) if visit.load]
    return sum(layout.segment_bytes(*layers, resident) for layers in loads) + sum(
        layout.block_bytes(block) for block in coming
    )


def _planned(
    model: Subject, analysis: Analysis, times: Times, machine: Machine, request: Request
) -> Prospect | PlanError:
    try:
        plan = make_plan(analysis.chain, analysis.costs, times, machine, request)
    except PlanError as error:
        return error
    return Prospect(
        plan=plan,
        machine=machine,
        analysis=analysis,
        times=times,
        micro_batch=1,
        context_tokens=model.context_tokens,
    )


def _llama() -> Subject:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "llama-8b.json")
        file.write_text(json.dumps(_LLAMA))
        return subject(str(file), 4096)


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
    "plans-treatments": treatment_table,
}
"""By the names that marks have. They take minutes."""

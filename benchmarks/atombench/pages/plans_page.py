"""Writes docs/plans.md: `python -m atombench.pages.plans_page > docs/plans.md`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from atombench.pages.treatments import loaded_bytes, treatments
from atomtrain.errors import PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.optimizers import AdamW, decay_groups
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import HOSTS, Gpu, gpu, machine_for
from atomtrain.planning.search.batch_search import Workload
from atomtrain.units import format_bytes, format_count
from atomtrain.views.plans.report import Report, make_report
from atomtrain.views.plans.subject import Subject, subject
from atomtrain.views.plans.table import (
    format_duration,
    format_tokens_per_s,
    host_names,
    resident_names,
)

CARDS = ("gtx-1080-ti", "rtx-3090", "rtx-4090", "h100")
_STATE_BYTES = 16
_LEANEST_BYTES = 8.0625
"""A bfloat16 parameter and its gradient (2 + 2), the rest of its exact master (2), two moments of 8
bits (2.06)."""
_SPARE_HOST = 1.1
"""Host memory beyond the state: for the system and the values kept for backward."""

_INTRODUCTION = """\
# Plans for the GPT-3 family

What `atom plan` predicts for the eight sizes of GPT-3 (Brown et al. 2020, table 2.1) on four GPUs,
in sequences of 2048 tokens. **Nothing here is measured**: rates are data-sheet figures times the
shares in [hardware.md](hardware.md). How plans are made is in [planning.md](planning.md). Written
by `python -m atombench.pages.plans_page`.

Parameters, gradients and AdamW's state are float32: 16 bytes a parameter on the host. Products are
float32 without TF32. Gradients are clipped, as `atom train` does. The device budget is 90% of the
GPU's memory; of plans that are as fast (within 0.2%) the one that needs least is taken. Each host
has memory for the model, and the channels of a usual host that holds so much. Tokens a step
(micro-batches x sequences in each) are what lets compute cover the link and the host's updates.
"""


_HOST_MEMORY = """\
The plan also holds what waits on the host for backward. *Leanest exact* is `--precision bf16
--optimizer adamw-int8`: 8 bytes a parameter, masters exact, products in bfloat16
([precision.md](precision.md)).
"""
_TREATMENTS = """\
## Embedding and head

They are much to load and little to compute, and the logits are often the largest workspace. They
count where the vocabulary is large beside a block, so not in GPT-3 175B. There are four treatments:

- *resident*: loaded once a step into a place of its own, and its gradient leaves once;
- *optimizer on the device*: nothing of it crosses the link; other blocks may stay like that too;
- *on the host*: an embedding gathers its rows there, and only these and their gradients cross;
- *in pieces* of the vocabulary: never all logits at once; last bits differ (`--head-pieces 8`).

*Least device memory* is that of any plan, however slow. One sequence a micro-batch, eight a step.
"""
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
"""The published sizes of Llama 3 8B (Grattafiori et al. 2024, table 3): 128k vocabulary, not
tied."""


def page() -> Iterator[str]:
    """Yield the page, line by line."""
    yield from _INTRODUCTION.splitlines()
    yield ""
    yield from host_table()
    for card in CARDS:
        yield ""
        yield from card_table(gpu(card))
    yield ""
    yield from _TREATMENTS.splitlines()
    yield ""
    yield from treatment_table("Llama, 8 billion", _llama(), gpu("rtx-4090"))


def host_table() -> Iterator[str]:
    """Yield host bytes of each model: the state, and the whole of a plan."""
    yield "## Host memory"
    yield ""
    yield from _HOST_MEMORY.splitlines()
    yield ""
    yield from _header(
        "model", "parameters", "16 bytes a parameter", "plan on the H100", "tokens/s",
        "leanest exact", "plan on the H100", "tokens/s",
    )  # fmt: skip
    for name in GPT3:
        whole, lean = subject(name), subject(name).trained_with(_leanest, "bf16")
        cells = [name, format_count(whole.parameters)]
        for model, each_bytes in ((whole, _STATE_BYTES), (lean, _LEANEST_BYTES)):
            report = _report(model, gpu("h100"), "bf16" if model is lean else "fp32")
            cells.append(_decimal(each_bytes * model.parameters))
            if isinstance(report, PlanError):
                cells += ["-", "-"]
                continue
            cells.append(_decimal(report.prospect.plan.host_bytes))
            cells.append(format_tokens_per_s(report.prospect.tokens_per_s))
        yield _row(*cells)


def _leanest(model: nn.Module) -> AdamW:
    """Return the optimizer of the least state whose masters are exact."""
    return AdamW(decay_groups(model), state="int8", master="split")


def card_table(card: Gpu) -> Iterator[str]:
    """Yield the plans of all models on one GPU."""
    yield f"## {card.title}"
    yield ""
    yield from _header(
        "model", "host", "device peak", "segments", "tokens a step", "step", "tokens/s", "of peak",
        "bound by",
    )  # fmt: skip
    for name in GPT3:
        yield _plan_row(name, _report(subject(name), card))


def treatment_table(name: str, model: Subject, card: Gpu) -> Iterator[str]:
    """Yield what each treatment of embedding and head gives for one model on one GPU."""
    yield f"### {name} on {card.title}, sequences of {model.context_tokens} tokens"
    yield ""
    yield from _header(
        "treatment",
        "least device memory",
        "device peak",
        "slots",
        "on the host",
        "resident",
        "to device a step",
        "step",
        "tokens/s",
    )
    for text, least_bytes, found in treatments(model, card, _host_bytes(model, card), 8):
        if isinstance(found, PlanError):
            yield _row(text, format_bytes(least_bytes), _reason(found), *["-"] * 6)
            continue
        plan = found.plan
        yield _row(
            text,
            format_bytes(least_bytes),
            format_bytes(plan.device_peak_bytes),
            f"{plan.slots} x {format_bytes(plan.slot_bytes)}",
            ", ".join(host_names(found)) or "-",
            ", ".join(resident_names(found)) or "-",
            format_bytes(loaded_bytes(found)),
            format_duration(plan.step_s),
            format_tokens_per_s(found.tokens_per_s),
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


def _report(model: Subject, card: Gpu, dtype: str = "fp32") -> Report | PlanError:
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


def _plan_row(name: str, report: Report | PlanError) -> str:
    if isinstance(report, PlanError):
        return _row(name, *["-"] * 7, _reason(report))
    found, plan = report.prospect, report.prospect.plan
    return _row(
        name,
        _decimal(plan.host_bytes),
        format_bytes(plan.device_peak_bytes),
        f"{plan.segments}",
        f"{found.tokens_per_step:,} ({plan.micro_batches} x {found.micro_batch})",
        format_duration(plan.step_s),
        format_tokens_per_s(found.tokens_per_s),
        f"{100 * (report.peak_share or 0):.0f}%",
        plan.bound,
    )


def _reason(error: PlanError) -> str:
    """Return why nothing fits, without what to do about it."""
    return f"does not fit: {str(error).partition(';')[0]}"


def _decimal(n_bytes: float) -> str:
    """Return decimal bytes, as papers print them, such as `"2.80 TB"`."""
    unit, name = (1e12, "TB") if n_bytes >= 1e12 else (1e9, "GB")
    return f"{n_bytes / unit:.3g} {name}"


def _header(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield f"|{'---|' * len(names)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in page():
        sys.stdout.write(f"{line}\n")

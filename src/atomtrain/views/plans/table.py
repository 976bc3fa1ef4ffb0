"""A report as a table for people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from atomtrain.planning.plan.plan import Plan, disk_text, saved_text
from atomtrain.planning.search.batch_search import Prospect
from atomtrain.units import counted, format_bytes, format_count, format_seconds
from atomtrain.views.plans.report import Report
from atomtrain.views.plans.step import Caption

_KEY_COLUMNS = 12
_MOST_NAMES = 6
_DAY_S = 86_400.0
_YEAR_S = 365.25 * _DAY_S


def plan_text(report: Report) -> str:
    """Return the plan, its predicted speed and what would be faster, as lines of text."""
    rows = [*_model(report), *_memory(report), *_schedule(report), *_speed(report)]
    lines = [_title(report), ""]
    lines += [f"{key:<{_KEY_COLUMNS}}{value}" for key, value in rows]
    return "\n".join([*lines, *_advice(report), ""])


def caption(report: Report) -> Caption:
    """Return what the picture of the step says above its bars."""
    found = report.prospect
    facts = (
        f"predicted: {format_duration(found.plan.step_s)} for a step of "
        f"{found.tokens_per_step:,} tokens, {format_tokens_per_s(found.tokens_per_s)} tokens/s, "
        f"bound by {found.plan.bound}"
    )
    return Caption(f"{report.model} on {found.machine.name}", facts)


def format_duration(value_s: float) -> str:
    """Return a duration that may be days or years, such as `"12.5 days"` or `"3.1 years"`."""
    if value_s < 2 * _DAY_S:
        return format_seconds(value_s)
    if value_s < 2 * _YEAR_S:
        return f"{value_s / _DAY_S:.3g} days"
    return f"{format_count(value_s / _YEAR_S)} years"


def format_tokens_per_s(value: float) -> str:
    """Return for example `"7.31"`, `"950"` or `"12.3k"` tokens per second."""
    return format_count(value) if value >= 100 else f"{value:.3g}"


def bounds_text(bounds: Sequence[int]) -> str:
    """Return for example `"97 of 1 layer"`, `"4 of 24 to 26 layers"`."""
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    least, most = min(sizes), max(sizes)
    layers = f"{most}" if least == most else f"{least} to {most}"
    return f"{len(sizes)} of {layers} {'layer' if most == 1 else 'layers'}"


def block_names(found: Prospect, blocks: Sequence[int]) -> list[str]:
    """Return the names of blocks: layers, or weights that several layers share."""
    chain = found.analysis.chain
    names = [layer.name for layer in chain.layers]
    names += [chain.names.get(key, "?") for key, users in chain.users.items() if len(users) > 1]
    return [names[block] for block in blocks]


def _few(names: Sequence[str]) -> str:
    """Return names for people, not all if they are many."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def host_names(found: Prospect) -> list[str]:
    """Return the names of the layers that run on the host."""
    return [layer.name for layer in found.analysis.chain.layers[: found.plan.host_layers]]


def _title(report: Report) -> str:
    where = "this machine, " if report.setting.card is None else ""
    how = f" ({where}{report.setting.dtype} products)"
    devices = report.prospect.devices
    count = "" if devices == 1 else f"{devices} x "
    return f"{report.model} on {count}{report.prospect.machine.name}{how}: predicted"


def _model(report: Report) -> list[tuple[str, str]]:
    analysis = report.prospect.analysis
    return [
        (
            "model",
            f"{format_count(report.parameters)} parameters, {len(analysis.costs.layers)} layers, "
            f"sequences of {report.prospect.context_tokens} tokens",
        ),
        *([] if report.images is None else [("images", report.images)]),
    ]


def _memory(report: Report) -> list[tuple[str, str]]:
    plan, machine = report.prospect.plan, report.prospect.machine
    each = f"{report.state_bytes_per_parameter:.3g}"
    kinds = "" if plan.on_disk else f" ({each} of parameter, gradient and optimizer state)"
    on_disk = [("on disk", disk_text(plan))] if plan.on_disk else []
    return [
        (
            "host",
            f"{format_bytes(plan.host_bytes)} of {format_bytes(machine.host_memory_bytes)}: "
            f"{report.host_bytes_per_parameter:.1f} bytes a parameter{kinds}",
        ),
        *on_disk,
        (
            "device",
            f"{format_bytes(plan.device_peak_bytes)} peak of "
            f"{format_bytes(plan.device_memory_bytes)}"
            f"{'' if report.prospect.devices == 1 else ', each'}",
        ),
    ]


def _schedule(report: Report) -> list[tuple[str, str]]:
    plan, found = report.prospect.plan, report.prospect
    forward = ""
    if len(plan.forward_bounds) > 1:
        forward = f"; forward {bounds_text(plan.forward_bounds)}, then the turn"
    rows = [
        ("segments", f"backward {bounds_text(plan.backward_bounds)}{forward}"),
        ("slots", _slots(plan)),
    ]
    if plan.host_layers:
        rows.append(("on the host", f"{', '.join(host_names(found))}: only rows cross the link"))
    loaded = [block for block in plan.resident_blocks if block not in plan.device_blocks]
    if loaded:
        names = ", ".join(block_names(found, loaded))
        rows.append(("resident", f"{names}: loaded once a step"))
    if plan.device_blocks:
        names = _few(block_names(found, plan.device_blocks))
        rows.append(("on device", f"{names}: optimizer and all, nothing crosses the link"))
    if plan.shape.waiting:
        rows.append(("saved", f"{saved_text(plan.shape)} in backward"))
    rows.append(
        (
            "step",
            f"{found.tokens_per_step:,} tokens: {counted(plan.micro_batches, 'micro-batch', 'es')} "
            f"of {counted(found.micro_batch, 'sequence')}"
            f"{'' if found.devices == 1 else f' on each of {found.devices} devices'}",
        )
    )
    return rows


def _slots(plan: Plan) -> str:
    where = "on the device" if plan.boundary == "device" else "on the host"
    buffers = counted(plan.gradient_buffers, "gradient buffer")
    return (
        f"{plan.slots} of {format_bytes(plan.slot_bytes)}, {buffers} of "
        f"{format_bytes(plan.gradient_bytes)}; values between segments wait {where}"
    )


def _speed(report: Report) -> list[tuple[str, str]]:
    plan, found = report.prospect.plan, report.prospect
    whose = "device's" if found.devices == 1 else "devices'"
    scale, unit = (1e12, "TFLOP/s") if report.peak_flops_per_s >= 1e12 else (1e9, "GFLOP/s")
    rows = [
        (
            "speed",
            f"{format_duration(plan.step_s)} a step, {format_tokens_per_s(found.tokens_per_s)} "
            f"tokens/s; a billion tokens take {format_duration(1e9 / found.tokens_per_s)}",
        ),
        (
            "useful",
            f"{100 * report.peak_share:.0f}% of the {whose} "
            f"{report.peak_flops_per_s / scale:.3g} {unit}",
        ),
    ]
    shares = ", ".join(f"{name} {100 * share:.1f}%" for name, share in report.busy_shares.items())
    return [*rows, ("bound by", plan.bound), ("busy", shares)]


def _advice(report: Report) -> list[str]:
    if not report.advice:
        return []
    texts = [item.text for item in report.advice]
    width = max(map(len, texts))
    lines = ["", "faster with"]
    lines += [
        f"  {text:<{width}}  {100 * (item.speed_ratio - 1):+5.0f}%  "
        f"{format_tokens_per_s(item.tokens_per_s)} tokens/s, then bound by {item.bound}"
        for text, item in zip(texts, report.advice, strict=True)
    ]
    return lines

"""What the first hour found, as a table for people: a few lines for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from atombench.common import Result
from atomtrain.units import format_bytes, format_count, format_seconds

Line = tuple[str, str]
_LATE = "not reached"


def table(rows: Sequence[Result], core: str) -> str:
    """Return the table.

    Args:
        rows: Of each part what its file has: `part`, `state`, `seconds`, `failure` and its keys,
            as far as it came.
        core: How updates were measured, in a few words.
    """
    lines = [("part", "state", "time", "what", "found")]
    for row in rows:
        head = (row["part"], row["state"], format_seconds(row["seconds"]))
        told = list(_LINES[row["part"]](row))
        skipped = row.get("skipped", {})
        told += [("left out", f"{name}: {what[:160]}") for name, what in skipped.items()]
        if row["failure"]:
            told.append((row["state"], row["failure"][:200]))
        for index, line in enumerate(told or [("", "")]):
            lines.append((*(head if index == 0 else ("", "", "")), *line))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]
        )
        for line in lines
    ]
    return "\n".join([*(line.rstrip() for line in text), f"Measured {core}."])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _machine(row: Result) -> Iterator[Line]:
    if "device" not in row:
        return
    facts = row["machine"]
    size = "device_bytes" if "device_bytes" in row else "device_budget_bytes"
    yield "device", f"{row['device']}, {format_bytes(row[size])}"
    yield (
        "host",
        f"{facts['processor']}, {facts['cores']} cores, {format_bytes(facts['memory_bytes'])}",
    )
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    yield "versions", f"{versions}, CUDA {row['torch_cuda']}"
    for kind in ("pinned", "pageable"):
        if kind in row:
            rates = row[kind]
            there, back = rates["load_bytes_per_s"], rates["unload_bytes_per_s"]
            yield (
                f"link, {kind}",
                f"{_rate(there)} to the device, {_rate(back)} back, both at once "
                f"{rates['both_ways_share']:.2f} of that; {format_seconds(rates['copy_s'])} a copy",
            )
    if "product_flops_per_s" in row:
        yield "bfloat16 product", f"{row['product_flops_per_s'] / 1e12:.3g} TFLOP/s"
    for one in row.get("pinning", ()):
        pin_s = one["pin_s"]
        yield (
            f"pinning {format_bytes(one['bytes'])}",
            f"{format_seconds(pin_s)} ({_rate(one['bytes'] / max(pin_s, 1e-9))}), back in "
            f"{format_seconds(one['unpin_s'])}",
        )


def _tests(row: Result) -> Iterator[Line]:
    counts = row.get("counts", {})
    yield "tests", ", ".join(f"{count} {name}" for name, count in counts.items()) or _LATE
    for found in row.get("failed", ()):
        yield "failed", found["test"]
        reasons = [line[1:].strip() for line in found["said"].splitlines() if line[:2] == "E "]
        yield "", (reasons or ["no reason"])[0]


def _memory(row: Result) -> Iterator[Line]:
    for name, found in row.get("models", {}).items():
        reserved = found["reserved_peak_bytes"]
        yield (
            f"{name}, peak",
            f"{format_bytes(found['predicted_peak_bytes'])} predicted, "
            f"{format_bytes(found['allocated_peak_bytes'])} allocated"
            + (f", {format_bytes(reserved)} reserved" if reserved is not None else "")
            + f", budget {format_bytes(found['budget_bytes'])}",
        )
        same = found["same_bits"]
        yield f"{name}, two runs", _LATE if same is None else f"the same bits: {same}"


def _optimizers(row: Result) -> Iterator[Line]:
    for threads, found in row.get("threads", {}).items():
        fast = ", ".join(
            f"{name} {format_count(found['optimizers'][name]['parameters_per_s'])}"
            for name in ("bf16-adamw", "bf16-adamw-bfloat16-split", "torch-adamw-fused")
        )
        yield (
            f"{threads} threads",
            f"{fast} parameters/s; {_rate(found['copy_bytes_per_s'])} copied",
        )


def _timeline(row: Result) -> Iterator[Line]:
    for name, found in row.get("cases", {}).items():
        yield (
            f"{row['model']}, {name}",
            f"step {format_seconds(found['predicted_step_s'])} predicted, "
            f"{format_seconds(found['measured_step_s'])} measured, "
            f"{format_seconds(found['link_wait_s'])} waiting; opened in "
            f"{format_seconds(found['open_s'])}, first step "
            f"{format_seconds(found['first_step_s'])}",
        )
        busy = (
            f"{stream} {format_seconds(found['predicted_busy_s'].get(stream, 0.0))} / "
            f"{format_seconds(taken_s)}"
            for stream, taken_s in found["measured_busy_s"].items()
        )
        yield "predicted / measured", ", ".join(busy)


def _large(row: Result) -> Iterator[Line]:
    if "predicted_step_s" not in row:
        return
    model = f"{row['inputs']['model']}, {row['optimizer']}"
    opened, predicted = format_seconds(row["open_s"]), format_seconds(row["predicted_step_s"])
    first = f", first step {format_seconds(row['first_step_s'])}" if "first_step_s" in row else ""
    yield model, f"opened in {opened}{first}; step {predicted} predicted"
    if "step_s" in row:
        yield (
            f"{row['steps']} steps",
            f"{format_seconds(row['step_s'])} a step, {row['tokens_per_s']:.4g} tokens/s, "
            f"{row['model_flops_per_s'] / 1e12:.3g} TFLOP/s of the model, "
            f"{100 * row['link_wait_share']:.1f}% waiting",
        )
        yield (
            "peak",
            f"{format_bytes(row['predicted_device_peak_bytes'])} predicted, "
            f"{format_bytes(row['device_peak_bytes'])} measured, budget "
            f"{format_bytes(row['device_budget_bytes'])}",
        )


def _offloaders(row: Result) -> Iterator[Line]:
    for name, found in row.get("rows", {}).items():
        if "failure" in found:
            yield name, found["failure"][:160]
            continue
        yield (
            name,
            f"{format_seconds(found['step_s'])} a step, "
            f"{row['tokens_per_step'] / found['step_s']:.4g} tokens/s, device "
            f"{format_bytes(found['device_peak_bytes'])}, host "
            f"{format_bytes(found['host_peak_bytes'])}; opened in "
            f"{format_seconds(found['open_s'])}",
        )


_LINES: dict[str, Callable[[Result], Iterator[Line]]] = {
    "machine": _machine,
    "tests": _tests,
    "memory": _memory,
    "optimizers": _optimizers,
    "timeline": _timeline,
    "large": _large,
    "offloaders": _offloaders,
}

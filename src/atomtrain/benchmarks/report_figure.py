"""The picture of `atom bench report`: ratios, rates, predicted against measured, losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POINTS = 100
_SIZE_INCHES = (12.0, 8.5)


def draw_report(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw what there is of network, simulation and plan; what is missing says so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, 2)
    _ratios(axes[0][0], results)
    _rates(axes[0][1], results.get("network", {}))
    _predictions(axes[1][0], results)
    _losses(axes[1][1], results)
    figure.savefig(path, dpi=_POINTS)


def _ratios(axes: Any, results: Mapping[str, Mapping[str, Any]]) -> None:
    axes.set_title("ATOM / best pipeline, tokens per second")
    measured = [row for row in results.get("network", {}).get("rows", []) if row.get("ratio")]
    simulated = [r for r in results.get("simulation", {}).get("rows", []) if r.get("ratio")]
    for kind, marker in (("this processor", "o"), ("stands for a GPU's link", "s")):
        chosen = [row for row in measured if bool(row["stands_for"]) == (marker == "s")]
        if chosen:
            x = [_rate_meant(row) / 1e6 for row in chosen]
            axes.plot(x, [row["ratio"] for row in chosen], marker, label=f"measured, {kind}")
    for model in dict.fromkeys(row["model"] for row in simulated):
        peers = max(row["peers"] for row in simulated if row["model"] == model)
        line = [r for r in simulated if r["model"] == model and r["peers"] == peers]
        line.sort(key=lambda row: row["link_bits_per_s"])
        axes.plot(
            [row["link_bits_per_s"] / 1e6 for row in line],
            [row["ratio"] for row in line],
            label=f"simulated, {model}, {peers} peers",
        )
    if not measured and not simulated:
        _nothing(axes, "network or simulation")
        return
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.annotate("break-even", (axes.get_xlim()[0], 1.0), fontsize=8, va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="ratio")
    axes.legend(fontsize=7)


def _rate_meant(row: Mapping[str, Any]) -> float:
    """Return the link's rate, or that of the link it stands for."""
    stands_for = row["stands_for"]
    return float(stands_for["bits_per_s"] if stands_for else row["link_bits_per_s"])


def _rates(axes: Any, network: Mapping[str, Any]) -> None:
    axes.set_title("Measured, all peers together")
    rows = [row for row in network.get("rows", []) if not row.get("stands_for")]
    if not rows:
        _nothing(axes, "network")
        return
    labels = [
        f"{row['link_bits_per_s'] / 1e6:g} Mbit/s\n{1000 * row['round_trip_s']:g} ms"
        for row in rows
    ]
    methods = ("atom", "pipeline", "data_parallel")
    for index, method in enumerate(methods):
        heights = [row.get(f"{method}_tokens_per_s") or 0.0 for row in rows]
        places = [place + 0.27 * (index - 1) for place in range(len(rows))]
        axes.bar(places, heights, width=0.25, label=method.replace("_", " "))
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("tokens/s (none: left out or failed)")
    axes.legend(fontsize=7)


def _predictions(axes: Any, results: Mapping[str, Mapping[str, Any]]) -> None:
    axes.set_title("Predicted / measured")
    kinds = predicted_to_measured(results)
    for name, shares in kinds.items():
        axes.plot(range(1, len(shares) + 1), sorted(shares), "o-", markersize=3, label=name)
    if not kinds:
        _nothing(axes, "plan or network")
        return
    for bound in (0.9, 1.1):
        axes.axhline(bound, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlabel="case, sorted", ylabel="share")
    axes.legend(fontsize=7)


def predicted_to_measured(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return predictions as shares of measurements, by what was predicted."""
    shares: dict[str, list[float]] = {
        "step of a plan": [
            case["predicted_step_s"] / case["measured_step_s"]
            for case in results.get("plan", {}).get("cases", [])
        ]
    }
    rows = results.get("network", {}).get("rows", [])
    for method in ("pipeline", "atom"):
        found = [row[method] for row in rows if row.get(method)]
        shares[f"{method}'s tokens/s"] = [
            each["predicted_tokens_per_s"] / each["tokens_per_s"] for each in found
        ]
    return {name: values for name, values in shares.items() if values}


def _losses(axes: Any, results: Mapping[str, Mapping[str, Any]]) -> None:
    axes.set_title("Loss against time")
    curves = results.get("time-to-loss", {}).get("curves", [])
    for curve in curves:
        axes.plot(curve["seconds"], curve["loss"], label=curve["name"])
    if not curves:
        _nothing(axes, "time-to-loss")
        return
    axes.set(xlabel="seconds", ylabel="held-out loss")
    axes.legend(fontsize=7)


def _nothing(axes: Any, names: str) -> None:
    axes.text(0.5, 0.5, f"no result of {names}", ha="center", transform=axes.transAxes)
    axes.set_axis_off()

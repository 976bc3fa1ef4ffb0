"""The picture of `atom bench report`: ratios, rates, predicted against measured, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atombench.network.cases import cases
from atombench.network.panels import (
    UNFINISHED,
    all_panels,
    draw_bars,
    fair_ratio,
    network_results,
    per_flop_name,
    rounds_finished,
)
from atombench.network.setup import gpu_flops_per_s

Results = Mapping[str, Mapping[str, Any]]
_POINTS = 100
_WIDTH_INCHES = 16.0
_HEIGHT_INCHES = 6.0
_LEGEND_INCHES = 2.5
_BAR_INCHES = 0.4
_MARKERS = "osD^v"
_BARS = {
    "tokens_per_s": "Measured: tokens/s of all peers together",
    "sent_bytes_per_token": "Measured: bytes sent for each token, of all peers",
    "utilisation": "Measured: share of what the devices would train without network",
}
_SMALL = 8


def draw_report(results: Results, path: Path) -> None:
    """Draw what there is of network, simulation, plan and time-to-loss; what is missing says so."""
    from matplotlib.figure import Figure

    bars_inches = max(_HEIGHT_INCHES, _BAR_INCHES * len(all_panels(results)))
    tall = _HEIGHT_INCHES + _LEGEND_INCHES
    heights = (max(tall, bars_inches), bars_inches, tall)
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(3, 2, height_ratios=heights)
    _ratios(axes[0][0], results)
    for place, (key, title) in zip((axes[0][1], *axes[1]), _BARS.items(), strict=True):
        _bars(place, results, key, title)
    _predictions(axes[2][0], results)
    _losses(axes[2][1], results)
    figure.savefig(path, dpi=_POINTS)


def _ratios(axes: Any, results: Results) -> None:
    axes.set_title("ATOM / best pipeline, tokens per second")
    simulated = [r for r in results.get("simulation", {}).get("rows", []) if r.get("ratio")]
    series = measured_ratios(results)
    if not series and not simulated:
        _nothing(axes, "network or simulation")
        return
    _simulated_lines(axes, simulated)
    unfinished = False
    for number, (label, points) in enumerate(series.items()):
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(
            [x / 1e6 for x, _, _ in points],
            [ratio for _, ratio, _ in points],
            marker,
            color=f"C{number}",
            markeredgecolor="black",
            label=f"measured, {label}",
        )
        for x, ratio, finished in points:
            if not finished:
                unfinished = True
                axes.plot(x / 1e6, ratio, marker, color="white", markeredgecolor=f"C{number}")
                axes.annotate(
                    UNFINISHED, (x / 1e6, ratio), (8, -3), textcoords="offset points",
                    fontsize=_SMALL,
                )  # fmt: skip
    if unfinished:
        axes.plot([], [], "o", color="white", markeredgecolor="black", label=f"{UNFINISHED}")
    axes.set(xscale="log", yscale="log", ylabel="ratio")
    axes.set_xlabel("link of a GPU that has as many bits per FLOP, Mbit/s")
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
    axes.annotate(
        "break-even: a pipeline wins below", (0.99, 1.0), (0, 3), fontsize=_SMALL, ha="right",
        xycoords=("axes fraction", "data"), textcoords="offset points",
    )  # fmt: skip
    axes.grid(visible=True, linewidth=0.3)
    # Below the axes: anywhere within it would hide points.
    axes.legend(fontsize=_SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)


def _simulated_lines(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a model, darker the larger it is, of the most peers that there are."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for index, model in enumerate(models):
        peers = max(row["peers"] for row in rows if row["model"] == model)
        line = [row for row in rows if (row["model"], row["peers"]) == (model, peers)]
        line.sort(key=lambda row: row["link_bits_per_s"])
        axes.plot(
            [row["link_bits_per_s"] / 1e6 for row in line],
            [row["ratio"] for row in line],
            color=(0.8 * (1 - (index + 1) / len(models)),) * 3,
            linewidth=1.2,
            label=f"simulated, {model}, {peers} peers",
        )


def measured_ratios(results: Results) -> dict[str, list[tuple[float, float, bool]]]:
    """Return what was measured, by label: bits per second of a GPU's link, ratio, round finished.

    A row counts where a GPU (the one of the run's inputs) has as many bits for each FLOP, which
    also places links that stand for nothing but themselves; or, where a model's activations are
    what the link stands for, at the GPU's link.
    """
    series: dict[str, list[tuple[float, float, bool]]] = {}
    for result in network_results(results).values():
        for row in result.get("rows", []):
            if not (ratio := row.get("ratio") and fair_ratio(row)):
                continue
            model = (row["stands_for"] or {}).get("model")
            gpu = result["inputs"]["gpu"]
            rate = row["stands_for"]["bits_per_s"] if model else None
            of = f"activations per FLOP of {model}" if model else "small GPT, same bits per FLOP"
            x = rate or row["bits_per_flop"] * gpu_flops_per_s(gpu)
            label = f"{result['peers']} peers, {of} ({gpu})"
            point = (float(x), float(ratio), rounds_finished(row) > 0)
            series.setdefault(label, []).append(point)
    return {label: sorted(points) for label, points in series.items()}


def _bars(axes: Any, results: Results, key: str, title: str) -> None:
    panels = all_panels(results)
    if panels:
        draw_bars(axes, panels, key, title)
    else:
        axes.set_title(title)
        _nothing(axes, "network")


def _predictions(axes: Any, results: Results) -> None:
    axes.set_title("Predicted / measured")
    kinds = predicted_to_measured(results)
    for name, shares in kinds.items():
        close = sum(0.9 <= share <= 1.1 for share in shares)
        places = [(index + 0.5) / len(shares) for index in range(len(shares))]
        label = f"{name}: {close} of {len(shares)} within 10%"
        axes.plot(places, sorted(shares), "o-", markersize=3, label=label)
    if not kinds:
        _nothing(axes, "plan or network")
        return
    axes.axhspan(0.9, 1.1, color="black", alpha=0.08)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="share of the cases, sorted", ylabel="predicted / measured", yscale="log")
    axes.set_yticks([0.5, 0.75, 1, 1.5, 2, 4, 7], ["0.5", "0.75", "1", "1.5", "2", "4", "7"])
    axes.minorticks_off()
    axes.legend(fontsize=_SMALL)


def predicted_to_measured(results: Results) -> dict[str, list[float]]:
    """Return predictions as shares of measurements, by what was predicted."""
    plans = results.get("plan", {}).get("cases", [])
    shares: dict[str, list[float]] = {
        "step of a plan": [each["predicted_step_s"] / each["measured_step_s"] for each in plans]
    }
    for result in network_results(results).values():
        for case in cases(result):
            shares.setdefault(case.kind, []).append(1 + case.error_share)
    return {name: values for name, values in shares.items() if values}


def _losses(axes: Any, results: Results) -> None:
    axes.set_title("Loss against time")
    curves = results.get("time-to-loss", {}).get("curves", [])
    for curve in curves:
        label = f"{curve['name']}, {per_flop_name(curve)}"
        axes.plot(curve["seconds"], curve["loss"], ".-", markersize=4, label=label)
    if not curves:
        _nothing(axes, "time-to-loss")
        return
    axes.set(xlabel="seconds", ylabel="loss of samples never seen")
    axes.legend(fontsize=_SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _nothing(axes: Any, names: str) -> None:
    axes.text(0.5, 0.5, f"no result of {names}", ha="center", transform=axes.transAxes)
    axes.set_axis_off()

"""What `network` and `time-to-loss` measured, for people: rows, tables, pictures.

A ratio of tokens per second says something of *training together* only where ATOM's peers averaged
meanwhile: rows in whose window no round ended are marked wherever they are shown, and the largest
ratio is that of the others.

Both results hold the same four things of each method: tokens a second, bytes sent for a token,
utilisation of the devices, loss against time. A `LinkPanel` holds them in one form, whichever run
they are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atombench.network.measured import smoothed
from atomtrain.units import format_count

Row = Mapping[str, Any]
UNFINISHED = "no round finished"
"""The word for a row in which ATOM's peers did not average."""
_BUSY = 0.25


def rounds_finished(row: Row) -> int:
    """Return how many rounds ended, with a mean of several peers, while ATOM was measured."""
    return int((row.get("atom") or {}).get("rounds_averaged", 0))


def largest_ratio(rows: Iterable[Row]) -> float | None:
    """Return the largest ratio of ATOM to the pipeline among the rows with finished rounds."""
    counted = (fair_ratio(row) for row in rows if rounds_finished(row))
    return max((ratio for ratio in counted if ratio is not None), default=None)


def fair_ratio(row: Row) -> float | None:
    """Return a row's ratio; to the pipeline with full steps where those were too slow to be run.

    The rate of such a pipeline is simulated. `None`: something was not measured.
    """
    known = [row["ratio"], row.get("full_step_ratio") or row["ratio"]]
    return None if row["ratio"] is None else float(min(known))


def disturbed(row: Row, rows: Iterable[Row]) -> bool:
    """Say whether something else had the machine's cores.

    ATOM's peers wait for no link, so a row in which they computed less than a quarter of what they
    did at best was disturbed.
    """
    best = max((each["atom_tokens_per_s"] or 0.0 for each in rows), default=0.0)
    return bool(row["atom_tokens_per_s"]) and row["atom_tokens_per_s"] < _BUSY * best


def link_name(row: Row) -> str:
    """Return rate, round trip and what gets lost on a row's link, for people."""
    return f"{rate_name(row['link_bits_per_s'])}, {way_name(row)}"


def way_name(row: Row) -> str:
    """Return round trip of a row's link, and what gets lost if anything does, for people."""
    lost = row.get("loss_share")
    return f"{1000 * row['round_trip_s']:g} ms" + (f", {100 * lost:g}% lost" if lost else "")


def rate_name(bits_per_s: float) -> str:
    """Return a rate for people, such as `"1 Gbit/s"` or `"87.8 kbit/s"`."""
    for limit, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= 0.9995 * limit:
            return f"{bits_per_s / limit:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"


def per_flop_name(row: Row) -> str:
    """Return a row's link for each FLOP that a peer computes, such as `"26 bits/MFLOP"`.

    It is what makes links of fast and slow processors comparable.
    """
    rounded = float(f"{1e6 * row['bits_per_flop']:.3g}")
    return f"{rounded:,g} bits/MFLOP"


def meant(row: Row) -> str:
    """Return what a row's link stands for, for people."""
    stands_for = row["stands_for"]
    if not stands_for:
        return "itself"
    model = f", {stands_for['model']}" if stands_for["model"] else ""
    return f"{stands_for['gpu']} on {rate_name(stands_for['bits_per_s'])}{model}"


def command(result: Mapping[str, Any]) -> str:
    """Return the command that measured a result."""
    asked = result["asked"]
    links = "" if asked["links"] == "all" else f" --links {asked['links']}"
    links += "".join(f" --link {link}" for link in asked["link"])
    return f"atom bench network --peers {result['peers']}{links} --json"


def network_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return those of the results, by the names of their files, that are of this benchmark.

    There may be several, of different numbers of peers: `network.json`, `network-4-peers.json`.
    """
    return {
        name: result
        for name, result in results.items()
        if name == "network" or name.startswith("network-")
    }


METHODS = {
    "atom": "ATOM",
    "pipeline": "pipeline",
    "data_parallel": "data parallel",
    "swapped_parallel": "data parallel, swapped",
}
"""Keys of a row, and what people call them."""
_LOSSES = "time-to-loss"
_WIDTHS = (22, 10, 16, 12, 12)


class MethodPanel(NamedTuple):
    """One method on one link; `None`: this run did not measure it."""

    tokens_per_s: float
    sent_bytes_per_token: float | None
    utilisation: float | None
    seconds: Sequence[float]
    """When each step ended, from the start of training."""
    loss: Sequence[float]
    """Of each of these steps; empty where the run kept none."""


class LinkPanel(NamedTuple):
    """All methods on one link."""

    name: str
    methods: Mapping[str, MethodPanel]
    """By the names of `METHODS`; what failed or was left out is missing."""


def link_panels(result: Mapping[str, Any]) -> list[LinkPanel]:
    """Return the links of one result, of `network` or of `time-to-loss`, in its order."""
    return _of_curves(result["curves"]) if "curves" in result else _of_rows(result)


def all_panels(results: Mapping[str, Mapping[str, Any]]) -> list[LinkPanel]:
    """Return the links of all results of `network`, by the names of their files."""
    found = network_results(results).values()
    return [panel for result in found if "peers" in result for panel in link_panels(result)]


def text(result: Mapping[str, Any]) -> str:
    """Return a table for people: a line for each link and method."""
    heads = ("method", "tokens/s", "bytes sent/token", "utilisation", "loss")
    lines = []
    for panel in link_panels(result):
        lines += ["", panel.name.replace("\n", " "), _line(heads)]
        lines += [_line(_cells(name, method)) for name, method in panel.methods.items()]
    return "\n".join([*lines[1:], "", *_explained(result)])


def _explained(result: Mapping[str, Any]) -> Iterator[str]:
    yield "loss: before -> at the end, means of the last few steps; methods end at unlike times"
    for row in result.get("rows", []):
        if row["ratio"] is not None:
            yield f"ATOM / pipeline on {link_name(row)} ({meant(row)}): {row['ratio']:.2f}" + (
                "" if rounds_finished(row) else f", which counts for nothing: {UNFINISHED}"
            )
        yield from (f"{link_name(row)}: {error}" for error in row["errors"])


def _line(cells: Sequence[str]) -> str:
    return "  " + "  ".join(
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )


def _cells(name: str, method: MethodPanel) -> list[str]:
    sent, busy = method.sent_bytes_per_token, method.utilisation
    loss = "-"
    if method.loss:
        smooth = smoothed(method.loss)
        loss = f"{smooth[0]:.2f} -> {smooth[-1]:.2f}"
    return [
        METHODS[name],
        format_count(method.tokens_per_s),
        "-" if sent is None else f"{sent:.0f}",
        "-" if busy is None else f"{busy:.0%}",
        loss,
    ]


def _of_rows(result: Mapping[str, Any]) -> list[LinkPanel]:
    return [
        LinkPanel(
            _row_name(row, result["peers"]),
            {name: _method(row[name]) for name in METHODS if _measured(row.get(name))},
        )
        for row in result["rows"]
    ]


def _of_curves(curves: Sequence[Mapping[str, Any]]) -> list[LinkPanel]:
    keys = {label: name for name, label in METHODS.items()}
    return [
        LinkPanel(
            curve_link(next(c for c in curves if c["link"] == link)),
            {keys[c["method"]]: _method({**c, "curve": c}) for c in curves if c["link"] == link},
        )
        for link in dict.fromkeys(curve["link"] for curve in curves)
    ]


def curve_link(curve: Mapping[str, Any]) -> str:
    """Return the link of one of `time-to-loss`'s curves, and its ratio to what peers compute."""
    return f"{curve['link']}\n{per_flop_name(curve)}"


def _measured(found: Mapping[str, Any] | None) -> bool:
    return bool(found) and "left_out" not in (found or {})


def _method(found: Mapping[str, Any]) -> MethodPanel:
    learnt = found.get("curve", {})
    seconds, loss = learnt.get("seconds", []), learnt.get("loss", [])
    rate = found.get("tokens_per_s") or found["tokens"][-1] / seconds[-1]
    return MethodPanel(
        rate, found.get("sent_bytes_per_token"), found.get("utilisation"), seconds, loss
    )


def _row_name(row: Mapping[str, Any], peers: int) -> str:
    name = f"{peers} peers, {link_name(row)}\n{per_flop_name(row)}"
    if row["stands_for"]:
        name += f" = {meant(row)}"
    finished = row.get("atom") is None or rounds_finished(row)
    return name if finished else f"{name} ({UNFINISHED})"


_POINTS = 100
_BARS = {
    "tokens_per_s": "tokens/s of all peers together",
    "sent_bytes_per_token": "bytes sent for each token, of all peers",
    "utilisation": "utilisation: share of what no network would allow",
}
_COLUMNS = 3
_SMALL = 8
_BAR_STEP = 0.8 / len(METHODS)
_COLORS = {name: f"C{index}" for index, name in enumerate(METHODS)}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw one result of `network` or `time-to-loss`: four things of each method on each link."""
    from matplotlib.figure import Figure

    panels = link_panels(result)
    rows = -(-len(panels) // _COLUMNS)
    bars_inches = 1.2 + 0.5 * len(panels)
    heights = [bars_inches, *[3.0] * rows]
    figure = Figure(figsize=(16.0, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(1 + rows, _COLUMNS, height_ratios=heights)
    first = None
    for column, (key, title) in enumerate(_BARS.items()):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        draw_bars(axes, panels, key, title, named=first is None)
        first = first or axes
    for index, panel in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        draw_losses(figure.add_subplot(grid[1 + row, column]), panel)
    figure.savefig(path, dpi=_POINTS)


def draw_bars(
    axes: Any, panels: Sequence[LinkPanel], key: str, title: str, *, named: bool = True
) -> None:
    """Draw one bar for each link and method; `key` is a field of `MethodPanel`."""
    drawn = False
    for index, (name, label) in enumerate(METHODS.items()):
        found = [
            (place + _BAR_STEP * (index - (len(METHODS) - 1) / 2), value)
            for place, panel in enumerate(panels)
            if (value := getattr(panel.methods.get(name), key, None))
        ]
        if not found:
            continue
        drawn = True
        places, values = [place for place, _ in found], [value for _, value in found]
        axes.barh(places, values, height=0.9 * _BAR_STEP, color=_COLORS[name], label=label)
    axes.set_yticks(range(len(panels)), [panel.name for panel in panels], fontsize=_SMALL)
    axes.tick_params(labelleft=named)
    if named:
        axes.set_ylim(len(panels) - 0.5, -2.4)  # downwards; the legend's place is above all bars
    axes.set_title(title, fontsize=_SMALL + 2)
    axes.set_xlabel("no bar: left out or failed")
    if key == "utilisation":
        axes.set_xlim(left=0)
    elif drawn:
        axes.set_xscale("log")
    axes.grid(visible=True, axis="x", linewidth=0.3)
    if drawn:
        axes.legend(fontsize=_SMALL, loc="upper center", ncols=2)


def draw_losses(axes: Any, panel: LinkPanel) -> None:
    """Draw each method's loss over the seconds since it began to train."""
    axes.set_title(panel.name, fontsize=_SMALL)
    drawn = False
    for name, method in panel.methods.items():
        if method.loss:
            drawn = True
            axes.plot(
                method.seconds, method.loss, ".-", color=_COLORS[name], markersize=4,
                label=METHODS[name],
            )  # fmt: skip
    if not drawn:
        axes.text(0.5, 0.5, "no losses in this result", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.set(xlabel="seconds of training", ylabel="loss")
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(fontsize=_SMALL)

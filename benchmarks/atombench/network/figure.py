"""Pictures of links and methods: tokens a second, bytes, utilisation, loss against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atombench.network.panels import METHODS, LinkPanel, link_panels

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

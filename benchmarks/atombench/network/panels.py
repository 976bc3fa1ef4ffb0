"""What `network` and `time-to-loss` measured, link by link and method by method, for people.

Both results hold the same four things of each method: tokens a second, bytes sent for a token,
utilisation of the devices, loss against time. Here they have one form, whichever run they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from atombench.network.curves import smoothed
from atombench.network.rows import (
    UNFINISHED,
    link_name,
    meant,
    network_results,
    per_flop_name,
    rounds_finished,
)
from atomtrain.units import format_count

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

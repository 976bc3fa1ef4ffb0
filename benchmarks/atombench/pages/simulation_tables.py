"""What pages say of simulated networks: results of `atom bench simulation`, beside real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from atombench.network.panels import (
    Row,
    disturbed,
    fair_ratio,
    rate_name,
    rounds_finished,
)
from atombench.pages import table
from atombench.pages.network_tables import Result, networks, result
from atomtrain.units import format_seconds

_Runs = Mapping[tuple[str, int, float], Sequence[float]]


def real_runs(of: Iterable[Result], gpu: str) -> _Runs:
    """Return the ratios that were measured for a model, by model, peers and the GPU's link.

    Only rows in which ATOM's peers averaged, and which nothing disturbed.
    """
    found: dict[tuple[str, int, float], list[float]] = {}
    for each in of:
        for row in each["rows"]:
            stands = row["stands_for"]
            if not stands or not stands["model"] or stands["gpu"] != gpu or row["ratio"] is None:
                continue
            if rounds_finished(row) and not disturbed(row, each["rows"]):
                key = (stands["model"], each["peers"], stands["bits_per_s"])
                found.setdefault(key, []).append(fair_ratio(row) or 0.0)
    return found


def ratios(found: Result, runs: _Runs) -> str:
    """Return simulated ratios, in bold those of real runs; equal rows of a model are one."""
    rows = _simulated(found)
    links = list(dict.fromkeys(row["link"] for row in rows))
    alike: dict[tuple[str, ...], list[int]] = {}
    for model, peers in dict.fromkeys((row["model"], row["peers"]) for row in rows):
        cells = (
            _cell(row, runs.get((model, peers, row["link_bits_per_s"]), ()))
            for row in rows
            if (row["model"], row["peers"]) == (model, peers)
        )
        alike.setdefault((model, *cells), []).append(peers)
    shown = [(model, ", ".join(map(str, of)), *cells) for (model, *cells), of in alike.items()]
    left_out = [
        (row["model"], "-", f"left out: {row['left_out']}", *["-"] * (len(links) - 1))
        for row in found["rows"]
        if "left_out" in row
    ]
    return table(("model", "peers", *links), [*shown, *left_out])


def _simulated(found: Result) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if "peers" in row]


def _cell(row: Row, runs: Sequence[float]) -> str:
    simulated = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return " ".join([simulated, *(f"**{ratio:.2f}**" for ratio in runs)])


def swarms(rows: Iterable[Row]) -> str:
    """Return what peers reach that come and go, in swarms of growing size."""
    head = (
        "peers", "groups", "of what all train alone", "round", "model averaged every",
        "contributions lost", "busiest uplink", "drift", "simulated in",
    )  # fmt: skip
    return table(
        head,
        (
            (
                f"{row['peers']:,}",
                row["group"] or "all",
                f"{row['share_of_alone']:.1%}",
                format_seconds(row["round_s"]),
                format_seconds(row["averaged_every_s"]),
                f"{row['lost_share']:.2%}",
                f"{row['busiest_up_share']:.0%}",
                f"{row['drift']:.2f}",
                f"{row['took_s']:.1f} s",
            )
            for row in rows
        ),
    )


def unsteady(found: Result) -> str:
    """Return ATOM beside pipelines of peers that differ, come and go, and how much they do."""
    how = found["fleet"]
    head = (
        "model", "peers", "link", "ATOM", "pipelines", "complete", "of these stopped", "best",
        "ratio",
    )  # fmt: skip
    return (
        f"Speeds and links spread by {how['spread']:g} (deviation of the logarithm). Peers stay "
        f"for {format_seconds(how['stay'])} and are away for {format_seconds(how['away'])} on "
        f"average.\n\n{table(head, map(_unsteady_row, found['unsteady']))}"
    )


def _unsteady_row(row: Row) -> list[object]:
    cells = [row["model"], row["peers"], rate_name(row["link_bits_per_s"])]
    cells.append(f"{row['share_of_alone']:.1%}")
    if (run := row["pipelines"]) is None:
        return [*cells, *["-"] * 5]
    again = ", recomputing" if run["recompute"] else ""
    return [
        *cells,
        f"{run['share_of_staying']:.1%}",
        f"{run['pipelines']:.1f}",
        f"{run['stopped_share']:.1%}",
        f"{run['stages']} stages, {run['wire']}{again}",
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
    ]


def _runs() -> _Runs:
    return real_runs(networks().values(), result("simulation")["gpu"])


PARTS: dict[str, Callable[[], str]] = {
    "simulation-ratios": lambda: ratios(result("simulation"), _runs()),
    "simulation-unsteady": lambda: unsteady(result("simulation")),
    "scale": lambda: swarms(result("simulation")["scale"]),
}
"""By the names that marks have."""

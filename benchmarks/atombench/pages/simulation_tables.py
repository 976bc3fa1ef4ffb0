"""What pages say of simulated networks: results of `atom bench simulation`, beside real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
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
from atomtrain.units import format_count, format_seconds

_GOAL = 20.0
_PROPORTIONAL = 0.8
_OF_AVERAGES = 8
"""Peers of the table of averages."""
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


def run_for_real(runs: _Runs) -> str:
    """Return the ratios of real runs."""
    return table(
        ("model", "peers", "link", "ratio"),
        (
            (model, peers, rate_name(rate), ", ".join(f"**{ratio:.2f}**" for ratio in found))
            for (model, peers, rate), found in sorted(runs.items())
        ),
    )


def bounds(found: Result) -> str:
    """Return of each model where a pipeline wins, and where ATOM is twenty times as fast.

    By the peers on which most models fit a pipeline.
    """
    fitting = [row for row in _simulated(found) if row["ratio"] is not None]
    peers = max(row["peers"] for row in fitting)
    rows = []
    for model in dict.fromkeys(row["model"] for row in fitting):
        alike = [row for row in fitting if (row["model"], row["peers"]) == (model, peers)]
        if alike:
            least, most = (f(alike, key=lambda row: float(row["ratio"])) for f in (min, max))
            goal = _goal_bits_per_s(alike)
            rows.append(
                (
                    model,
                    f"{least['ratio']:.2f} on {rate_name(least['link_bits_per_s'])}",
                    _above(break_even_bits_per_s(alike)),
                    f"{most['ratio']:.1f} on {rate_name(most['link_bits_per_s'])}",
                    "-" if goal is None else rate_name(goal),
                )
            )
    head = (
        f"model, {peers} peers", "least ratio", "a pipeline wins above", "largest ratio",
        f"{_GOAL:.0f} times as fast at",
    )  # fmt: skip
    return table(head, rows)


def _above(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "none of these links"
    return rate_name(bits_per_s) if bits_per_s else "all of these links"


def _goal_bits_per_s(alike: Sequence[Row]) -> float | None:
    """Return at about which rate twenty times is reached; `None`: it cannot be told.

    Where the link alone decides, the ratio grows as the rate falls.
    """
    points = sorted((row["link_bits_per_s"], row["ratio"]) for row in alike)
    reached = [rate for rate, ratio in points if ratio >= _GOAL]
    if reached:
        return float(max(reached))
    (rate, ratio), (faster, less) = points[:2]
    return rate * ratio / _GOAL if ratio * rate > _PROPORTIONAL * less * faster else None


def break_even_bits_per_s(rows: Iterable[Row]) -> float | None:
    """Return the rate above which the pipeline is faster, by `ratio` at each `link_bits_per_s`.

    Between two links both are taken to change by powers. 0: the pipeline is faster on all links;
    `None`: on none of them.
    """
    points = sorted((row["link_bits_per_s"], row["ratio"]) for row in rows)
    for (rate, ratio), (faster, after) in reversed(list(pairwise(points))):
        if ratio >= 1 > after:
            share = math.log(ratio) / math.log(ratio / after)
            return float(rate * (faster / rate) ** share)
    return 0.0 if points and points[-1][1] < 1 else None


def averages(found: Result) -> str:
    """Return how often the model is averaged: what a slow link really costs ATOM."""
    rows = [row for row in _simulated(found) if row["peers"] == _OF_AVERAGES]
    links = list(dict.fromkeys(row["link"] for row in rows))
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    return table(
        ("model", "tokens/s", *links),
        (
            (
                model,
                format_count(alike[0]["atom_tokens_per_s"]),
                *(format_seconds(row["averaged_every_s"]) for row in alike),
            )
            for model, alike in models.items()
        ),
    )


def encoding(found: Result) -> str:
    """Return what encoding is taken to cost, and what it cost on the machine of the run."""
    copies, rates = found["encoding"]["activation_copies"], found["encoding"]["elements_per_s"]
    rows = [
        (f"activations as {name}, copies of a float32", f"{used:.1f}", f"{measured:.1f}")
        for (name, used), measured in zip(
            copies["used"].items(), copies["measured"].values(), strict=True
        )
    ]
    rows += [
        (f"a fragment as {name}, elements/s", format_count(used), format_count(measured))
        for (name, used), measured in zip(
            rates["used"].items(), rates["measured"].values(), strict=True
        )
    ]
    return table(("what", "used", "measured on this machine, one core"), rows)


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


def unsteady(rows: Iterable[Row]) -> str:
    """Return ATOM beside pipelines of peers that differ, come and go."""
    head = (
        "model", "peers", "link", "ATOM", "pipelines", "complete", "of these stopped", "best",
        "ratio",
    )  # fmt: skip
    return table(head, map(_unsteady_row, rows))


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


TABLES: dict[str, Callable[[], str]] = {
    "simulation-ratios": lambda: ratios(result("simulation"), _runs()),
    "simulation-real": lambda: run_for_real(_runs()),
    "simulation-bounds": lambda: bounds(result("simulation")),
    "simulation-averages": lambda: averages(result("simulation")),
    "simulation-encoding": lambda: encoding(result("simulation")),
    "simulation-fleet": lambda: swarms([result("simulation")["fleet"]]),
    "simulation-unsteady": lambda: unsteady(result("simulation")["unsteady"]),
    "scale": lambda: swarms(result("simulation")["scale"]),
}
"""By the names that marks have."""

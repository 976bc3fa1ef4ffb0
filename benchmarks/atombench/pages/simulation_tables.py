"""What pages say of simulated networks: results of `atom bench simulation`, beside real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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


def conditions(found: Result) -> str:
    """Say what all simulations have in common."""
    return (
        f"Each peer is one {found['gpu']}; the round trip is {1000 * found['round_trip_s']:g} ms.\n"
    )


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


def run_for_real(found: Result, runs: _Runs) -> str:
    """Say what was run for real on links that the table lacks, and of which models nothing was."""
    rows = _simulated(found)
    shown = {(row["model"], row["peers"], row["link_bits_per_s"]) for row in rows}
    others = [
        f"{model} with {peers} peers on {rate_name(rate)} **{max(of):.2f}**"
        for (model, peers, rate), of in sorted(runs.items())
        if (model, peers, rate) not in shown
    ]
    models = dict.fromkeys(row["model"] for row in rows)
    missing = [model for model in models if model not in {of for of, _, _ in runs}]
    said = [f"Run for real on other links: {'; '.join(others)}.\n"] if others else []
    if missing:
        said.append(
            f"**Not run for real, on any link: {', '.join(missing)}.** All their figures on this "
            "page are simulated or planned.\n"
        )
    return "\n".join(said)


class _Fitting(NamedTuple):
    """The rows with the number of peers on which most models fit a pipeline."""

    peers: int
    models: Mapping[str, Sequence[Row]]
    """By name: one row for each link."""

    @property
    def rows(self) -> list[Row]:
        """Those of all models."""
        return [row for alike in self.models.values() for row in alike]


def _fitting(found: Result) -> _Fitting:
    rows = [row for row in _simulated(found) if row["ratio"] is not None]
    peers = max(row["peers"] for row in rows)
    models: dict[str, list[Row]] = {}
    for row in rows:
        if row["peers"] == peers:
            models.setdefault(row["model"], []).append(row)
    return _Fitting(peers, models)


def goal(found: Result) -> str:
    """Say where ATOM is twenty times as fast as a pipeline."""
    fitting = _fitting(found)
    reached = [row for row in fitting.rows if row["ratio"] >= _GOAL]
    largest = max(fitting.rows, key=lambda row: float(row["ratio"]))
    where = "; ".join(
        f"{row['model']} on {rate_name(row['link_bits_per_s'])} ({row['ratio']:.1f})"
        for row in reached
    )
    said = f"With {fitting.peers} peers: " + (
        f"{where}."
        if reached
        else f"**nowhere in this table.** The largest ratio is {largest['ratio']:.1f}, of "
        f"{largest['model']} on {rate_name(largest['link_bits_per_s'])}."
    )
    rates = {model: _slower_bits_per_s(alike) for model, alike in fitting.models.items()}
    slower = [f"{model} {rate / 1e6:.2g}" for model, rate in rates.items() if rate is not None]
    if slower:
        said += (
            "\nOn slower links the pipeline's rate falls with the link's, and ATOM's does not. So "
            f"it is reached at about (Mbit/s): {', '.join(slower)}. ATOM then averages the model "
            "that much less often, too."
        )
    return f"{said}\n"


def _slower_bits_per_s(alike: Sequence[Row]) -> float | None:
    """Return at about which rate, below those of the rows, twenty times is reached.

    `None`: it cannot be told, or is reached on one of these links. Where the link alone decides,
    the ratio grows as the rate falls.
    """
    (rate, ratio), (faster, less) = sorted((r["link_bits_per_s"], r["ratio"]) for r in alike)[:2]
    grows = ratio * rate > _PROPORTIONAL * less * faster
    return float(rate * ratio / _GOAL) if ratio < _GOAL and grows else None


def pipeline_wins(found: Result) -> str:
    """Say in one sentence where a pipeline is faster."""
    fitting = _fitting(found)
    rates = {model: break_even_bits_per_s(alike) for model, alike in fitting.models.items()}
    above = [f"{model} {rate / 1e6:.0f}" for model, rate in rates.items() if rate]
    always = [model for model, rate in rates.items() if rate == 0]
    never = [model for model, rate in rates.items() if rate is None]
    parts = []
    if above:
        parts.append(
            f"where a peer's link carries more than the break-even (Mbit/s: {', '.join(above)})"
        )
    if always:
        parts.append(f"on every one of these links with {', '.join(always)}")
    wins, loses = " and ".join(parts), f"; with {', '.join(never)} on none of these links"
    if not parts:
        nearest = min(fitting.rows, key=lambda row: float(row["ratio"]))
        wins = "nowhere in this table"
        loses = (
            f"; nearest to it is {nearest['model']} on links of "
            f"{rate_name(nearest['link_bits_per_s'])}, at {nearest['ratio']:.2f}"
        )
    elif not never:
        loses = ""
    return f"With {fitting.peers} peers **a pipeline wins {wins}{loses}.**\n"


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


def fleet(found: Row) -> str:
    """Say what a swarm of ten thousand reaches."""
    return (
        f"{found['rounds']:,} rounds of {found['model']} in groups of {found['group']}, on links "
        f"of {rate_name(found['link_bits_per_s'])}, with peers that differ, come and go. Changes "
        f"travel as {found['wire']}, bases as float16. Simulating it took {found['took_s']:.1f} s. "
        f"The peers train {found['share_of_alone']:.1%} of what they would if all always stayed, "
        f"and lose {found['lost_share']:.2%} of contributions. A round takes "
        f"{found['round_s']:.1f} s, and replicas are {found['drift']:.2f} of a round's change "
        "apart.\n"
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
    "simulation-conditions": lambda: conditions(result("simulation")),
    "simulation-ratios": lambda: ratios(result("simulation"), _runs()),
    "simulation-real": lambda: run_for_real(result("simulation"), _runs()),
    "simulation-goal": lambda: goal(result("simulation")),
    "simulation-wins": lambda: pipeline_wins(result("simulation")),
    "simulation-unsteady": lambda: unsteady(result("simulation")),
    "scale": lambda: swarms(result("simulation")["scale"]),
}
"""By the names that marks have."""
PRINTED: dict[str, Callable[[], str]] = {
    "simulation-averages": lambda: averages(result("simulation")),
    "simulation-encoding": lambda: encoding(result("simulation")),
    "simulation-fleet": lambda: fleet(result("simulation")["fleet"]),
}
"""What is on no page, by name."""

"""Writes docs/simulation.md of results of `atom bench simulation` and `atom bench network`.

`python -m atombench.pages.simulation_page benchmarks/results/simulation.json
benchmarks/results/network*.json`: the second kind has the cases that were run for real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atombench.network.panels import disturbed, fair_ratio, rate_name, rounds_finished
from atombench.pages.break_even import break_even_bits_per_s
from atomtrain.units import format_count, format_seconds

_INTRODUCTION = """\
# ATOM against the best pipeline, simulated

Tokens per second of ATOM over those of the best pipeline of the same peers, each a {gpu}, with a
round trip of {round_trip_ms:g} ms. **Simulated, but for the ratios in bold**, which come beside the
simulated ones where as many real processes ran; [network.md](network.md) says what both sides are
granted, what is measured, and how far simulation and measurement are apart. Below 1 the pipeline
wins. `-`: the model fits no pipeline of so many of these devices; ATOM's plan fits one of them.

The pipeline is an ideal one: bfloat16 or 8-bit activations, whichever is faster with what encoding
them takes, all transfers behind computation, the best number of stages, and no cost for the
averaging between several of them. Its bubble is a ninth of a step at most; ratios of up to about
1.1 are that bubble, and longer steps would make the two even. ATOM loads the model through PCIe,
and keeps, sends to the host or computes again what forward leaves, whichever its plan says is
fastest.

Written by `python -m atombench.pages.simulation_page benchmarks/results/simulation.json
benchmarks/results/network*.json`, from what `atom bench simulation --json` and
`atom bench network --json` printed.
"""
_MARKED = """\
**Bold: run for real** (`atom bench network --peers {peers}`), with a small model on links slowed
until sending a token's activations takes as much of the time to compute it as that model's take.
Ratios differ from the simulated ones mostly because the small model's ATOM computes forward twice,
and because real pipelines of processes that share cores do not reach the ideal one's rate.
"""
_GOAL = 20.0
_PROPORTIONAL = 0.8
_Runs = Mapping[tuple[str, int, float], Sequence[float]]


def page(result: Mapping[str, Any], networks: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page; `networks` are results that may hold cases which were run for real."""
    runs = measured_ratios(networks, result["gpu"])
    introduction = _INTRODUCTION.format(
        gpu=result["gpu"], round_trip_ms=1000 * result["round_trip_s"]
    )
    rows = [row for row in result["rows"] if "peers" in row]
    return "\n".join(
        [
            introduction,
            *_ratios(rows, runs),
            "",
            *([_MARKED.format(peers=_or(sorted({peers for _, peers, _ in runs})))] if runs else []),
            *_not_run(rows, runs),
            "",
            *_goal(rows),
            "",
            *_where_a_pipeline_wins(rows),
            "",
            *_averages(rows),
            "",
            *_encoding(result["encoding"]),
            "",
            *_left_out(result["rows"]),
            *_fleet(result["fleet"]),
            "",
            *_unsteady(result.get("unsteady", []), result["fleet"]),
        ]
    )


def measured_ratios(networks: Sequence[Mapping[str, Any]], gpu: str) -> _Runs:
    """Return the ratios that were measured for a model, by model, peers and the GPU's link.

    Only rows in which ATOM's peers averaged, and which nothing disturbed.
    """
    found: dict[tuple[str, int, float], list[float]] = {}
    for result in networks:
        for row in result["rows"]:
            meant = row["stands_for"]
            if not meant or not meant["model"] or meant["gpu"] != gpu or row["ratio"] is None:
                continue
            if rounds_finished(row) and not disturbed(row, result["rows"]):
                key = (meant["model"], result["peers"], meant["bits_per_s"])
                found.setdefault(key, []).append(fair_ratio(row) or 0.0)
    return found


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _ratios(rows: list[dict[str, Any]], runs: _Runs) -> Iterator[str]:
    links = list(dict.fromkeys(row["link"] for row in rows))
    yield "## Ratio of tokens per second"
    yield ""
    yield f"| model | peers | {' | '.join(links)} |"
    yield f"|---|---|{'---|' * len(links)}"
    for model, peers in dict.fromkeys((row["model"], row["peers"]) for row in rows):
        alike = [r for r in rows if (r["model"], r["peers"]) == (model, peers)]
        cells = [_cell(row, runs.get((model, peers, row["link_bits_per_s"]), ())) for row in alike]
        yield f"| {model} | {peers} | {' | '.join(cells)} |"
    shown = {(row["model"], row["peers"], row["link_bits_per_s"]) for row in rows}
    others = [(case, ratios) for case, ratios in sorted(runs.items()) if case not in shown]
    if others:
        yield ""
        yield (
            "Run for real on other links: "
            + "; ".join(
                f"{model} with {peers} peers on {rate / 1e6:g} Mbit/s **{max(ratios):.2f}**"
                for (model, peers, rate), ratios in others
            )
            + "."
        )


def _not_run(rows: list[dict[str, Any]], runs: _Runs) -> Iterator[str]:
    """Name the models of which there is no real run at all."""
    models = dict.fromkeys(row["model"] for row in rows)
    missing = [model for model in models if model not in {of for of, _, _ in runs}]
    if missing:
        yield (
            f"**Not run for real, on any link: {', '.join(missing)}.** Their figures, on all of "
            "this page, are simulated or planned."
        )


def _cell(row: Mapping[str, Any], runs: Sequence[float]) -> str:
    """Return the simulated ratio, and those of real runs, if there were any."""
    simulated = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return " ".join([simulated, *(f"**{ratio:.2f}**" for ratio in runs)])


def _goal(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say where ATOM reaches twenty times the pipeline's rate, by the peers on which most fit."""
    fitting = [row for row in rows if row["ratio"] is not None]
    peers = max(row["peers"] for row in fitting)
    alike = [row for row in fitting if row["peers"] == peers]
    reached = [row for row in alike if row["ratio"] >= _GOAL]
    largest = max(alike, key=lambda row: float(row["ratio"]))
    yield f"## Where ATOM is {_GOAL:.0f} times as fast"
    yield ""
    where = "; ".join(
        f"{row['model']} on {row['link_bits_per_s'] / 1e6:g} Mbit/s ({row['ratio']:.1f})"
        for row in reached
    )
    yield f"With {peers} peers: " + (
        f"{where}."
        if reached
        else f"**nowhere in this table.** The largest ratio is {largest['ratio']:.1f}, of "
        f"{largest['model']} on {largest['link_bits_per_s'] / 1e6:g} Mbit/s."
    )
    slower = []
    for model in dict.fromkeys(row["model"] for row in alike):
        points = sorted((r["link_bits_per_s"], r["ratio"]) for r in alike if r["model"] == model)
        (rate, ratio), (faster, less) = points[:2]
        # Where the link alone decides, the ratio grows as the rate falls.
        if ratio < _GOAL and ratio * rate > _PROPORTIONAL * less * faster:
            slower.append(f"{model} {rate * ratio / _GOAL / 1e6:.2g}")
    if slower:
        yield (
            "On slower links the pipeline's rate falls with the link's and ATOM's does not, so it "
            f"is reached at about (Mbit/s): {', '.join(slower)}. ATOM then averages the model as "
            "much less often, too."
        )


def _where_a_pipeline_wins(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One sentence, for the number of peers on which most models fit a pipeline."""
    fitting = [row for row in rows if row["ratio"] is not None]
    peers = max(row["peers"] for row in fitting)
    above, always, never = [], [], []
    for model in dict.fromkeys(row["model"] for row in fitting):
        alike = [r for r in fitting if (r["model"], r["peers"]) == (model, peers)]
        rate = break_even_bits_per_s(alike)
        if rate is None:
            never.append(model)
        elif rate == 0:
            always.append(model)
        else:
            above.append(f"{model} {rate / 1e6:.0f}")
    parts = []
    if above:
        parts.append(
            f"where a peer's link carries more than the break-even (Mbit/s: {', '.join(above)})"
        )
    if always:
        parts.append(f"on every one of these links with {', '.join(always)}")
    wins, loses = " and ".join(parts), f"; with {', '.join(never)} on none of these links"
    if not parts:
        nearest = min(fitting, key=lambda row: float(row["ratio"]))
        wins = "nowhere in this table"
        loses = (
            f"; nearest to it is {nearest['model']} on links of "
            f"{nearest['link_bits_per_s'] / 1e6:g} Mbit/s, at {nearest['ratio']:.2f}"
        )
    elif not never:
        loses = ""
    yield "## Where a pipeline wins"
    yield ""
    yield f"With {peers} peers **a pipeline wins {wins}{loses}.**"


def _averages(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How often the model is averaged: what a slow link really costs ATOM."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    peers = 8
    yield f"## How often ATOM averages the whole model ({peers} peers)"
    yield ""
    yield f"| model | tokens/s | {' | '.join(links)} |"
    yield f"|---|---|{'---|' * len(links)}"
    for model in dict.fromkeys(row["model"] for row in rows):
        alike = [r for r in rows if (r["model"], r["peers"]) == (model, peers)]
        cells = [
            f"{format_seconds(row['averaged_every_s'])}, "
            f"{format_count(row['averaged_every_tokens'])} tokens"
            for row in alike
        ]
        rate = format_count(alike[0]["atom_tokens_per_s"])
        yield f"| {model} | {rate} | {' | '.join(cells)} |"


def _encoding(encoding: Mapping[str, Any]) -> Iterator[str]:
    copies, rates = encoding["activation_copies"], encoding["elements_per_s"]
    yield "## What encoding takes"
    yield ""
    yield "| what | used | measured on this machine, one core |"
    yield "|---|---|---|"
    for name, used in copies["used"].items():
        measured = copies["measured"][name]
        yield f"| activations as {name}, copies of a float32 | {used:.1f} | {measured:.1f} |"
    for name, used in rates["used"].items():
        measured = format_count(rates["measured"][name])
        yield f"| a fragment as {name}, elements/s | {format_count(used)} | {measured} |"


def _left_out(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if "left_out" in row:
            yield f"{row['model']} is left out: {row['left_out']}"
            yield ""


def _fleet(fleet: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {fleet['peers']:,} peers"
    yield ""
    yield (
        f"{fleet['rounds']:,} rounds of {fleet['model']} in groups of {fleet['group']}, changes "
        f"travelling as {fleet['wire']} and bases as float16, links of 100 Mbit/s, peers that "
        "differ, come and go: "
        f"simulated in {fleet['took_s']:.1f} s. "
        f"{fleet['share_of_alone']:.1%} of what as many peers train that always stay, "
        f"{fleet['lost_share']:.2%} of contributions lost, a round in {fleet['round_s']:.1f} s, "
        f"replicas {fleet['drift']:.2f} of a round's change apart. [scale.md](scale.md) says what "
        "is not in it."
    )


def _unsteady(rows: list[dict[str, Any]], fleet: Mapping[str, Any]) -> Iterator[str]:
    """ATOM beside pipelines of unlike peers; an older result has no such rows."""
    if not rows:
        return
    yield "## Peers that differ, come and go"
    yield ""
    yield (
        f"Speeds and links spread by {fleet['spread']:g} (deviation of the logarithm); peers stay "
        f"for {format_seconds(fleet['stay'])} and are away for {format_seconds(fleet['away'])} on "
        "average. ATOM's tokens are told as a share of what all peers train alone that always "
        "stay, the pipelines' as one of what the same unlike peers reach as pipelines if all stay. "
        "[scale.md](scale.md#pipelines-of-such-peers) says what a pipeline is granted there."
    )
    yield ""
    yield (
        "| model | peers | link | ATOM | pipelines | complete | of these stopped | best | ratio |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        run = row["pipelines"]
        cells = [row["model"], str(row["peers"]), rate_name(row["link_bits_per_s"])]
        cells.append(f"{row['share_of_alone']:.1%}")
        if run is None:
            cells += ["-"] * 5
        else:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            again = ", recomputing" if run["recompute"] else ""
            cells += [
                f"{run['share_of_staying']:.1%}",
                f"{run['pipelines']:.1f}",
                f"{run['stopped_share']:.1%}",
                f"{run['stages']} stages, {run['wire']}{again}",
                ratio,
            ]
        yield f"| {' | '.join(cells)} |"
    yield ""


if __name__ == "__main__":
    found, *others = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    sys.stdout.write(page(found, others))

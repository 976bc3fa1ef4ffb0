"""Writes docs/simulation.md of a result of `atom bench simulation`.

`python -m atomtrain.benchmarks.simulation_page benchmarks/results/simulation.json`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atomtrain.benchmarks.break_even import break_even_bits_per_s
from atomtrain.pages import print_page_of_result
from atomtrain.units import format_count, format_seconds

_INTRODUCTION = """\
# ATOM against the best pipeline, simulated

Tokens per second of ATOM over those of the best pipeline of the same peers, each a {gpu}, with a
round trip of {round_trip_ms:g} ms. **Nothing here is measured**; [network.md](network.md) says what
both sides are granted, what is measured, and how far simulation and measurement are apart. Below 1
the pipeline wins. `-`: the model fits no pipeline of so many of these devices; ATOM trains it on
one.

The pipeline is an ideal one: bfloat16 or 8-bit activations, whichever is faster with what encoding
them takes, all transfers behind computation, the best number of stages, and no cost for the
averaging between several of them. Its bubble is a ninth of a step at most; ratios of up to about
1.1 are that bubble, and longer steps would make the two even. ATOM loads the model through PCIe,
and keeps, sends to the host or computes again what forward leaves, whichever its plan says is
fastest.

Written by `python -m atomtrain.benchmarks.simulation_page benchmarks/results/simulation.json`, from
what `atom bench simulation --json` printed.
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the page."""
    introduction = _INTRODUCTION.format(
        gpu=result["gpu"], round_trip_ms=1000 * result["round_trip_s"]
    )
    rows = [row for row in result["rows"] if "peers" in row]
    return "\n".join(
        [
            introduction,
            *_ratios(rows),
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
        ]
    )


def _ratios(rows: list[dict[str, Any]]) -> Iterator[str]:
    links = list(dict.fromkeys(row["link"] for row in rows))
    yield "## Ratio of tokens per second"
    yield ""
    yield f"| model | peers | {' | '.join(links)} |"
    yield f"|---|---|{'---|' * len(links)}"
    for model, peers in dict.fromkeys((row["model"], row["peers"]) for row in rows):
        alike = [r for r in rows if (r["model"], r["peers"]) == (model, peers)]
        cells = ["-" if row["ratio"] is None else f"{row['ratio']:.2f}" for row in alike]
        yield f"| {model} | {peers} | {' | '.join(cells)} |"


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


if __name__ == "__main__":
    print_page_of_result(page)

"""Writes docs/network-results.md of a result of `atom bench network`.

`python -m atomtrain.benchmarks.network_page benchmarks/results/network.json`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from atomtrain.pages import print_page_of_result
from atomtrain.units import format_count

_CLOSE = 0.1
_BUSY = 0.25
"""A row in which ATOM computed less than this share of what it computed at best was disturbed: its
peers wait for no link."""


class Case(NamedTuple):
    """One prediction of the simulation beside what was measured."""

    link: str
    what: str
    predicted: float
    measured: float

    @property
    def error_share(self) -> float:
        """How far the prediction was off, of what was measured."""
        return self.predicted / self.measured - 1


def page(result: Mapping[str, Any]) -> str:
    """Return the page."""
    machine = result["machine"]
    return "\n".join(
        [
            "# Networks: what was measured",
            "",
            f"`atom bench network --json` with {result['peers']} peers on {machine['cores']} cores "
            f"({machine['processor']}), load {result['load_average_before']:.1f} before. "
            "[network.md](network.md) says who competes and how to read this. Written by "
            "`python -m atomtrain.benchmarks.network_page benchmarks/results/network.json`.",
            "",
            *_rows(result["rows"]),
            "",
            *_simulated(result["rows"]),
            "",
        ]
    )


def cases(rows: list[dict[str, Any]]) -> list[Case]:
    """Return all predictions that were measured: ATOM, its rounds, and every pipeline tried."""
    found = []
    for row in rows:
        link = _link(row)
        atom, pipeline = row.get("atom"), row.get("pipeline")
        if atom:
            rates = (atom["predicted_tokens_per_s"], atom["tokens_per_s"])
            found.append(Case(link, "ATOM, tokens/s", *rates))
            lasted_s = atom["round_s"]
            if lasted_s:
                mean_s = sum(lasted_s) / len(lasted_s)
                found.append(Case(link, "ATOM, round in s", atom["predicted_round_s"], mean_s))
        for trial in pipeline["trials"] if pipeline else ():
            if trial["tokens_per_s"]:
                rates = (trial["predicted_tokens_per_s"], trial["tokens_per_s"])
                found.append(Case(link, trial["pipeline"], *rates))
    return found


def _rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| link | round trip | stands for | ATOM, tokens/s | of as many alone | pipeline | "
        "data parallel | ratio |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    best = max((row["atom_tokens_per_s"] or 0 for row in rows), default=0)
    disturbed = False
    for row in rows:
        rates = [
            "-" if value is None else format_count(value)
            for value in (
                row["atom_tokens_per_s"],
                row["pipeline_tokens_per_s"],
                row["data_parallel_tokens_per_s"],
            )
        ]
        share = (row.get("atom") or {}).get("share_of_alone")
        rates.insert(1, "-" if share is None else f"{share:.2f}")
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        if row["atom_tokens_per_s"] and row["atom_tokens_per_s"] < _BUSY * best:
            ratio, disturbed = f"({ratio})", True
        yield (
            f"| {row['link_bits_per_s'] / 1e6:.4g} Mbit/s | {1000 * row['round_trip_s']:g} ms | "
            f"{_meant(row)} | {' | '.join(rates)} | {ratio} |"
        )
    if disturbed:
        yield ""
        yield (
            "In brackets: something else had the machine's cores in that row, for ATOM computed "
            "far less than in the others though it waits for no link. It says nothing."
        )


def _simulated(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = cases(rows)
    close = [case for case in found if abs(case.error_share) <= _CLOSE]
    yield "## Simulated and measured"
    yield ""
    yield (
        f"{len(close)} of {len(found)} predictions are within 10% of what was measured. PyTorch's "
        "own schedules wait for transfers that the simulation lets overlap: they are what is "
        "predicted too fast on slow links, and no more than a second baseline."
    )
    yield ""
    yield "| link | what | predicted | measured | off by |"
    yield "|---|---|---|---|---|"
    for case in found:
        yield (
            f"| {case.link} | {case.what} | {case.predicted:.4g} | {case.measured:.4g} | "
            f"{case.error_share:+.0%} |"
        )


def _link(row: Mapping[str, Any]) -> str:
    return f"{row['link_bits_per_s'] / 1e6:.4g} Mbit/s, {1000 * row['round_trip_s']:g} ms"


def _meant(row: Mapping[str, Any]) -> str:
    meant = row["stands_for"]
    if not meant:
        return "itself"
    model = f", {meant['model']}" if meant["model"] else ""
    return f"{meant['gpu']} on {meant['bits_per_s'] / 1e6:g} Mbit/s{model}"


if __name__ == "__main__":
    print_page_of_result(page)

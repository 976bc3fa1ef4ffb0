"""What a row of `atom bench network` counts for, and where its results lie.

A ratio of tokens per second says something of *training together* only where ATOM's peers averaged
meanwhile: rows in whose window no round ended are marked wherever they are shown, and the largest
ratio is that of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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

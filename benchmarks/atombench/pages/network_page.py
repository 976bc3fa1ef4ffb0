"""Writes docs/network-results.md of results of `atom bench network` and `time-to-loss`.

`python -m atombench.pages.network_page benchmarks/results/network*.json
benchmarks/results/time-to-loss.json`
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atombench.network.cases import Case, cases
from atombench.network.measured import smoothed
from atombench.network.panels import (
    UNFINISHED,
    Row,
    command,
    disturbed,
    meant,
    per_flop_name,
    rate_name,
    rounds_finished,
    way_name,
)
from atomtrain.units import format_count

Result = Mapping[str, Any]
_TWO = ("atom", "pipeline")
_PARALLEL = ("data_parallel", "swapped_parallel")
_INTRODUCTION = """\
# Networks: what was measured

[network.md](network.md) says who competes and how to read this. Written by
`python -m atombench.pages.network_page benchmarks/results/network*.json
benchmarks/results/time-to-loss.json`.
"""
_LOSSES = """\
## Loss against time

`atom bench time-to-loss --json`: {peers} peers, the same weights, text and optimizer, about
{train_s:.0f} s for each method, all at one learning rate. ATOM's peers step on their own share of
the tokens, so in as many tokens they make {peers} times as many updates; at this rate and this
early that is worth more than averaging now and then costs. So this table says who gets how far in a
given time. What averaging costs, with each side at its own best rate, is in
[quality.md](quality.md).

| link | for each FLOP | method | seconds | tokens | loss | ATOM was there after | \
loss, equal tokens | ATOM's |
|---|---|---|---|---|---|---|---|---|"""
_COLUMNS = """\
*Predicted before* is today's simulation of what was measured before the run: layers on a core of
their own, what each stage of a pipeline computes without the network, what ATOM's peers train each
for itself just before and after, and the link's rate both ways at once. *Times in the run* says how
much longer the same computation took of the processors while the run was measured: stages'
operations of a step, or ATOM's steps. That is the machine, whose speed changes from minute to
minute; of ATOM's steps it is also what averaging takes of the cores. *Off by with these* is the
same simulation with these times: it is no prediction, and judges the model of network, pipeline and
swarm."""
_BRACKETS = f"""\
In brackets, and in no figure quoted elsewhere: *{UNFINISHED}* while ATOM was measured, so its peers
trained each for itself; or *disturbed*, that is, something else had the machine's cores, for ATOM
computed far less than in the other rows though it waits for no link."""


def page(results: Sequence[Result]) -> str:
    """Return the page; the results in the order given."""
    networks = [result for result in results if "rows" in result]
    lines = [_INTRODUCTION]
    for result in networks:
        lines += [*_section(result), ""]
    lines += [_BRACKETS, ""] if any(_marks(result["rows"]) for result in networks) else []
    for result in results:
        lines += [*_losses(result), ""] if "curves" in result else []
    return "\n".join([*lines, *_simulated(networks), ""])


def _section(result: Result) -> Iterator[str]:
    machine = result["machine"]
    yield f"## {_title(result)}"
    yield ""
    yield (
        f"`{command(result)}` on {machine['processor']}, load "
        f"{result['load_average_before']:.1f} before; a peer computes "
        f"{result['peer_flops_per_s'] / 1e9:.1f} GFLOP/s."
    )
    yield ""
    yield from _rows(result["rows"])


def _title(result: Result) -> str:
    """Return a section's title; several results may have as many peers."""
    asked, machine = command(result), result["machine"]
    what = {
        "--links plain": ": plain links",
        "--links stand-ins": ": links that stand for a GPU's",
        "--links alone": ": the swarm against its peers alone",
        "--link ": ": further links",
    }
    more = next((text for part, text in what.items() if f"{part}" in asked), "")
    return f"{result['peers']} peers on {machine['cores']} cores{more}"


def _losses(result: Result) -> Iterator[str]:
    yield _LOSSES.format(peers=result["peers"], train_s=result["train_s"])
    compared = {(each["link"], each["baseline"]): each for each in result["reached"]}
    for curve in result["curves"]:
        found = compared.get((curve["link"], curve["method"]))
        there = equal = ours = "-"
        if found is not None:
            there = "never" if found["atom_s"] is None else f"{found['atom_s']:.0f} s"
            equal = f"{found['baseline_loss_at_equal_tokens']:.2f}"
            ours = f"{found['atom_loss_at_equal_tokens']:.2f}"
        cells = [
            curve["link"],
            per_flop_name(curve),
            curve["method"],
            f"{curve['seconds'][-1]:.0f}",
            format_count(curve["tokens"][-1]),
            f"{smoothed(curve['loss'])[-1]:.2f}",
            there,
            equal,
            ours,
        ]
        yield f"| {' | '.join(cells)} |"


def _marks(rows: Sequence[Row]) -> dict[int, str]:
    """Return the numbers of rows whose ratio does not count, and why."""
    found = {}
    for index, row in enumerate(rows):
        if row["ratio"] is None:
            continue
        if disturbed(row, rows):
            found[index] = "disturbed"
        elif not rounds_finished(row):
            found[index] = UNFINISHED
    return found


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| link | round trip | for each FLOP | stands for | ATOM, tokens/s | of as many alone | "
        "rounds finished | pipeline | data parallel: with all memory, swapped | ratio | "
        "bytes a token: ATOM, pipeline | "
        "utilisation: ATOM, pipeline |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    marks = _marks(rows)
    for index, row in enumerate(rows):
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        if (full := row.get("full_step_ratio")) is not None:
            ratio += f" ({full:.0f} to full steps, simulated)"
        if index in marks:
            ratio = f"({ratio}: {marks[index]})"
        cells = [
            rate_name(row["link_bits_per_s"]),
            way_name(row),
            per_flop_name(row),
            meant(row),
            _count(row["atom_tokens_per_s"]),
            _share_of_alone(row.get("atom") or {}),
            str(rounds_finished(row)) if row["atom_tokens_per_s"] else "-",
            _count(row["pipeline_tokens_per_s"]),
            ", ".join(_count(row.get(f"{name}_tokens_per_s")) for name in _PARALLEL),
            ratio,
            ", ".join(_number(row, name, "sent_bytes_per_token", "{:.0f}") for name in _TWO),
            ", ".join(_number(row, name, "utilisation", "{:.0%}") for name in _TWO),
        ]
        yield f"| {' | '.join(cells)} |"


def _share_of_alone(atom: Row) -> str:
    if (share := atom.get("share_of_alone")) is None:
        return "-"
    shares = atom.get("shares_of_alone", [])
    spread = f" ({min(shares):.2f} to {max(shares):.2f})" if len(shares) > 1 else ""
    return f"{share:.2f}{spread}"


def _number(row: Row, method: str, key: str, form: str) -> str:
    value = (row.get(method) or {}).get(key)
    return "-" if value is None else form.format(value)


def _count(value: float | None) -> str:
    return "-" if value is None else format_count(value)


def _simulated(results: Sequence[Result]) -> Iterator[str]:
    found = [(result["peers"], case) for result in results for case in cases(result)]
    kinds: dict[str, list[Case]] = {}
    for _, case in found:
        kinds.setdefault(case.kind, []).append(case)
    yield "## Simulated and measured"
    yield ""
    right = sum(case.right for _, case in found)
    own = [case for _, case in found if case.knowing is not None]
    yield (
        f"**{right} of {len(found)} are within 10% of what was measured**, with the times of the "
        f"very run where a result holds them ({len(own)}), else with those of just before; "
        f"{sum(case.close for _, case in found)} with those of just before alone."
    )
    yield ""
    yield _COLUMNS
    yield ""
    yield from _apart([case for _, case in found if len(case.each) > 1])
    yield from _known(own)
    yield "| what | within 10% | of | furthest off |"
    yield "|---|---|---|---|"
    for name, alike in kinds.items():
        worst = max((case.counted_error_share for case in alike), key=abs)
        yield f"| {name} | {sum(c.right for c in alike)} | {len(alike)} | {worst:+.0%} |"
    yield ""
    yield "Every one of them, what counts as a miss in bold:"
    yield ""
    yield (
        "| peers | link | what | predicted before | measured | off by | times in the run | "
        "off by with these |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for peers, case in found:
        before = f"{case.error_share:+.0%}"
        yield (
            f"| {peers} | {case.link} | {case.what} | {case.predicted:.4g} | {_told(case)} | "
            f"{before if case.right or case.knowing is not None else f'**{before}**'} | "
            f"{_share(case.drift_share)} | {_knowing(case)} |"
        )


def _apart(cases: Sequence[Case]) -> Iterator[str]:
    """Say how far measurements of one and the same thing are apart, if there are any."""
    if cases:
        shares = [case.spread_share for case in cases]
        yield (
            "Measurements differ among themselves, too: the best pipeline of a row is measured two "
            "or three times, minutes apart, and the mean counts. These rates differ by "
            f"{statistics.median(shares):.0%} (median), {max(shares):.0%} at most."
        )
        yield ""


def _known(cases: Sequence[Case]) -> Iterator[str]:
    """Say how far predictions and the model alone are off, where the run's times are known."""
    if cases:
        close = sum(case.right for case in cases)
        drifted = [abs(case.drift_share) for case in cases if case.drift_share is not None]
        largest = f", {max(drifted):.0%} at most" if drifted else ""
        yield (
            f"Of the {len(cases)} with times of the run {close} are within 10% with these, "
            f"{sum(case.close for case in cases)} as predicted before. From before to the run "
            f"times changed by {statistics.median(drifted or [0.0]):.0%} (median){largest}."
        )
        yield ""


def _knowing(case: Case) -> str:
    share = _share(case.knowing_error_share)
    return share if case.right or case.knowing is None else f"**{share}**"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:+.0%}"


def _told(case: Case) -> str:
    if len(case.each) == 1:
        return f"{case.measured:.4g}"
    return f"{case.measured:.4g} ({', '.join(f'{each:.4g}' for each in case.each)})"


def main(paths: Sequence[str]) -> None:
    """Print the page of the results in these files."""
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    sys.stdout.write(page(results))


if __name__ == "__main__":
    main(sys.argv[1:])

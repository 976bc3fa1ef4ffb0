"""`atom simulate --rounds`: many unlike peers that come and go, on each link, and as pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atomresearch.simulation.fleet import Averaging, FleetRun, Peers, simulate_fleet, unlike
from atomresearch.simulation.link import PAYLOAD_SHARE, PipelineLink
from atomresearch.simulation.pipeline_fleet import PipelinesRun, simulate_pipelines
from atomresearch.simulation.site import site_of
from atomtrain.units import format_bytes, format_count, format_seconds, parse_rate

if TYPE_CHECKING:
    from atomresearch.simulate_options import SimulateOptions
    from atomtrain.planning.search.batch_search import Prospect

_ANCHOR_BYTES_PER_PARAMETER = 4


def fleet_rows(
    options: SimulateOptions, found: Prospect, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each link; rates in bits per second.

    `pipelines` is what the same peers reach as pipelines in the same time, `None` if the model fits
    none, and `ratio` ATOM's tokens per second to theirs.
    """
    assert options.rounds is not None
    averaging = _averaging(options, found)
    site = site_of(found, options.peers, options.local_steps, options.wire)
    rows = []
    for rate in rates:
        peers = _peers(options, found, rate)
        run = simulate_fleet(peers, averaging, options.rounds, options.seed)
        link = PipelineLink(
            bits_per_s=PAYLOAD_SHARE * min(_out(options, rate), rate),
            one_way_s=options.round_trip / 2,
        )
        others = simulate_pipelines(site, peers, link, run.elapsed_s, options.seed)
        theirs = others.tokens_per_s if others else 0.0
        rows.append(
            {
                "link_bits_per_s": rate,
                "rounds": options.rounds,
                **run._asdict(),
                "pipelines": others._asdict() if others else None,
                "ratio": run.tokens_per_s / theirs if theirs else None,
            }
        )
    return rows


def fleet_text(options: SimulateOptions, rows: Sequence[dict[str, Any]]) -> str:
    """Return two tables for people: ATOM, and pipelines of the same peers."""
    groups = "one group of all" if options.group == 0 else f"groups of {options.group}"
    lines = [
        f"{options.rounds} rounds of {options.peers} unlike peers, {groups}; they stay for "
        f"{format_seconds(options.stay)} and are away for {format_seconds(options.away)}, on "
        "average",
        f"{'link':>11}  {'tokens/s':>9}  {'of all alone':>12}  {'round':>8}  {'model every':>11}"
        f"  {'lost':>6}  {'uplink':>6}  {'to join':>8}  {'drift':>6}  sent a token",
    ]
    for row in rows:
        run = FleetRun(**{name: row[name] for name in FleetRun._fields})
        lines.append(
            f"{row['link_bits_per_s'] / 1e6:>5g} Mbit/s  {format_count(run.tokens_per_s):>9}"
            f"  {run.share_of_alone:>12.1%}  {format_seconds(run.round_s):>8}"
            f"  {format_seconds(run.averaged_every_s):>11}  {run.lost_share:>6.2%}"
            f"  {run.busiest_up_share:>6.1%}  {format_seconds(run.join_s):>8}  {run.drift:>6.3f}"
            f"  {format_bytes(round(run.sent_bytes_per_token))}"
        )
    return "\n".join([*lines, "", *_pipelines_text(rows)])


def _pipelines_text(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "The same peers as pipelines, like with like; who leaves is replaced by one who is spare, "
        "who fetches the stage's state"
    )
    yield (
        f"{'link':>11}  {'tokens/s':>9}  {'of all staying':>14}  {'complete':>8}  {'stopped':>7}"
        f"  {'ratio':>6}  best pipelines"
    )
    for row in rows:
        link = f"{row['link_bits_per_s'] / 1e6:>5g} Mbit/s"
        if row["pipelines"] is None:
            yield f"{link}  {'-':>9}  do not fit the devices"
            continue
        run = PipelinesRun(**row["pipelines"])
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        yield (
            f"{link}  {format_count(run.tokens_per_s):>9}  {run.share_of_staying:>14.1%}"
            f"  {run.pipelines:>8.1f}  {run.stopped_share:>7.1%}  {ratio:>6}"
            f"  {run.stages} stages, {run.wire}{', recomputing' if run.recompute else ''}"
        )


def _out(options: SimulateOptions, rate: float) -> float:
    """Return the rate of a usual peer's way out, in bits per second."""
    return parse_rate(options.upload, "--upload") * 8 if options.upload else rate


def _peers(options: SimulateOptions, found: Prospect, rate: float) -> Peers:
    random = np.random.default_rng(options.seed)
    count, spread = options.peers, options.spread
    out = _out(options, rate)
    way_s = options.round_trip / 4  # a message passes two peers' ways, and comes back
    return Peers(
        step_s=unlike(found.plan.step_s, count, spread, random),
        up_bits_per_s=PAYLOAD_SHARE * unlike(min(out, rate), count, spread, random),
        down_bits_per_s=PAYLOAD_SHARE * unlike(rate, count, spread, random),
        one_way_s=unlike(way_s, count, spread, random),
        stay_s=options.stay,
        away_s=options.away,
    )


def _averaging(options: SimulateOptions, found: Prospect) -> Averaging:
    from atomresearch.simulation.compare import ELEMENTS_PER_S
    from atomresearch.simulation.site import base_bytes, fragments_of, travelling_bytes

    parameters = found.analysis.parameters
    fragments = fragments_of(parameters, options.local_steps)
    elements = -(-parameters // fragments)
    group = min(options.peers, options.group or options.peers)  # 0 stands for all
    contribution_bytes, mean_bytes = travelling_bytes(elements, options.wire, group)
    return Averaging(
        tokens_per_step=found.tokens_per_step,
        contribution_bytes=contribution_bytes,
        mean_bytes=mean_bytes,
        fragments=fragments,
        local_steps=options.local_steps,
        group_peers=options.group or None,
        base_bytes=base_bytes(elements, options.wire),
        state_bytes=_ANCHOR_BYTES_PER_PARAMETER * parameters,
        codec_s=elements / ELEMENTS_PER_S[options.wire],
    )

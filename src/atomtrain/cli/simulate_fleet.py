"""`atom simulate --rounds`: many unlike peers that come and go, on each link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atomtrain.simulation.compare import PAYLOAD_SHARE
from atomtrain.simulation.fleet import Averaging, FleetRun, Peers, simulate_fleet, unlike
from atomtrain.units import format_bytes, format_count, format_seconds, parse_rate

if TYPE_CHECKING:
    from atomtrain.cli.simulate import SimulateOptions
    from atomtrain.planning.prospect import Prospect

_ANCHOR_BYTES_PER_PARAMETER = 4


def fleet_rows(
    options: SimulateOptions, found: Prospect, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each link; rates in bits per second."""
    assert options.rounds is not None
    averaging = _averaging(options, found)
    rows = []
    for rate in rates:
        run = simulate_fleet(_peers(options, found, rate), averaging, options.rounds, options.seed)
        rows.append({"link_bits_per_s": rate, "rounds": options.rounds, **run._asdict()})
    return rows


def fleet_text(options: SimulateOptions, rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for people."""
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
    return "\n".join(lines)


def _peers(options: SimulateOptions, found: Prospect, rate: float) -> Peers:
    random = np.random.default_rng(options.seed)
    count, spread = options.peers, options.spread
    out = parse_rate(options.upload, "--upload") * 8 if options.upload else rate
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
    from atomtrain.simulation.encoding import ELEMENTS_PER_S
    from atomtrain.simulation.site import base_bytes, fragments_of, travelling_bytes

    parameters = found.analysis.parameters
    fragments = fragments_of(parameters)
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

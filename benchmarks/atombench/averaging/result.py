"""What `atom bench averaging` says of the rounds that it has measured."""

from __future__ import annotations

import statistics

from atombench.common import Result


def streams_result(
    moved_bytes: float,
    rate: float,
    measured: dict[str, list[Result]],
    theirs: dict[str, list[float]],
) -> Result:
    """Return what rounds over streams took; `rate` is the link's, in bits a second."""
    ours = measured["rounds"]
    all_round_s, round_processor_s = _columns(ours, "round_s")
    all_mesh_s, mesh_processor_s = _columns(measured["plain"], "took_s")
    all_streams_s, streams_processor_s = _columns(measured["encrypted"], "took_s")
    round_s, mesh_s = statistics.median(all_round_s), statistics.median(all_mesh_s)
    streams_s = statistics.median(all_streams_s)
    hivemind_s = min((statistics.median(times) for times in theirs.values()), default=None)
    floor_s = 8 * moved_bytes / rate
    return {
        "round_s": round_s,
        "floor_s": floor_s,
        "mesh_s": mesh_s,
        "streams_s": streams_s,
        "hivemind_round_s": hivemind_s,
        "link_bits_per_s": rate,
        "times_as_fast_as_hivemind": None if hivemind_s is None else hivemind_s / round_s,
        "times_the_floor": round_s / floor_s,
        "times_the_mesh": round_s / mesh_s,
        "times_the_streams": round_s / streams_s,
        "processor_s": {  # of all peers together
            "round": round_processor_s,
            "streams": streams_processor_s,
            "mesh": mesh_processor_s,
        },
        "sent_bytes_per_peer": max(one["sent_bytes"] for one in ours),
        "all_round_s": all_round_s,
        "all_hivemind_round_s": theirs,
        "all_mesh_s": all_mesh_s,
        "all_streams_s": all_streams_s,
    }


def _columns(rows: list[Result], name: str) -> tuple[list[float], float]:
    """Return what the rows say of `name`, and their median of processor time."""
    processor_s = statistics.median(row["processor_s"] for row in rows)
    return [float(row[name]) for row in rows], processor_s

"""What pages say of measured networks: results of `atom bench network` and `time-to-loss`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from atombench.pages import table
from atomtrain.units import format_count

RESULTS = Path(__file__).parents[2] / "results"
Result = Mapping[str, Any]
_TWO = ("atom", "pipeline")
_PARALLEL = ("data_parallel", "swapped_parallel")


@functools.cache
def result(name: str) -> Result:
    """Return a result by its file's name without `.json`."""
    found: Result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def networks() -> dict[str, Result]:
    """Return all results of `network`, by name."""
    return {path.stem: result(path.stem) for path in sorted(RESULTS.glob("network*.json"))}


def network_rows(found: Result) -> str:
    """Return where a network was measured, and what each method reached on each of its links."""
    head = (
        "link", "round trip", "for each FLOP", "stands for", "ATOM, tokens/s", "of as many alone",
        "rounds finished", "pipeline", "data parallel: with all memory, swapped", "ratio",
        "bytes a token: ATOM, pipeline", "utilisation: ATOM, pipeline",
    )  # fmt: skip
    rows = [
        (
            rate_name(row["link_bits_per_s"]),
            way_name(row),
            per_flop_name(row),
            meant(row),
            _count(row["atom_tokens_per_s"]),
            _share_of_alone(row.get("atom") or {}),
            rounds_finished(row) if row["atom_tokens_per_s"] else "-",
            _count(row["pipeline_tokens_per_s"]),
            ", ".join(_count(row.get(f"{name}_tokens_per_s")) for name in _PARALLEL),
            _ratio(row, found["rows"]),
            ", ".join(_number(row, name, "sent_bytes_per_token", "{:.0f}") for name in _TWO),
            ", ".join(_number(row, name, "utilisation", "{:.0%}") for name in _TWO),
        )
        for row in found["rows"]
    ]
    return (
        f"`{command(found)}` on {found['machine']['cores']} cores of "
        f"{found['machine']['processor']}, load {found['load_average_before']:.1f} before; a peer "
        f"computes "
        f"{found['peer_flops_per_s'] / 1e9:.1f} GFLOP/s.\n\n{table(head, rows)}"
    )


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    """Return the ratio; in brackets, and with the reason, where it counts for nothing."""
    if row["ratio"] is None:
        return "-"
    ratio = f"{row['ratio']:.2f}"
    if (full := row.get("full_step_ratio")) is not None:
        ratio += f" ({full:.0f} to full steps, simulated)"
    if disturbed(row, rows):
        return f"({ratio}: disturbed)"
    return ratio if rounds_finished(row) else f"({ratio}: {UNFINISHED})"


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


def losses(found: Result) -> str:
    """Return how far each method got, and when ATOM was where the others ended."""
    compared = {(each["link"], each["baseline"]): each for each in found["reached"]}
    rows = []
    for curve in found["curves"]:
        there = equal = ours = "-"
        if (against := compared.get((curve["link"], curve["method"]))) is not None:
            there = "never" if against["atom_s"] is None else f"{against['atom_s']:.0f} s"
            equal = f"{against['baseline_loss_at_equal_tokens']:.2f}"
            ours = f"{against['atom_loss_at_equal_tokens']:.2f}"
        rows.append(
            (
                curve["link"],
                per_flop_name(curve),
                curve["method"],
                f"{curve['seconds'][-1]:.0f}",
                format_count(curve["tokens"][-1]),
                f"{smoothed(curve['loss'])[-1]:.2f}",
                there,
                equal,
                ours,
            )
        )
    head = (
        "link", "for each FLOP", "method", "seconds", "tokens", "loss", "ATOM was there after",
        "loss, equal tokens", "ATOM's",
    )  # fmt: skip
    peers = found["peers"]
    return (
        f"`atom bench time-to-loss --json`: {peers} peers, the same weights, text, optimizer and "
        f"learning rate, about {found['train_s']:.0f} s for each method. ATOM's peers each step on "
        f"their own share of the tokens, so they make {peers} times as many updates from as many "
        f"tokens.\n\n{table(head, rows)}"
    )


def predictions(found: Iterable[Case]) -> str:
    """Return how many predictions were right, in all and by kind, with the times of the run itself
    where a result has them."""
    kinds: dict[str, list[Case]] = {"all": list(found)}
    for case in kinds["all"]:
        kinds.setdefault(case.kind, []).append(case)
    return table(
        ("what", "within 10%", "of", "furthest off"),
        ((name, _right(alike), len(alike), _worst(alike)) for name, alike in kinds.items()),
    )


def _right(alike: Iterable[Case]) -> int:
    return sum(case.right for case in alike)


def _worst(alike: Iterable[Case]) -> str:
    return f"{max((case.counted_error_share for case in alike), key=abs):+.0%}"


PARTS: dict[str, Callable[[], str]] = {
    "time-to-loss": lambda: losses(result("time-to-loss")),
    "predictions": lambda: predictions(
        case for found in networks().values() for case in cases(found)
    ),
}
"""By the names that marks have; `network_rows` has those of the files."""

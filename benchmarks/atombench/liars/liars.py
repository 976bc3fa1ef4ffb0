"""Benchmark `liars`: what lying members do to a swarm's loss, and what the defences cost.

* *Rows*: eight peers learn text on a virtual clock (`learners`); two of them lie. Their loss is
  compared with that of the six others alone, with the defences that a run has by default, and with
  none. Counted are rounds until a liar was noticed, and who was expelled.
* *Means*: an owner's mean is false in all of a slice, or in one chunk of a hundred; counted is how
  many audits find it.
* *Costs*: processor time of sealing, checking and auditing in a round, and its bytes, beside those
  of the round and of the steps between two. Only they depend on what else the machine does: with
  `costs` they and the means are measured again, and the rows of the file of results stay.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from atombench.common import BenchmarkOptions, Result, description, keep_partial, progress
from atombench.liars.costs import CostsSetup, defence_costs, found_by_audits
from atombench.liars.learners import ALL, GHOSTS, Learning, learnt
from atombench.swarm.outer_swarm import Task
from atomtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LiarsSetup:
    """Inputs of the benchmark."""

    learning: Learning = field(
        default_factory=lambda: Learning(
            task=Task(steps=160), peers=8, liars=2, sequences=8, local_steps=20, fragments=4,
            wire="float16", outer="nesterov",
        )
    )  # fmt: skip
    misdeeds: tuple[str, ...] = ALL
    costs: CostsSetup = field(default_factory=CostsSetup)


QUICK = LiarsSetup(
    learning=Learning(
        task=Task(layers=1, width=32, context=32, steps=40, warmup_steps=5, text_bytes=200_000),
        peers=4, liars=1, sequences=4, local_steps=8, fragments=2, wire="float16",
        outer="nesterov",
    ),
    misdeeds=("sign flipped", "a million times the tokens", "a mean times 0.98", "tokens"),
    costs=CostsSetup(fragment_elements=200_000, members=(4,), audits=10, width=64),
)  # fmt: skip


def run(options: BenchmarkOptions, setup: LiarsSetup | None = None) -> Result:
    """Measure, and return plain JSON values; `null` stands for a loss that is not finite.

    What is known after each row is kept in the file of results.
    """
    setup = setup or (QUICK if options.quick else LiarsSetup())
    torch.set_num_threads(1)
    before = _kept(options.out, setup) if options.costs else {}
    rows: list[Result] = before.get("rows", [])
    costs = [defence_costs(setup.costs, members) for members in setup.costs.members]
    known: Result = {
        "means": found_by_audits(setup.costs),
        "costs": costs,
        "inputs": asdict(setup),
        **description(),
    }
    if not before.get("complete", True):
        known["complete"] = False
    for row in () if options.costs else _rows(setup):
        rows.append(row)
        keep_partial(_result(rows, known), options.out)
    return _result(rows, known)


def _result(rows: Sequence[Result], known: Result) -> Result:
    """Return what there is to tell; the last costs, of the largest group, go with each row."""
    cost = known["costs"][-1]
    shares = {
        "defence_bytes_share": cost["bytes_share"],
        "defence_step_share": cost["step_share"],
    }
    return {
        "rows": [row | shares for row in rows],
        "worst_ratio": max(row["ratio"] for row in rows),
        "honest_expelled": sum(row["honest_expelled"] for row in rows),
        **known,
    }


def _kept(out: Path | None, setup: LiarsSetup) -> Result:
    """Return what a file of results has.

    Raises:
        ConfigError: nothing, or something of other inputs.
    """
    try:
        before: Result = json.loads(out.read_text()) if out is not None else {}
    except (OSError, ValueError):
        before = {}
    if before.get("inputs") != json.loads(json.dumps(asdict(setup))):
        raise ConfigError(
            f"--costs keeps the rows that --out has, of the same inputs, and {out} has none; "
            "measure all first, without --costs"
        )
    return before


def _rows(setup: LiarsSetup) -> Iterator[Result]:
    how = setup.learning
    text = how.task.text()
    without = learnt(how, text).loss
    progress(f"{how.peers - how.liars} honest peers alone: {without:.4f}")
    for misdeed in setup.misdeeds:
        begun_s = time.monotonic()
        found = learnt(how, text, misdeed)
        undefended = learnt(how, text, misdeed, defended=False)
        ratio = found.loss / without
        yield {
            "misdeed": misdeed,
            "peers": how.peers if misdeed != GHOSTS else how.peers - how.liars,
            "liars": how.liars if misdeed != GHOSTS else 0,
            "loss": found.loss,
            "loss_without": without,
            "ratio": ratio,
            "undefended_loss": undefended.loss if math.isfinite(undefended.loss) else None,
            "noticed_rounds": found.noticed_rounds,
            "expelled": list(found.expelled),
            "honest_expelled": len(found.honest_expelled),
        }
        progress(
            f"{misdeed}: loss {ratio:.3f} times, undefended {undefended.loss / without:.3f};"
            f" noticed after {found.noticed_rounds} rounds, expelled {len(found.expelled)}"
            f" ({time.monotonic() - begun_s:.0f} s)"
        )

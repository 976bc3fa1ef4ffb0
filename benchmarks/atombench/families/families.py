"""`atom bench families`: is swapped training of every family what an ordinary loop does?

A small random model of each family of causal language models in transformers is trained for a few
steps, swapped through the emulated device and in an ordinary loop, and every bit is compared. A
row is one family's: its `result` is

- `equal`: losses, parameters, buffers, moments and the random state have the same bits;
- `equal at 1`: so they are with one micro-batch a step; with several, weights that layers share add
  in the order that the docs tell, which the loop knows of input and output embeddings only;
- `refused`: ATOM said in one line why it cannot be trained swapped (`reason`);
- `differs`: something has other bits (`reason` names it);
- `failed`: ATOM raised what is not an error of its own, took more memory than planned, or too long;
- `not built`: transformers cannot build it small, or cannot train it on token ids alone.

`evaluation` is `equal`, `differs`, or why it was refused. `packing` says whether `atom train
--packing` accepts the family; an accepted one is tried again with other weights and texts, and
`leaks` if documents see each other (`packing_seen`, as a share of the largest logit).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from subprocess import TimeoutExpired
from typing import Any

from atombench import forks
from atombench.common import BenchmarkOptions, Result, description, keep_partial, progress
from atombench.families.small import families
from atomtrain.engine.devices.gpus import require_gpus
from atomtrain.errors import ConfigError, nearest
from atomtrain.models.hugging_face import require_transformers
from atomtrain.topology import allowed_cores

QUICK = ("bloom", "gpt2", "llama")
_CASE = "atombench.families.case"
_CASE_S = 600.0
_START_S = 300.0
RESULTS = ("equal", "equal at 1", "refused", "differs", "failed", "not built")
WRONG = ("differs", "failed")


def run(options: BenchmarkOptions) -> Result:
    """Measure; see the module.

    Args:
        options: `quick` takes three families, `model` names the only one. `device` is where both
            compute: `cpu`, swapped through the emulated device, or `cuda`.

    Raises:
        ConfigError: transformers or the GPU is missing, or there is no such family.
    """
    require_transformers("the families of models")
    names, device = _chosen(options), options.device or "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device!r} cannot be compared; give cpu or cuda")
    require_gpus(device)
    rows: list[Result] = []
    for row in _rows(names, device):
        rows.append(row)
        progress(f"{len(rows)} of {len(names)}: {sentence(row)}")
        keep_partial(_result(rows, device), options.out)
    return _result(rows, device)


def _chosen(options: BenchmarkOptions) -> Sequence[str]:
    known = families()
    if options.model is None:
        return QUICK if options.quick else known
    if options.model not in known:
        raise ConfigError(
            f"transformers has no family {options.model!r} of causal language models."
            f"{nearest(options.model, known)} Give a model_type, such as llama"
        )
    return [options.model]


def _rows(names: Sequence[str], device: str) -> Iterator[Result]:
    """Yield a row for each family as it comes; each runs in a process of its own."""
    # What is forked from starts once, and not twice at the same time.
    forks.run([sys.executable, "-c", "pass"], _START_S)
    with ThreadPoolExecutor(len(allowed_cores())) as pool:
        tasks = [pool.submit(_row, name, device) for name in names]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _row(name: str, device: str) -> Result:
    try:
        done = forks.run([sys.executable, "-m", _CASE, name, device], _CASE_S)
    except TimeoutExpired:
        return {"family": name, "result": "failed", "reason": f"took more than {_CASE_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        reason = f"its process ended with {done.returncode} and said {said[0][:300]}"
        return {"family": name, "result": "failed", "reason": reason}
    row: Result = json.loads(lines[-1])
    return row


def _result(rows: Sequence[Result], device: str) -> Result:
    import transformers

    ordered = sorted(rows, key=lambda row: str(row["family"]))
    found = description()
    found["versions"]["transformers"] = transformers.__version__
    return {**summary(ordered), "device": device, "rows": ordered, **found}


def summary(rows: Sequence[Result]) -> Result:
    """Return what all rows say together.

    `bit_equal_share` is of the families that can be built small; `wrong` names those whose result
    is neither equal nor refused, whose evaluation differs, or that packing accepts with a leak.
    """
    counts = Counter(row["result"] for row in rows)
    built = len(rows) - counts["not built"]
    return {
        "families": len(rows),
        **{result.replace(" ", "_"): counts[result] for result in RESULTS},
        "bit_equal_share": counts["equal"] / built if built else 0.0,
        "evaluation_equal": sum(row.get("evaluation") == "equal" for row in rows),
        "packing_accepted": sum(row.get("packing") == "accepted" for row in rows),
        "packing_refused": sum(row.get("packing") == "refused" for row in rows),
        "packing_leaks": sum(row.get("packing") == "leaks" for row in rows),
        "wrong": [row["family"] for row in rows if is_wrong(row)],
    }


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Return whether a family is trained or judged wrongly, rather than refused."""
    judged = row.get("evaluation"), row.get("packing")
    return row["result"] in WRONG or judged[0] == "differs" or judged[1] == "leaks"


def sentence(row: Result) -> str:
    """Return a row in words."""
    parts = [f"{row['family']} {row['result']}"]
    if "reason" in row:
        parts[0] += f" ({row['reason']})"
    if row.get("evaluation") not in (None, "equal"):
        parts.append(f"evaluation: {row['evaluation']}")
    if "packing" in row:
        parts.append(f"packing {row['packing']}")
    return ", ".join(parts)

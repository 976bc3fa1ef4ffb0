"""What pages say of families of models: the result of `atom bench families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atombench.families.families import is_wrong
from atombench.pages import table
from atombench.pages.network_tables import result

Row = Mapping[str, Any]
_PAGE = """# Families of models

Small random models of every family of causal language models in transformers {version}, trained for
three steps of 1, 3 and 1 micro-batches on the emulated device and in an ordinary loop, written by
`python -m atombench.pages families` from `benchmarks/results/families.json`; `make families`
measures them again.

- *training*: `equal` if losses, parameters, buffers, moments and random state have the same bits,
  `equal at 1` if they have with one micro-batch a step, else what was said.
- *evaluation*: whether `Engine.evaluate` gives the model's own loss.
- *packing*: whether `atom train --packing` keeps documents apart, as probed.

"""
_NOT_BUILT = """
## Not built

Transformers has no small model of these, or cannot train it on tokens alone.

"""


def sentences() -> str:
    """Return the figures, and who is not equal."""
    found = result("families")
    built = found["families"] - found["not_built"]
    others = [f"`{row['family']}`" for row in found["rows"] if row["result"] == "refused"]
    text = (
        f"Of {found['families']} families of causal language models in transformers "
        f"{found['versions']['transformers']}, {built} were built small: {found['equal']} are "
        f"equal bit for bit, {len(others)} refused ({', '.join(others)})"
    )
    if found["equal_at_1"]:
        text += f", {found['equal_at_1']} equal with one micro-batch a step"
    if found["wrong"]:
        text += f", wrong or failed: {', '.join(f'`{name}`' for name in found['wrong'])}"
    return f"{text} (`make families`).\n"


def page() -> str:
    """Return the whole page of families."""
    found = result("families")
    rows = [row for row in found["rows"] if row["result"] != "not built"]
    head = ("family", "training", "evaluation", "packing")
    left = [
        (f"`{row['family']}`", _cell(row["reason"]))
        for row in found["rows"]
        if row["result"] == "not built"
    ]
    return (
        _PAGE.format(version=found["versions"]["transformers"])
        + sentences()
        + "\n"
        + table(head, map(_cells, rows))
        + _NOT_BUILT
        + table(("family", "reason"), left)
    )


def _cells(row: Row) -> tuple[str, ...]:
    name = f"**`{row['family']}`**" if is_wrong(row) else f"`{row['family']}`"
    training = row["result"]
    if "reason" in row:
        training += f": {_cell(row['reason'])}"
    return name, training, _cell(row.get("evaluation") or "-"), row.get("packing", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PARTS: Mapping[str, Callable[[], str]] = {"families": sentences}
"""What makes each part, by name."""

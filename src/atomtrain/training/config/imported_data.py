"""Data sets of recipes of axolotl and LLaMA-Factory, as `--data` and `--validation`.

In both, rows of several sets count once each; whoever names a set twice has its rows twice, which
here is a weight of 2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HANDLED = (
    "datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "val_set_size",
    "val_size", "mix_strategy", "interleave_probs",
)  # fmt: skip
"""Keys that are understood or told here."""
_FOLDER, _TABLE = "data", "dataset_info.json"
_ROWS_OF_FILES = ("shards", "shards_idx", "num_samples")
"""Take a part of a set's rows."""


def data_of(said: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return `data` and `validation`, as far as a recipe names them.

    Args:
        said: The recipe, by the other tool's keys.
        left_out: Gets a line for what has no counterpart.
    """
    sources = [*_of_axolotl(said, "datasets", left_out), *_of_factory(said, "dataset", left_out)]
    judged = [
        *_of_axolotl(said, "test_datasets", left_out),
        *_of_factory(said, "eval_dataset", left_out),
    ]
    if said.get("interleave_probs"):
        left_out.append(
            f"interleave_probs: {said['interleave_probs']}: shares have no counterpart; a weight "
            "says how many times a source's rows count in an epoch: --data FILE:2"
        )
    part = said.get("val_set_size", said.get("val_size"))
    if part and not judged:
        left_out.append(f"val_set_size: {part}: a twentieth of the rows is held out")
    found: dict[str, Any] = {}
    if sources:
        times = Counter(sources)
        found["data"] = tuple(name if n == 1 else f"{name}:{n}" for name, n in times.items())
    if judged:
        found["validation"] = judged[0]
        if all(not name.startswith("datasets:") for name in judged):
            found["validation"] = ",".join(judged)  # files of one source
        elif judged[1:]:
            left_out.append(f"test_datasets: one data set is measured on; left out: {judged[1:]}")
    return found


def _of_axolotl(said: Mapping[str, Any], key: str, left_out: list[str]) -> Iterator[str]:
    for part in said.get(key) or []:
        known = part if isinstance(part, Mapping) else {"path": part}
        for name in _ROWS_OF_FILES:
            if known.get(name):
                left_out.append(f"{key}: {name} of {known.get('path')}: all rows are taken")
        files = known.get("data_files")
        if files:
            yield files if isinstance(files, str) else ",".join(map(str, files))
            continue
        path = str(known.get("path"))
        if Path(path).suffix or Path(path).exists():
            yield path
        else:
            yield _named(path, known.get("name"), known.get("split"))


def _of_factory(said: Mapping[str, Any], key: str, left_out: list[str]) -> Iterator[str]:
    names = said.get(key) or []
    folder = Path(str(said.get("dataset_dir", _FOLDER)))
    table = _table(folder / _TABLE)
    for name in names.split(",") if isinstance(names, str) else map(str, names):
        known = table.get(name.strip())
        if not isinstance(known, Mapping):
            left_out.append(
                f"{key}: {name.strip()!r} is a name of {_TABLE}, and {folder} has none that knows "
                f"it; give its file with {'--data' if key == 'dataset' else '--validation'}"
            )
            continue
        if known.get("columns"):
            left_out.append(f"{key}: columns of {name.strip()!r}: rows need the names of the docs")
        if known.get("num_samples"):
            left_out.append(f"{key}: num_samples of {name.strip()!r}: all rows are taken")
        if known.get("file_name"):
            yield str(folder / str(known["file_name"]))
        else:
            yield _named(str(known.get("hf_hub_url")), known.get("subset"), known.get("split"))


def _named(name: str, subset: Any, split: Any) -> str:
    parts = [subset, split or ("train" if subset else None)]
    return ":".join(["datasets", name, *(str(part) for part in parts if part)])


def _table(file: Path) -> dict[str, Any]:
    """Return LLaMA-Factory's table of data sets, empty if it is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

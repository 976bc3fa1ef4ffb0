"""The data sets that a recipe of axolotl or LLaMA-Factory names, as `--data` and `--validation`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atomtrain.data.named import written
from atomtrain.errors import ConfigError, DataError

DATA_KEYS = (
    "datasets", "test_datasets", "dataset", "eval_dataset", "dataset_dir", "val_set_size",
    "val_size", "mix_strategy", "interleave_probs",
)  # fmt: skip
"""Keys that are understood or told here."""
_FOLDER, _TABLE = "data", "dataset_info.json"
_ROWS_OF_FILES = ("shards", "shards_idx", "num_samples")
"""Take a part of a set's rows."""
_PLACES = ("path", "name", "split", "data_files", "ds_type")
_LOADERS = ("json", "csv", "parquet", "text")
"""What axolotl calls a set that is files of one's own."""
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Of files; an id such as `org/name-2.5` has a dot, too."""
_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
"""Of axolotl's, those whose rows the docs name."""
_USUAL: dict[str, tuple[Any, ...]] = {
    "field": ("text",),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "roles_to_train": (["assistant"], ["gpt"]),
}
"""Values that say what is done anyway."""
_MOST_SHOWN = 60


def shown(value: Any) -> str:
    """Return a value of another tool's recipe in one short line."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def data_of(said: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return `data` and `validation`, as far as a recipe names them.

    Args:
        said: The recipe, by the other tool's keys.
        left_out: Gets a line for what has no counterpart.

    Raises:
        ConfigError: a data set is named by what is not a name.
    """
    sources = [*_of_axolotl(said, "datasets", left_out), *_of_factory(said, "dataset", left_out)]
    judged = [
        *_of_axolotl(said, "test_datasets", left_out),
        *_of_factory(said, "eval_dataset", left_out),
    ]
    if said.get("interleave_probs"):
        left_out.append(
            f"interleave_probs: {shown(said['interleave_probs'])}: shares have no counterpart; a "
            "weight says how many times a source's rows count in an epoch: --data FILE:2"
        )
    part = said.get("val_set_size", said.get("val_size"))
    if part is not None and not judged:
        left_out.append(f"val_set_size: {shown(part)}: a twentieth of the rows is held out")
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
    given = said.get(key) or []
    for part in given if isinstance(given, list) else [given]:
        known = part if isinstance(part, Mapping) else {"path": part}
        path = known.get("path")
        if not isinstance(path, str):
            raise ConfigError(
                f"{key}: path must be the name of a data set or a file, not {shown(path)}; "
                "correct it"
            )
        left_out += [
            f"{key}: {name} of {path}: {why}"
            for name, value in known.items()
            if (why := _unused(str(name), value))
        ]
        split, rows, _ = str(known.get("split") or "train").partition("[")
        files, is_folder = _files(known.get("data_files"), split), Path(path).is_dir()
        if files and path not in _LOADERS and not is_folder:
            left_out.append(f"{key}: data_files of {path}: all its files are taken")
            files = []
        if not files and not _is_file(path):
            yield from _named(key, path, known.get("name"), known.get("split"), left_out)
            continue
        if rows:
            left_out.append(f"{key}: split of {path}: all rows are taken")
        yield ",".join(str(Path(path, file)) if is_folder else file for file in files) or path


def _is_file(path: str) -> bool:
    """Return whether a name is that of a file or folder, as opposed to a data set's."""
    given = Path(path)
    return path.startswith(("/", ".", "~")) or given.suffix in _SUFFIXES or given.exists()


def _unused(name: str, value: Any) -> str:
    """Return why what is said of a data set is left out, or nothing if it is not."""
    if name in _PLACES or value in (None, False, "", *_USUAL.get(name, ())):
        return ""
    if name in _ROWS_OF_FILES:
        return "all rows are taken"
    if name == "type":
        known = isinstance(value, str) and value.partition(".")[0] in _TYPES
        return "" if known else "rows need the names of the docs"
    return f"{shown(value)} has no counterpart"


def _files(given: Any, split: str) -> list[str]:
    """Return the names of files: of one, of several, or by split, of which the first may do."""
    if isinstance(given, Mapping):
        given = given.get(split, next(iter(given.values()), None))
    return (
        [str(file) for file in given] if isinstance(given, list) else [str(given)] if given else []
    )


def _of_factory(said: Mapping[str, Any], key: str, left_out: list[str]) -> Iterator[str]:
    names = said.get(key) or []
    names = names.split(",") if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{key} must be names of data sets, not {shown(names)}; correct it")
    folder = Path(str(said.get("dataset_dir", _FOLDER)))
    table = _table(folder / _TABLE)
    for name in map(str.strip, names):
        known = table.get(name)
        instead = f"give its file with {'--data' if key == 'dataset' else '--validation'}"
        if not isinstance(known, Mapping):
            left_out.append(
                f"{key}: {name!r} is a name of {_TABLE}, and {folder} has none that knows it; "
                f"{instead}"
            )
            continue
        for part in ("columns", "tags"):
            if known.get(part):
                left_out.append(f"{key}: {part} of {name!r}: rows need the names of the docs")
        if known.get("num_samples"):
            left_out.append(f"{key}: num_samples of {name!r}: all rows are taken")
        if known.get("file_name"):
            yield str(folder / str(known["file_name"]))
        elif known.get("hf_hub_url"):
            hub = str(known["hf_hub_url"])
            yield from _named(key, hub, known.get("subset"), known.get("split"), left_out)
        else:
            left_out.append(f"{key}: {name!r} is neither a file nor of Hugging Face; {instead}")


def _named(key: str, name: str, subset: Any, split: Any, left_out: list[str]) -> Iterator[str]:
    parts = [subset, split or ("train" if subset else None)]
    found = ":".join(["datasets", name, *(str(part) for part in parts if part)])
    try:
        written(found)
    except DataError:
        left_out.append(f"{key}: {shown(split or name)} of {name} has no counterpart; left out")
    else:
        yield found


def _table(file: Path) -> dict[str, Any]:
    """Return LLaMA-Factory's table of data sets, empty if it is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

"""Data and recipe files from a stranger end in one line, soon and small."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hostile_runs import refused, told
from tests.support.mutators import nested

pytest.importorskip("transformers")
Write = Callable[[Path], None]


def content(data: bytes | str) -> Write:
    def write(file: Path) -> None:
        file.write_bytes(data.encode() if isinstance(data, str) else data)

    return write


def long(begin: str, end: str, megabytes: int = 300) -> Write:
    """Write one line of so many megabytes."""

    def write(file: Path) -> None:
        with file.open("w") as stream:
            stream.write(begin)
            for _ in range(megabytes):
                stream.write("the cat " * (1 << 17))
            stream.write(end)

    return write


def parquet(share: float) -> Write:
    def write(file: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet as tables

        tables.write_table(pyarrow.table({"text": ["the cat sat"] * 5000}), file)
        os.truncate(file, int(file.stat().st_size * share))

    return write


def sparse(file: Path) -> None:
    file.write_bytes(b"")
    os.truncate(file, 6 << 30)


ROW = json.dumps({"text": "the cat sat"})
DATA: dict[str, tuple[str, Write]] = {
    "a line of 300 MB": ("a.jsonl", long('{"text": "', '"}\n')),
    "a line of 15 MB": ("a.jsonl", long('{"text": "', '"}\n', 15)),
    "a line without end": ("a.jsonl", sparse),
    "a list of one text": ("a.json", long('[{"text": "', '"}]')),
    "a list of lists": ("a.json", content("[" * 10**6)),
    "a list of numbers": ("a.json", content("[" + "0," * (40 << 20) + "0]")),
    "a list that does not end": ("a.json", content("[" + f"{ROW}," * 1000)),
    "a list without commas": ("a.json", content(f"[{ROW} {ROW}]")),
    "more behind a list": ("a.json", content(f"[{ROW}] {ROW}")),
    "an object": ("a.json", content('{\n"a": {}\n}')),
    "nested": ("a.jsonl", content(nested(10**6) + "\n")),
    "numbers": ("a.jsonl", content("1\n" * 1000)),
    "not a number": ("a.jsonl", content('{"text": NaN}\n' * 10)),
    "a long number": ("a.jsonl", content('{"text": ' + "9" * 10**6 + "}\n")),
    "lone surrogates": ("a.jsonl", content('{"text": "\\ud800"}\n' * 5000)),
    "utf-16": ("a.jsonl", content((ROW + "\n").encode("utf-16"))),
    "utf-16 text": ("a.txt", content(("the cat " * 5000).encode("utf-16"))),
    "binary": ("a.txt", content(bytes(range(256)) * 100)),
    "parquet cut": ("a.parquet", parquet(0.6)),
    "parquet of nothing": ("a.parquet", parquet(0.0)),
    "a cell of 300 MB": ("a.csv", long('text\n"', '"\n')),
    "a quote without end": ("a.csv", content('text\n"the cat\n' * 3)),
    "a table of nothing": ("a.tsv", content("")),
    "NUL in a table": ("a.csv", content(b"text\n\0\n")),
    "keys without end": ("a.jsonl", content(json.dumps({f"k{i}": 0 for i in range(10**5)}) + "\n")),
    "messages of lists": ("a.jsonl", content('{"messages": [[[]]]}\n' * 9)),
    "roles": ("a.jsonl", content('{"messages": [{"role": {"a": 1}, "content": "b"}]}\n' * 9)),
    "answers of nothing": ("a.jsonl", content('{"prompt": "a", "completion": ""}\n' * 9)),
}


@pytest.mark.parametrize("name", DATA)
def test_data_are_refused(name: str, honest: Path, tmp_path: Path) -> None:
    suffix, write = DATA[name]
    file = tmp_path / suffix
    write(file)
    refused(tmp_path, "data", "inspect", str(file), "--model", str(honest))
    file.unlink()


def test_a_pipe_is_refused(honest: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    refused(tmp_path, "data", "inspect", str(tmp_path / "a.jsonl"), "--model", str(honest))


def test_a_text_of_one_line_is_taken(honest: Path, tmp_path: Path) -> None:
    """Running text is cut into pieces: its lines may be as long as they are."""
    long("", "", 4)(tmp_path / "a.txt")
    found = told(tmp_path, "data", "inspect", str(tmp_path / "a.txt"), "--model", str(honest),
                 most_s=60.0)  # fmt: skip
    assert (found.code, found.errors) == (0, "")


def _aliases() -> str:
    """Return YAML of which each line is ten times the one before."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    return "\n".join(lines)


RECIPES = {
    "nested": "steps: " + "[" * 5000,
    "nested objects": "steps: " + "{a: " * 5000,
    "aliases": _aliases(),
    "an alias of itself": "&a steps: *a",
    "a list": "- steps: 1",
    "a number beyond": "steps: " + "9" * 5000,
    "steps beyond": "steps: 1e400",
    "NaN": "learning-rate: .nan",
    "negative": "sequences: -5",
    "context beyond": "context: 99999999999999999999",
    "peers beyond": "peers: 1000000000",
    "vocabulary beyond": "vocabulary: 99999999999999",
    "threads beyond": "threads: 99999999999",
    "unknown": "evil: 1",
    "code": "steps: !!python/object/apply:os.system [x]",
    "a path": "model: ../../../etc/passwd",
    "not utf-8": "steps: \udcff",
    "control": "steps: \x07",
    "larger than 1 MiB": "steps: 1\n#" + "x" * (2 << 20),
    "a key of a list": "[a, b]: 1",
    "memory beyond": "device-memory: 9e999GiB",
    "a pattern": "data: '/nowhere/*'",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_refused(name: str, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(RECIPES[name].encode(errors="surrogateescape"))
    refused(tmp_path, "train", str(file), "--plain", "--host", "127.0.0.1")

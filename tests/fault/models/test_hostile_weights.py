"""Weights and tokenizers from a stranger end in one line, soon and small."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fault.models.test_hostile_folders import TRAIN, changed, large, link, pipe
from tests.support.hostile_runs import refused
from tests.support.mutators import Change, cut, damage, edit, nested, put, swapped

pytest.importorskip("transformers")
SOON = ["--micro-batch", "2", "--head-pieces", "1", "--check-model", "never"]
PREPARED_S = 90.0
"""Weights are read last: when all else of a run was found to be possible."""
WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"


def values(value: float, dtype: torch.dtype = torch.float32) -> Change:
    """Put one such number into a tensor in the middle."""

    def change(folder: Path) -> None:
        tensors = {name: t.to(dtype) for name, t in load_file(folder / WEIGHTS).items()}
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def header(edited: Callable[[dict[str, Any]], Any]) -> Change:
    """Write another header over the same numbers."""

    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        stored = json.loads(data[8 : 8 + length])
        made = edited(stored)
        text = made if isinstance(made, bytes) else json.dumps(made).encode()
        body = data[8 + length :]
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + body)

    return change


def entry(**said: Any) -> Change:
    """Say something else of one tensor."""

    def edited(stored: dict[str, Any]) -> dict[str, Any]:
        name = "model.layers.1.mlp.up_proj.weight"
        return {**stored, name: {**stored[name], **said}}

    return header(edited)


def indexed(content: Any, *, renamed: bool = False) -> Change:
    """Put an index beside the weights, or in their place."""

    def change(folder: Path) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / INDEX).write_text(text)
        if renamed:
            (folder / WEIGHTS).unlink()

    return change


def length(number: int, size_bytes: int = 0) -> Change:
    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(number.to_bytes(8, "little") + data[8:])
        if size_bytes:
            os.truncate(folder / WEIGHTS, size_bytes)

    return change


def huge_model(folder: Path) -> None:
    """Weights that are there, larger than any memory, and take nothing on the disk."""
    rows = 1 << 26
    edit("config.json", vocab_size=rows, hidden_size=4096, num_hidden_layers=0)(folder)
    shape = {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, rows * 8192]}
    end = rows * 8192
    norm = {"dtype": "BF16", "shape": [4096], "data_offsets": [end, end + 8192]}
    text = json.dumps({"model.embed_tokens.weight": shape, "model.norm.weight": norm}).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / WEIGHTS, 8 + len(text) + end + 8192)


def _overlapping(stored: dict[str, Any]) -> dict[str, Any]:
    first = stored["model.layers.0.mlp.up_proj.weight"]
    return {**stored, "model.layers.1.mlp.up_proj.weight": first}


SHARD = {"weight_map": {"model.norm.weight": "../x.safetensors"}}
FILES: dict[str, Change] = {
    "one NaN": values(float("nan")),
    "one infinity": values(float("inf")),
    "NaN in bfloat16": values(float("nan"), torch.bfloat16),
    "infinity in float16": values(float("-inf"), torch.float16),
    "empty": put(WEIGHTS, b""),
    "a header of 2^63": length(2**63),
    "a header of 0": length(0),
    "a header of 3 GiB": length(3 << 30, 4 << 30),
    "a header of 90 MiB": header(lambda _: b"[" + b"{}," * (30 << 20) + b"{}]"),
    "a header nested": header(lambda _: nested(100_000).encode()),
    "a header that is a list": header(lambda _: []),
    "a header not utf-8": header(lambda _: b"\xff" * 100),
    "an entry that is a list": header(lambda stored: {**stored, "model.norm.weight": []}),
    "offsets swapped": entry(data_offsets=[100, 0]),
    "offsets negative": entry(data_offsets=[-6144, 0]),
    "offsets beyond": entry(data_offsets=[2**60, 2**60 + 6144]),
    "offsets as texts": entry(data_offsets=["a", "b"]),
    "overlapping": header(_overlapping),
    "a shape beyond": entry(shape=[2**40, 2**40]),
    "a negative shape": entry(shape=[-48, -32]),
    "10^5 dimensions": entry(shape=[2**62] * 100_000),
    "another shape": entry(shape=[32, 48]),
    "unknown type": entry(dtype="F4"),
    "integers": entry(dtype="I32"),
    "cut": cut(WEIGHTS, 0.8),
    "cut in the header": cut(WEIGHTS, 0.01),
    "a pipe": pipe(WEIGHTS),
    "a device": link(WEIGHTS, "/dev/zero"),
    "larger than memory": huge_model,
    "index a list": indexed([1]),
    "index nested": indexed(nested(100_000)),
    "index elsewhere": indexed(SHARD),
    "index of dots": indexed({"weight_map": {"a": ".."}}),
    "index of numbers": indexed({"weight_map": {"a": 7}}),
    "index of a list": indexed({"weight_map": ["model.safetensors"]}),
    "index of what is not there": indexed({"weight_map": {"a": "b.safetensors"}}, renamed=True),
    "index larger than memory": large(INDEX, "{}"),
    **{f"damaged {seed}": damage(WEIGHTS, seed, 2000) for seed in range(4)},
}


@pytest.mark.parametrize("name", FILES)
def test_weights_are_refused(name: str, honest: Path, text: Path, tmp_path: Path) -> None:
    folder = changed(honest, tmp_path, FILES[name])
    lines = [
        refused(tmp_path, "evaluate", str(folder), "--data", str(text), "--context", "16"),
        refused(
            tmp_path,
            "train",
            "--model",
            str(folder),
            "--data",
            str(text),
            *TRAIN,
            *SOON,
            most_s=PREPARED_S,
        ),
    ]
    if name in list(FILES)[:4]:
        assert all("'model.layers.1.mlp.up_proj.weight' with values that" in line for line in lines)


def step(part: str, *steps: dict[str, Any]) -> Change:
    """Give a tokenizer these steps."""
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}

    def change(folder: Path) -> None:
        made: dict[str, Any] = {"type": "Sequence", key[part]: list(steps)}
        edit(TOKENIZER, **{part: made})(folder)

    return change


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


LONGER = base64.b64encode((4).to_bytes(4, "little") + b"\0" * 4 + b"x" * 100_000 + b"\0").decode()
MODEL = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
TOKENIZERS: dict[str, Change] = {
    "empty": put(TOKENIZER, ""),
    "a list": put(TOKENIZER, "[]"),
    "nested": put(TOKENIZER, nested(100_000)),
    "nested within": edit(TOKENIZER, normalizer=json.loads(nested(500))),
    "utf-16": put(TOKENIZER, "{}".encode("utf-16")),
    "larger than memory": large(TOKENIZER, "{}"),
    "a pipe": pipe(TOKENIZER),
    "elsewhere": link(TOKENIZER, "/etc/hostname"),
    "text doubled": step("normalizer", *[replaced({"String": "a"}, "aa")] * 31),
    "text a thousand times longer": step("normalizer", replaced({"String": "a"}, "a" * 1000)),
    "text between characters": step("normalizer", *[replaced({"Regex": "x*"}, "a")] * 20),
    "text prepended": step("normalizer", *[{"type": "Prepend", "prepend": "a" * 10**6}] * 3),
    "bytes doubled": step("normalizer", *[{"type": "ByteLevel"}] * 30),
    "table that lengthens": step(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": LONGER}
    ),
    "steps without end": step("normalizer", *[{"type": "NFKC"}] * 10_000),
    "pattern of groups": step("pre_tokenizer", split("(a+)+$"), {"type": "ByteLevel"}),
    "pattern of choices": step("pre_tokenizer", split("(a|a|[a-z ])*[0-9]"), {"type": "ByteLevel"}),
    "pattern of powers": step(
        "pre_tokenizer", split(r"\w*\w*\w*\w*\w*\w*;"), {"type": "ByteLevel"}
    ),
    "pattern of itself": step("pre_tokenizer", split(r"(?<a>a\g<a>?b)")),
    "broken pattern": step("pre_tokenizer", split("(((")),
    "words without end": edit(
        TOKENIZER,
        model={**MODEL, "max_input_chars_per_word": 10**9, "vocab": {"[UNK]": 0, "a": 1, "##a": 2}},
    ),
    "no unknown token": edit(
        TOKENIZER, model={**MODEL, "max_input_chars_per_word": 9, "vocab": {"zz": 3}}
    ),
    "numbers beyond": edit(
        TOKENIZER, model={"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}
    ),
    "numbers negative": edit(TOKENIZER, model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "merges of nothing": edit(
        TOKENIZER, model={"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}
    ),
    "unigram of NaN": edit(
        TOKENIZER, model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}
    ),
    **{f"damaged {seed}": damage(TOKENIZER, seed) for seed in range(4)},
    **{
        f"swapped {key}": swapped(TOKENIZER, key, 1) for key in ("model", "added_tokens", "decoder")
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_refused(name: str, honest: Path, text: Path, tmp_path: Path) -> None:
    folder = changed(honest, tmp_path, TOKENIZERS[name])
    refused(tmp_path, "generate", str(folder), "--tokens", "1", "--prompt", "a" * 100)
    refused(tmp_path, "data", "inspect", str(text), "--model", str(folder))


def test_links_into_a_hubs_cache_are_followed(honest: Path, text: Path, tmp_path: Path) -> None:
    """There each file is a link to where its content lies."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    shutil.copytree(honest, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    refused(tmp_path, "data", "inspect", str(tmp_path / "no.txt"), "--model", str(snapshot))
    from atomtrain.data.tokenizer import read_tokenizer
    from atomtrain.models.hugging_face import read_config

    assert read_config(snapshot).vocabulary == 300
    assert read_tokenizer(snapshot).vocabulary <= 300

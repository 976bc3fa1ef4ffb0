"""Checkpoints from a stranger end in one line, soon and small, whatever their checksums say."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.checkpoint import open_checkpoint, save
from atomtrain.models import make_model
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from tests.support.hostile_runs import refused, told
from tests.support.hugging_face_models import LLAMA, SENTENCE
from tests.support.mutators import Change, cut, damage, nested, put

Meta = dict[str, Any]
Edit = Callable[[Meta, dict[str, str], dict[str, Tensor]], None]
MANIFEST = "manifest.json"
SIZES = {"config": LLAMA, "vocabulary": 300, "context": 128, "width": 32, "files": {}}


def honest_parts() -> tuple[Meta, dict[str, str], dict[str, Tensor]]:
    """Return what a run of the smallest model saves."""
    from atomtrain.data.tokenizer import Tokenizer

    recipe = new_recipe(TrainOptions(model="tiny"))
    tokenizer = Tokenizer.train([SENTENCE * 4], 300)
    torch.manual_seed(0)
    model = make_model(recipe.sizes)
    tensors = {f"{name}/parameter": p.detach() for name, p in model.named_parameters()}
    meta = {"recipe": recipe.to_json(), "separator": tokenizer.separator_text, "data": None}
    return json.loads(json.dumps(meta)), {"tokenizer.json": tokenizer.to_json()}, tensors


def recipe(**values: Any) -> Edit:
    def edit(meta: Meta, *_: Any) -> None:
        meta["recipe"].update(values)

    return edit


def sizes(**values: Any) -> Edit:
    def edit(meta: Meta, *_: Any) -> None:
        meta["recipe"]["sizes"].update(values)

    return edit


def tokenizer_with(**values: Any) -> Edit:
    def edit(_: Meta, texts: dict[str, str], __: Any) -> None:
        texts["tokenizer.json"] = json.dumps({**json.loads(texts["tokenizer.json"]), **values})

    return edit


def first(value: float) -> Edit:
    def edit(_: Meta, __: Any, tensors: dict[str, Tensor]) -> None:
        name = min(tensors)
        tensors[name] = torch.full_like(tensors[name], value)

    return edit


def other_shape(_: Meta, __: Any, tensors: dict[str, Tensor]) -> None:
    tensors[min(tensors)] = torch.zeros(3, 3)


def less(_: Meta, __: Any, tensors: dict[str, Tensor]) -> None:
    del tensors[min(tensors)]


SAVED: dict[str, Edit] = {
    "no recipe": lambda meta, *_: meta.pop("recipe"),
    "recipe a list": lambda meta, *_: meta.update(recipe=[1]),
    "recipe a text": lambda meta, *_: meta.update(recipe="x"),
    "another format": recipe(format=99),
    "unknown field": recipe(evil=1),
    "context beyond": recipe(context=2**62),
    "optimizer of lists": recipe(optimizer=[["adamw"]]),
    "schedule a number": recipe(schedule=7),
    "objective a list": recipe(objective=[]),
    "precision an object": recipe(precision={}),
    "beta NaN": recipe(beta=float("nan")),
    "model a number": recipe(model=7),
    "lora a list": recipe(lora=[1]),
    "lora of texts": recipe(lora={"r": "x", "targets": ["a"]}),
    "lora beyond": recipe(lora={"r": 2**40, "targets": "all-linear"}),
    "sizes a list": recipe(sizes=[]),
    "sizes null": recipe(sizes=None),
    "layers beyond": sizes(layers=10**7),
    "width beyond": sizes(width=2**31),
    "vocabulary beyond": sizes(vocabulary=2**31),
    "heads as text": sizes(heads="2"),
    "dropout of text": sizes(dropout="x"),
    "context within": sizes(context=2**31, width=2**20),
    "another model": recipe(sizes=SIZES),
    "another kind": recipe(sizes={**SIZES, "config": {**LLAMA, "model_type": "evil"}}),
    "nested sizes": recipe(sizes={**SIZES, "config": {"a": json.loads(nested(50))}}),
    "no separator": lambda meta, *_: meta.pop("separator"),
    "separator a number": lambda meta, *_: meta.update(separator=7),
    "separator unknown": lambda meta, *_: meta.update(separator="<nowhere>"),
    "no tokenizer": lambda _, texts, __: texts.clear(),
    "tokenizer nested": lambda _, texts, __: texts.update({"tokenizer.json": nested(10**5)}),
    "tokenizer that doubles": tokenizer_with(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
            ] * 30,
        }
    ),
    "tokenizer beyond": tokenizer_with(
        model={"type": "BPE", "vocab": {"a": 0, "b": 90_000}, "merges": []}
    ),
    "NaN": first(float("nan")),
    "infinite": first(float("inf")),
    "another shape": other_shape,
    "a parameter less": less,
}  # fmt: skip


def resigned(**values: Any) -> Change:
    """Change a manifest, and give it the checksum that it would have."""

    def change(folder: Path) -> None:
        body = {**json.loads((folder / MANIFEST).read_text()), **values}
        del body["manifest_sha256"]
        body["manifest_sha256"] = hashlib.sha256(
            json.dumps(body, sort_keys=True).encode()
        ).hexdigest()
        (folder / MANIFEST).write_text(json.dumps(body))

    return change


ENTRY = {"file": "../../x", "size_bytes": 1, "sha256": "0", "name": "a", "tensors": []}
FILES: dict[str, Change] = {
    "manifest empty": put(MANIFEST, ""),
    "manifest nested": put(MANIFEST, nested(100_000)),
    "manifest a list": put(MANIFEST, "[]"),
    "manifest cut": cut(MANIFEST, 0.5),
    "manifest damaged": damage(MANIFEST, 3),
    "a file elsewhere": resigned(shards=[ENTRY]),
    "a text elsewhere": resigned(texts=[{"file": "..", "size_bytes": 1, "sha256": "0"}]),
    "shards a number": resigned(shards=7),
    "meta a list": resigned(meta=[1]),
    "step NaN": resigned(step=None),
    "names of lists": resigned(shards=[{**ENTRY, "file": ["a"]}]),
    "another version": resigned(version=10**30),
}


def saved(place: Path, edit: Edit | None = None) -> Path:
    """Save a checkpoint, after `edit`; return its folder."""
    meta, texts, tensors = honest_parts()
    if edit is not None:
        edit(meta, texts, tensors)
    save(place / "checkpoints", 1, {"all": copy.copy(tensors)}.items(), meta, texts)
    return open_checkpoint(place).path


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_is_refused(name: str, text: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run" / "peer-0", SAVED[name])
    refused(tmp_path, "generate", str(folder), "--tokens", "1")
    refused(tmp_path, "evaluate", str(folder), "--data", str(text))


@pytest.mark.parametrize("name", FILES)
def test_its_files_are_refused(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run" / "peer-0")
    FILES[name](folder)
    refused(tmp_path, "generate", str(folder), "--tokens", "1")
    refused(tmp_path, "export", str(folder), str(tmp_path / "exported"))
    refused(tmp_path, "train", "--run", "run", "--directory", str(tmp_path), "--resume", "--plain",
            "--host", "127.0.0.1")  # fmt: skip


def test_the_honest_one_is_taken(tmp_path: Path) -> None:
    found = told(tmp_path, "generate", str(saved(tmp_path / "run" / "peer-0")), "--tokens", "1")
    assert found.code == 0
    assert re.fullmatch(r"1 token, [\d.]+ tokens/s, resident on cpu, \w+\n", found.errors)

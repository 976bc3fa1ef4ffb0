"""Folders of Hugging Face models: weights are read exactly, and mistakes are told in one line."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atomtrain.cli.main import main
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.hugging_face import LEAST_TRANSFORMERS, build, model_folder, read_config
from atomtrain.models.making import make_outline
from atomtrain.models.weights.files import WeightFiles, read_header
from atomtrain.models.weights.names import match_weights
from tests.support import ROOT
from tests.support.hugging_face_models import LLAMA, write_model, write_text, write_tokenizer

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", shard="20KB")
    return tmp_path / "model"


def test_an_older_transformers_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.7.0")
    with pytest.raises(ConfigError, match=r"needs transformers 5\.8 or newer, not 5\.7"):
        read_config(folder)
    monkeypatch.setattr("transformers.__version__", "6.0.0.dev0")
    read_config(folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    assert project["optional-dependencies"]["hf"] == [f"transformers>={least}"]


def test_headers_and_values_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(4),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "half": torch.randn(2, 2).half(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    assert set(files) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)
        assert files.read(name).dtype == tensor.dtype
    wide = torch.empty(7)
    files.read_into("b", wide)
    assert torch.equal(wide, tensors["b"].float())
    with pytest.raises(DataError, match=r"has \[5\]"):
        files.read_into("b", torch.empty(5))
    with pytest.raises(DataError, match="Did you mean 'half'"):
        files.read("halfs")


def test_conversion_goes_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.models.weights.files._SLICE_BYTES", 64)
    tensor = torch.randn(33, 7).bfloat16()
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    target = torch.empty(33, 7)
    WeightFiles(tmp_path).read_into("a", target)
    assert torch.equal(target, tensor.float())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x00" * 7, struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"nope",
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F99","shape":[0],"data_offsets":[0,0]}}',
                b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
                b'{"a":{"shape":[1]}}', b'{"a":3}',
            )
        ),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a whole safetensors file"):
        read_header(file)


def test_an_empty_model_is_what_transformers_builds(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    expected = load(folder, dtype=torch.float32)
    sizes = read_config(folder)
    model = build(sizes)
    assert model.training
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert dict(model.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    files = WeightFiles(folder)
    sources = match_weights(make_outline(sizes), files)
    for name, parameter in model.named_parameters():
        sources[name].read_into(files, parameter.detach())
        assert torch.equal(parameter, expected.get_parameter(name))


def test_weights_without_the_prefix_of_the_base_model_are_found(folder: Path) -> None:
    whole = {}
    for file in folder.glob("*.safetensors"):
        whole.update(load_file(file))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    bare = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    save_file(bare, folder / "model.safetensors")
    sizes = read_config(folder)
    sources = match_weights(make_outline(sizes), WeightFiles(folder))
    assert sources["model.norm.weight"].stored == ["norm.weight"]


def _config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _as_pickle(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for index, file in enumerate(folder.glob("*.safetensors")):
        file.rename(folder / f"pytorch_model-{index}.bin")


def _cut(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def _other_head(folder: Path) -> None:
    save_file({"lm_head.weight": torch.randn(300, 32)}, folder / "head.safetensors")
    index = folder / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    stored["weight_map"]["lm_head.weight"] = "head.safetensors"
    index.write_text(json.dumps(stored))


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file of the index": (lambda f: min(f.glob("*.safetensors")).unlink(), "which is missing"),
    "no weights": (
        lambda f: [file.unlink() for file in f.glob("model*")], "has no weights",
    ),
    "pickles": (_as_pickle, "convert it once where you trust it"),
    "cut off": (_cut, "not a whole safetensors file"),
    "wider": (lambda f: _config(f, intermediate_size=64), "config.json says [64, 32]"),
    "deeper": (lambda f: _config(f, num_hidden_layers=4), "lack 'model.layers.3."),
    "shallower": (lambda f: _config(f, num_hidden_layers=2), "a layer that config.json does not"),
    "unknown": (lambda f: _config(f, model_type="lama"), "Did you mean 'llama'"),
    "quantised": (
        lambda f: _config(f, quantization_config={"quant_method": "hqq"}),
        "quantised by 'hqq', which is not read here. Methods: fp8, mxfp4, bitsandbytes, gptq, awq",
    ),
    "other head": (_other_head, "set tie_word_embeddings to false"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "other tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read"),
    "no end": (lambda f: write_tokenizer(f, eos_token=None), "names no eos_token"),
    "index of nothing": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"), "not the index",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(
    mistake: str, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spoil, expected = MISTAKES[mistake]
    spoil(folder)
    text = write_text(tmp_path / "text.txt")
    runs = tmp_path / "runs"
    arguments = ["--model", str(folder), "--data", str(text), "--directory", str(runs)]
    assert main(["train", *arguments, "--plain", "--device", "emulated"]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
    assert not runs.exists()


def test_ids_are_found_in_the_local_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (hub / "models--org--name" / "refs").mkdir()
    (hub / "models--org--name" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_folder("org/name").samefile(snapshot)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        model_folder("org/other")
    with pytest.raises(ConfigError, match="there is no folder"):
        model_folder("./org/name")
    # A download that was interrupted; who only plans needs no weights.
    lost = sorted(snapshot.glob("model-*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(ConfigError, match=rf"is not whole .*names {lost.name}"):
        model_folder("org/name")
    assert model_folder("org/name", weights=False).samefile(snapshot)


def test_the_tokenizer_neither_cuts_nor_pads(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    made = read_tokenizer(tmp_path)
    text = "the cat sat on the mat and the dog lay by the door"
    assert len(made.encode(text)) > 4
    assert made.decode(made.encode(text)) == text
    assert LLAMA["vocab_size"] >= made.vocabulary

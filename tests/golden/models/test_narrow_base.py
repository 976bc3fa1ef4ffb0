"""A frozen base in few bits, adapted or not: by the command, in plans and in exports."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.cli.main import main
from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.lora import add_adapters, begun_layers
from atomtrain.models.lora_config import parse_lora
from atomtrain.models.making import make_outline
from atomtrain.models.narrow import NarrowLinear, NarrowParameter, adapted_by
from atomtrain.models.quantised import dequantise, quantise
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.state import open_trained
from tests.support.hugging_face_models import (
    MIXTURES,
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
_IDS = torch.arange(24).view(2, 12)
train = partial(train_by_command, memory="4MiB", sequences=2, steps=3)
KINDS = {"llama": UNTIED, "qwen3_moe": MIXTURES["qwen3_moe"]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_resume_with_the_same_bits_and_export_what_peft_loads(
    kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    folder, text = tmp_path / kind, write_text(tmp_path / "text.txt")
    before = write_model(folder, KINDS[kind]).state_dict()
    lora = ("--lora", "r=4,targets=q_proj+v_proj,bits=4", "--checkpoint-every", "1")
    run = train(folder, text, "mine", *lora)
    expected = saved_tensors(run)
    assert any("q_proj.lora_B" in key for key in expected)
    assert not any(
        key.endswith(("weight/parameter", "codes/parameter"))
        for key in expected
        if "lora_" not in key
    )
    assert main(["export", str(run), "adapters"]) == 0
    assert main(["export", str(run), "merged", "--merge"]) == 0
    theirs = peft.PeftModel.from_pretrained(load(folder), "adapters").merge_and_unload()
    inside, merged = theirs.state_dict(), load("merged").state_dict()
    for name, tensor in open_trained(run).model.state_dict().items():
        assert torch.equal(tensor, inside[name]), name
        assert torch.equal(tensor, merged[name]), name
        changed = name.endswith(("q_proj.weight", "v_proj.weight"))
        assert torch.equal(tensor, before[name]) != changed, name
    assert main(["generate", str(run), "--tokens", "2"]) == 0
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_plans_count_the_whole_base_in_few_bits(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parameters of 32 bits become 8.5 or 4.5 with their scales, but for embeddings, head,
    routers and norms."""
    folder = tmp_path / kind
    wider = {**KINDS[kind], "hidden_size": 64, "intermediate_size": 128}
    if kind == "qwen3_moe":
        wider = {**wider, "moe_intermediate_size": 64, "head_dim": 16}
    write_model(folder, wider)
    told = {}
    for bits in ("", ",bits=8", ",bits=4"):
        capsys.readouterr()
        asked = ["--gpu", "rtx-3090", "--context", "16", "--precision", "fp32", "--json"]
        asked += ["--micro-batch", "1", "--tokens-per-step", "16"]
        lora = f"r=2,targets=q_proj+v_proj{bits}"
        assert main(["plan", str(folder), *asked, "--lora", lora]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        told[bits] = json.loads(said.out)
    sizes = read_config(folder)
    outline = make_outline(sizes)
    narrow = [
        parameter
        for name, parameter in outline.named_parameters()
        if name.endswith("_proj.weight") or ".experts." in name
    ]
    assert len(narrow) == {"llama": 21, "qwen3_moe": 18}[kind]
    for bits, each in ((",bits=8", 8.5), (",bits=4", 4.5)):
        saved_bytes = sum(p.nbytes * (1 - each / 32) for p in narrow)
        fewer = told[""]["plan"]["host_bytes"] - told[bits]["plan"]["host_bytes"]
        assert fewer >= 0.95 * saved_bytes, bits
        assert told[bits]["analysis"]["parameters"] == told[""]["analysis"]["parameters"]


def test_what_cannot_be_narrow_is_told_before_training_and_by_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "odd", write_text(tmp_path / "text.txt")
    write_model(folder, {**UNTIED, "intermediate_size": 47, "num_hidden_layers": 1})
    expected = (
        "--lora bits=4 leaves a matrix as it is: model.layers.0.mlp.down_proj.weight has rows of "
        "47 numbers, which must be even"
    )
    capsys.readouterr()
    train(folder, text, "mine", "--lora", "targets=q_proj,bits=4")
    said = capsys.readouterr()
    assert (said.out + said.err).count(expected) == 1
    asked = ["--lora", "targets=q_proj,bits=4", "--context", "16", "--tokens-per-step", "16"]
    main(["plan", str(folder), "--gpu", "rtx-3090", *asked])
    assert capsys.readouterr().err == f"warning: {expected}\n"


_SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    # Linear layers with a forward of their own.
    "falcon": {**_SMALL, "model_type": "falcon", "new_decoder_architecture": False},
    # Whose weight the layer around them multiplies with.
    "jamba": {**MIXTURES["jamba"], "num_hidden_layers": 2},
    "mamba": {**_SMALL, "model_type": "mamba", "state_size": 4, "use_mambapy": False},
    # Routers that are linear layers.
    "llama4": {
        **_SMALL, "model_type": "llama4_text", "intermediate_size": 32, "intermediate_size_mlp": 32,
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1,
        "pad_token_id": 0, "attention_chunk_size": 64,
    },
    "phimoe": {
        **_SMALL, "model_type": "phimoe", "intermediate_size": 32, "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "jetmoe": {
        **_SMALL, "model_type": "jetmoe", "intermediate_size": 32, "num_key_value_heads": 2,
        "kv_channels": 8, "num_local_experts": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_with_linear_layers_of_their_own_compute_with_rounded_matrices(
    kind: str, tmp_path: Path
) -> None:
    write_model(tmp_path, FAMILIES[kind])
    sizes = read_config(tmp_path)
    target = {"falcon": "dense", "mamba": "in_proj", "jetmoe": "kv_proj"}.get(kind, "q_proj")
    plain, model = build(sizes).eval(), build(sizes).eval()
    for each in (plain, model):
        Weights(tmp_path, sizes).fill(each)
    add_adapters(model, parse_lora(f"r=2,targets={target},bits=8"))
    values = dict(plain.named_parameters())
    with torch.no_grad():
        for name, layer in begun_layers(model).items():
            base = values[adapted_by(name) or f"{name}.weight"]
            for part, made in layer.beginning(lambda base=base: base, name):
                layer.get_parameter(part).copy_(made)
            rows = base.flatten(0, -2)
            base.copy_(dequantise(*quantise(rows, 8), torch.float32).view(base.shape))
        torch.testing.assert_close(model(_IDS).logits, plain(_IDS).logits)
    left = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and "weight" in module._parameters
    ]
    routers = {"llama4": 2, "phimoe": 2, "jetmoe": 4}.get(kind, 0)
    assert len(left) == 1 + routers, left
    assert any(isinstance(module, NarrowLinear | NarrowParameter) for module in model.modules())

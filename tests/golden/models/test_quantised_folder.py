"""Folders in few bits: read as transformers makes them wide, and trained like their wide copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.engine.state.precision import Narrowed
from atomtrain.models.hugging_face import build, read_config, read_quantisation
from atomtrain.models.lora import add_adapters, begun_layers
from atomtrain.models.lora_config import MXFP4, parse_lora
from atomtrain.models.narrow import NarrowParameter, adapted_by
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.sources import _base_of
from atomtrain.training.setup.state import recipe_of
from atomtrain.views.plans.subject import subject
from tests.support.hugging_face_models import saved_tensors, train_by_command, write_text
from tests.support.quantised_folders import DEEPSEEK, FORMS, GPT_OSS, QWEN3, write_quantised

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, **{"dtype": torch.float32, **options}).eval()


def made_wide(folder: Path, form: str, dtype: torch.dtype) -> Any:
    """Return the model as transformers itself makes it wide."""
    from transformers import FineGrainedFP8Config, Mxfp4Config

    wide: Any = Mxfp4Config if form == "mxfp4" else FineGrainedFP8Config
    block = {} if form == "mxfp4" else {"weight_block_size": (16, 16)}
    return loaded(folder, quantization_config=wide(dequantize=True, **block), dtype=dtype)


def filled(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    sizes = read_config(folder)
    model: Any = build(sizes).to(dtype)
    Weights(folder, sizes).fill(model)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["fp8", "fp8 experts", "mxfp4"])
def test_weights_and_loss_are_those_of_transformers(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_quantised(tmp_path, form)
    expected, found = made_wide(tmp_path, form, dtype), filled(tmp_path, dtype)
    names = dict(expected.named_parameters())
    assert names.keys() == dict(found.named_parameters()).keys()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, names[name].to(dtype)), name
    if dtype == torch.float32:
        rows = torch.arange(24).view(2, 12)
        with torch.no_grad():
            losses = [model(rows, labels=rows).loss for model in (expected, found)]
        torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_its_wide_copy(form: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "narrow", form, tmp_path / "wide")
    expected = filled(tmp_path / "wide").state_dict()
    for name, tensor in filled(tmp_path / "narrow").state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_loading_peaks_at_a_tenth_above_the_model(tmp_path: Path) -> None:
    """Every storage counts; experts are wide and put together one parameter at a time."""
    config = {**DEEPSEEK, "num_hidden_layers": 32}
    write_quantised(tmp_path, "fp8 experts", config=config)
    sizes = read_config(tmp_path)
    weights, empty = Weights(tmp_path, sizes), build(sizes)
    held = sum(parameter.nbytes for parameter in empty.parameters())
    with StorageTracker() as tracker:
        for parameter in empty.parameters():
            tracker.adopt(parameter.detach())
        assert tracker.live_bytes == held
        tracker.reset_peak()
        weights.fill(empty)
    assert held < tracker.peak_bytes <= 1.1 * held


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_the_commands_take_it_like_its_wide_copy(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "narrow", form, tmp_path / "wide")
    text = write_text(tmp_path / "text.txt")
    size = ["--micro-batch", "1", "--tokens-per-step", "32"]
    assert main(["plan", "narrow", "--context", "16", "--gpu", "rtx-3090", *size]) == 0
    runs = {}
    for name in ("narrow", "wide"):
        for more, steps in (((), 1), (("--resume",), 2)):
            runs[name] = train_by_command(
                *(tmp_path / name, text, f"run-{name}", *more),
                memory="16MiB", sequences=2, steps=steps,
            )  # fmt: skip
    narrow, wide = saved_tensors(runs["narrow"]), saved_tensors(runs["wide"])
    assert narrow.keys() == wide.keys()
    assert all(torch.equal(tensor, wide[key]) for key, tensor in narrow.items())

    capsys.readouterr()
    assert main(["export", str(runs["narrow"]), "out"]) == 0
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    assert {t.dtype for t in load_file("out/model.safetensors").values()} == {torch.float32}
    expected = filled(tmp_path / "wide")
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(narrow[f"{name}/parameter"])
        rows = torch.arange(12)[None]
        assert torch.equal(loaded(Path("out"))(rows).logits, expected(rows).logits)

    told = {}
    for name in ("narrow", "wide"):
        capsys.readouterr()
        assert main(["generate", name, "--prompt", "the cat", "--tokens", "3"]) == 0
        assert main(["evaluate", name, "--data", str(text), "--context", "16"]) == 0
        told[name] = capsys.readouterr().out.replace(name, "")
    assert told["narrow"] == told["wide"]


def test_adapters_begin_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "narrow", "fp8", tmp_path / "wide")
    text = write_text(tmp_path / "text.txt")
    runs = [
        train_by_command(
            *(tmp_path / name, text, f"run-{name}", "--lora", "r=2,bits=4"),
            memory="16MiB", sequences=2, steps=1,
        )
        for name in ("narrow", "wide")
    ]  # fmt: skip
    narrow, wide = (saved_tensors(run) for run in runs)
    assert narrow.keys() == wide.keys()
    assert all(torch.equal(tensor, wide[key]) for key, tensor in narrow.items())
    merged = []
    for run, name in zip(runs, ("narrow", "wide"), strict=True):
        assert main(["export", str(run), f"merged-{name}", "--merge"]) == 0
        merged.append(load_file(f"merged-{name}/model.safetensors"))
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())


_EXPERTS = "r=2,bits=4,targets=all-linear+experts"


@pytest.mark.parametrize("targets", ["experts", "q_proj"])
def test_experts_in_mxfp4_stay_as_they_are_published(targets: str, tmp_path: Path) -> None:
    """Codes and scales take what the files take, and mean the same numbers."""
    write_quantised(tmp_path / "narrow", "mxfp4", tmp_path / "wide")
    expected, sizes = filled(tmp_path / "wide"), read_config(tmp_path / "narrow")
    weights, model = Weights(tmp_path / "narrow", sizes), build(sizes)
    add_adapters(
        model, parse_lora(f"r=2,bits=4,targets={targets}").published_as({"quant_method": "mxfp4"})
    )
    looked_at = 0
    for name, layer in begun_layers(model).items():
        held = layer if isinstance(layer, NarrowParameter) else getattr(layer, "narrow", None)
        if held is None:
            continue
        parameter = adapted_by(name)
        assert parameter is not None
        parts = dict(held.beginning(lambda of=parameter: weights.read(of), ""))
        for part, values in parts.items():
            held.get_parameter(part).data.copy_(values)
        wide = expected.get_parameter(parameter)
        assert held.current(None, torch.float32).equal(wide)
        assert held.current(None, torch.bfloat16).equal(wide.bfloat16())
        assert held.codes.nbytes == wide.numel() // 2
        assert held.scales.nbytes == wide.numel() // 32
        looked_at += 1
    assert looked_at == 2 * GPT_OSS["num_hidden_layers"]


def test_the_command_trains_beside_experts_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "narrow", "mxfp4", tmp_path / "wide")
    text = write_text(tmp_path / "text.txt")
    size = ["--micro-batch", "1", "--tokens-per-step", "32", "--lora", _EXPERTS]
    assert main(["plan", "narrow", "--context", "16", "--gpu", "rtx-3090", *size]) == 0
    planned = subject("narrow").with_adapters(parse_lora(_EXPERTS))
    held = [m for m in planned.model.modules() if isinstance(m, NarrowParameter)]
    assert held
    assert all(each.mxfp4 for each in held)

    runs = [
        train_by_command(
            *(tmp_path / "narrow", text, f"run-{precision}", "--lora", _EXPERTS, *more),
            *("--precision", precision), memory="16MiB", sequences=2, steps=steps,
        )
        for precision in ("fp32", "bf16")
        for more, steps in (((), 1), (("--resume",), 2))
    ]  # fmt: skip
    for run in runs:
        recipe, _ = recipe_of(open_checkpoint(run))
        assert recipe.lora is not None
        assert recipe.lora.published == MXFP4
    assert main(["export", str(runs[0]), "merged", "--merge"]) == 0
    merged, trained = load_file("merged/model.safetensors"), saved_tensors(runs[0])
    name = "model.layers.0.mlp.experts.down_proj"
    base = filled(tmp_path / "wide").get_parameter(name)
    assert not torch.equal(merged[name], base)
    for part in ("lora_A", "lora_B"):
        key = f"model.layers.0.mlp.experts.expert_lora.down_proj.{part}.weight/parameter"
        assert trained[key].any()
    experts = base.shape[0]
    a, b = (
        trained[f"model.layers.0.mlp.experts.expert_lora.down_proj.{part}.weight/parameter"]
        for part in ("lora_A", "lora_B")
    )
    for expert in range(experts):
        product = b[:, expert::experts] @ a[2 * expert : 2 * expert + 2] * 8.0
        torch.testing.assert_close(merged[name][expert], base[expert] + product.mT)


_WIDER = {**QWEN3, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Rows of bitsandbytes' blocks of 64 numbers."""


@pytest.mark.parametrize(
    ("form", "bits", "targets"),
    [
        ("fp8", 8, "all-linear"),
        ("fp8", 8, "q_proj"),
        ("fp8 experts", 8, "all-linear+experts"),
        ("fp8 experts", 8, "o_proj"),
        ("nf4", 4, "all-linear"),
        ("nf4", 4, "q_proj"),
        ("int8", 8, "q_proj"),
        ("gptq", 4, "all-linear"),
        ("gptq", 4, "q_proj"),
        ("gptq", 8, "q_proj"),
        ("gptq of 8 bits", 8, "q_proj"),
        ("gptq of 8 bits, mixed", 8, "all-linear"),
        ("gptq in order", 8, "q_proj"),
        ("gptq in order", 4, "all-linear"),
        ("awq", 8, "all-linear"),
        ("awq", 4, "q_proj"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_stay_as_they_are_published(
    form: str, bits: int, targets: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every matrix that is held in few bits means the folder's numbers, adapted or not."""
    config = _WIDER if form == "nf4" else None
    write_quantised(tmp_path / "narrow", form, tmp_path / "wide", config)
    expected, sizes = filled(tmp_path / "wide", dtype), read_config(tmp_path / "narrow")
    weights, model = Weights(tmp_path / "narrow", sizes), build(sizes)
    asked = parse_lora(f"r=2,bits={bits},targets={targets}")
    add_adapters(model, asked.published_as(read_quantisation(tmp_path / "narrow")))
    if dtype == torch.bfloat16:
        Narrowed(model, "bf16")
    looked_at = 0
    for name, layer in begun_layers(model).items():
        parameter = adapted_by(name) or f"{name}.weight"
        order = (weights.order(name),) if hasattr(layer, "order") else ()
        for part, values in layer.beginning(
            lambda of=parameter: weights.read(of).float(), "", *order
        ):
            layer.get_parameter(part).data.copy_(values)
        held = getattr(layer, "narrow", layer)
        made = held.current(None, dtype) if adapted_by(name) else layer_weight(layer)
        wide = expected.get_parameter(parameter)
        assert made.dtype == dtype
        if form == "int8":  # whose last bits are those of another formula
            torch.testing.assert_close(made, wide)
            made, wide = made.float().mul(2**16).bfloat16(), wide.float().mul(2**16).bfloat16()
            assert (made != wide).float().mean() < 0.01
        elif form == "nf4":  # what is published is bfloat16
            assert made.bfloat16().equal(wide.bfloat16()), name
        else:
            assert made.equal(wide), name
        assert held.scales.dtype == torch.int32
        assert held.codes.nbytes == wide.numel() * bits // 8
        looked_at += 1
    assert looked_at > 6 * sizes.config["num_hidden_layers"]


def layer_weight(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.base() if hasattr(layer, "base") else layer.weight
    return weight


@pytest.mark.parametrize(
    ("form", "bits", "targets"),
    [
        ("fp8 experts", 8, "all-linear+experts"),
        ("awq", 4, "q_proj"),
        ("gptq", 4, "q_proj"),
        ("gptq of 8 bits, mixed", 8, "all-linear"),
    ],
)
def test_the_command_trains_beside_published_numbers(
    form: str, bits: int, targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters become what they become beside the wide copy.

    Products of sorted columns add in another order, and the first steps of AdamW, of 0.01 each,
    make much of small gradients.
    """
    close = {"rtol": 0.0, "atol": 1e-3} if form.startswith("gptq") else {}
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "narrow", form, tmp_path / "wide")
    text = write_text(tmp_path / "text.txt")
    asked = f"r=2,targets={targets}"
    size = ["--micro-batch", "1", "--tokens-per-step", "32", "--lora", f"{asked},bits={bits}"]
    assert main(["plan", "narrow", "--context", "16", "--gpu", "rtx-3090", *size]) == 0
    runs = {
        name: train_by_command(
            *(tmp_path / name, text, f"run-{name}", "--lora", lora, *more),
            *("--precision", "fp32"), memory="16MiB", sequences=2, steps=steps,
        )
        for name, lora in (("narrow", f"{asked},bits={bits}"), ("wide", asked))
        for more, steps in (((), 1), (("--resume",), 2))
    }  # fmt: skip
    narrow, wide = (saved_tensors(run) for run in runs.values())
    assert narrow.keys() == wide.keys()
    for key, tensor in narrow.items():
        torch.testing.assert_close(tensor, wide[key], **close)
    merged = []
    for name, run in runs.items():
        assert main(["export", str(run), f"merged-{name}", "--merge"]) == 0
        merged.append(load_file(f"merged-{name}/model.safetensors"))
    for name, tensor in merged[0].items():
        torch.testing.assert_close(tensor, merged[1][name], **close)


def test_another_copy_beside_adapters_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantised(tmp_path / "narrow", "fp8", tmp_path / "wide")
    narrow, wide = str(tmp_path / "narrow"), str(tmp_path / "wide")
    recipe = new_recipe(TrainOptions(model=narrow, lora="r=2,bits=8"))
    _base_of(recipe, narrow, None)
    assert not caplog.records
    _base_of(recipe, wide, None)
    assert f"(fp8 16x16), and {wide} has others (wide ones)" in caplog.text

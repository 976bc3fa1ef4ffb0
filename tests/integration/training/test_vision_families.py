"""Fine-tuning models that read images by the real commands: every family, and unlike images."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atomtrain.cli.main import main
from atomtrain.data.sampler import SamplerConfig
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.models.hugging_face import read_config
from atomtrain.models.image_text import tower_of
from atomtrain.training.config.optimizing import named_optimizer
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.texts import read_text
from atomtrain.views.plans.subject import subject
from tests.support.image_models import row_about, write_rows
from tests.support.vision_folders import FAMILIES, write_unlike_chats, write_vision

hf = pytest.importorskip("transformers")
CONTEXT, SEQUENCES, STEPS, RATE = 160, 2, 3, 0.01
SMALL = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "4MiB",
    "--micro-batch", str(SEQUENCES), "--context", str(CONTEXT), "--sequences", str(SEQUENCES),
    "--steps", str(STEPS), "--plain", "--no-profile", "--threads", "1",
    "--evaluate-every", "100", "--checkpoint-every", "100", "--precision", "fp32",
    "--learning-rate", str(RATE), "--schedule", "constant", "--warmup-steps", "0",
    "--clip-norm", "0",
]  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make folder and chats in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_vision(Path("model"), request.param)
    write_unlike_chats(Path("data"))
    return str(request.param)


def train(run: str, *more: str, data: str = "data/chats.jsonl") -> int:
    return main(["train", "--model", "model", "--data", data, "--run", run, *SMALL, *more])


def batches(count: int) -> list[dict[str, Any]]:
    """Return what the run trains on."""
    sizes = read_config(Path("model"))
    text = read_text(["data/chats.jsonl"], sizes, read_tokenizer(Path("model")))
    config = SamplerConfig(context_tokens=CONTEXT, sequences=SEQUENCES)
    sampler = text.material.sampler(config, "peer-0")
    made = []
    for step in range(count):
        made += NextToken().micro_batches(sampler.batch(step), SEQUENCES)
    return made


def given(batch: dict[str, Any]) -> dict[str, Any]:
    return {n: t for n, t in batch.items() if n not in ("targets", "mean_targets")}


def loaded(folder: str) -> Any:
    return hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def in_tower(names: Iterable[str]) -> set[str]:
    """Return the published names of what looks at images."""
    towers = ("visual.", "vision_tower.", "vision_model.")
    return {name for name in names if any(tower in name for tower in towers)}


def resident() -> dict[str, torch.Tensor]:
    """Train the folder's model by transformers and torch alone, on the run's batches."""
    model = loaded("model").train()
    tower = tower_of(model)
    assert tower is not None
    model.get_submodule(tower).requires_grad_(False)
    optimizer = named_optimizer(
        model, "adamw", "fp32", learning_rate=RATE, weight_decay=0.0, seed=0
    )  # fmt: skip
    for batch in batches(STEPS):
        NextToken().loss(model(**given(batch), use_cache=False), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("resident")
    return load_file("resident/model.safetensors")


def test_a_run_is_that_of_transformers_and_so_is_its_export(family: str) -> None:
    shapes = [tuple(batch["pixel_values"].shape) for batch in batches(STEPS)]
    assert len(set(shapes)) > 1, "images are unlike"
    assert train("full", "--check-model", "always") == 0
    assert main(["export", "runs/full/peer-0", "exported"]) == 0
    exported = load_file("exported/model.safetensors")
    before, expected = load_file("model/model.safetensors"), resident()
    assert exported.keys() == expected.keys() == before.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    changed = {name for name in before if not torch.equal(exported[name], before[name])}
    tower = in_tower(before)
    assert tower
    assert not changed & tower
    assert any(".layers." in name for name in changed)
    kept = [file.name for file in Path("model").iterdir() if "process" in file.name]
    assert kept
    assert all(Path("exported", name).is_file() for name in kept)
    inputs = given(batches(1)[0])
    with torch.no_grad():
        found, wanted, old = (
            loaded(name).eval()(**inputs).logits for name in ("exported", "resident", "model")
        )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, old)


@pytest.mark.usefixtures("no_search_for_a_fit")
def test_adapters_are_beside_the_language_part_and_peft_loads_them(family: str) -> None:
    peft = pytest.importorskip("peft")
    assert train("adapted", "--lora", "r=4,alpha=64") == 0
    assert main(["export", "runs/adapted/peer-0", "adapters"]) == 0
    assert main(["export", "runs/adapted/peer-0", "merged", "--merge"]) == 0
    base, inputs = loaded("model").eval(), given(batches(1)[0])
    tower = str(tower_of(base)).rpartition(".")[2]
    with torch.no_grad():
        before = base(**inputs).logits
        adapted = peft.PeftModel.from_pretrained(base, "adapters").eval()
        wrapped = [name for name, _ in adapted.named_modules() if "lora_A.default" in name]
        assert wrapped
        assert not any(f".{tower}." in name for name in wrapped)
        found = loaded("merged").eval()(**inputs).logits
        torch.testing.assert_close(found, adapted(**inputs).logits, atol=1e-4, rtol=0)
    assert not torch.allclose(found, before, atol=1e-3)


@pytest.mark.usefixtures("no_search_for_a_fit")
@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_gemma_learns_from_texts_alone_too_and_packs_these(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]
    write_rows(Path("texts.jsonl"), [{"messages": said}] * 12)
    assert train("texts", "--packing", data="texts.jsonl") == 0
    capsys.readouterr()
    assert train("refused", "--packing") == 2
    told = "data/chats.jsonl has images, and --packing is for texts"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
@pytest.mark.parametrize("where", ["--data", "--validation"])
def test_texts_and_images_in_different_sources_are_refused_in_any_order(
    family: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]
    write_rows(Path("texts.jsonl"), [{"messages": said}] * 12)
    for first, second in itertools.permutations(["texts.jsonl", "data/chats.jsonl"]):
        assert train("mixed", where, second, data=first) == 2
        assert "texts.jsonl:1: has no image" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
@pytest.mark.parametrize("value", [0, 1e-45])
def test_pixels_that_are_not_finite_are_refused_before_training(
    family: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("model/processor_config.json")
    said = json.loads(file.read_text())
    said["image_processor"]["image_std"] = [value] * 3
    file.write_text(json.dumps(said))
    assert train("refused") == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert ("divides pixels by image_std" if value == 0 else "not finite") in told[-1]
    assert not [line for line in told if "Traceback" in line or "Error:" in line]
    assert not Path("runs/refused").exists()


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("apart", [False, True])
def test_a_run_is_planned_with_the_largest_images_judged_ones_too(family: str, apart: bool) -> None:
    rows = [json.loads(line) for line in Path("data/chats.jsonl").read_text().splitlines()]
    before = [row for row in rows if len(row["messages"][0]["content"]) == 2]
    last = row_about("pictures/0-0.png", "pictures/9-0.png")  # of a few the last is held out
    write_rows(Path("data/train.jsonl"), before if apart else [*before, last])
    write_rows(Path("data/judged.jsonl"), [last])
    text = read_text(
        ["data/train.jsonl"], read_config(Path("model")), read_tokenizer(Path("model")),
        validation="data/judged.jsonl" if apart else None,
    )  # fmt: skip
    (judged,) = text.material.held_out(CONTEXT, 1, 1)
    images = text.largest(CONTEXT, 1).images
    assert images is not None
    assert judged.images is not None
    assert torch.equal(images.together()["pixel_values"], judged.images.together()["pixel_values"])


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_a_plan_has_the_language_part_and_holds_the_tower(family: str) -> None:
    planned = subject("model", 64)
    chain = planned.analyse(1).chain
    assert "model.language_model.layers.2" in [layer.name for layer in chain.layers]
    assert {id(p) for p in planned.model.parameters()} == {id(p) for p in chain.parameters}


@pytest.mark.usefixtures("no_search_for_a_fit")
@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_a_trained_tower_is_resumed_and_evaluated_without_the_folder(family: str) -> None:
    assert train("run", "--train-tower") == 0
    before = load_file("model/model.safetensors")
    shutil.rmtree("model")
    assert main(["train", "--run", "run", "--resume", *SMALL, "--steps", "4"]) == 0
    assert main(["evaluate", "runs/run/peer-0"]) == 0
    assert main(["export", "runs/run/peer-0", "exported"]) == 0
    exported = load_file("exported/model.safetensors")
    assert not all(torch.equal(exported[name], before[name]) for name in in_tower(before))

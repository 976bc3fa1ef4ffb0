"""Fine-tuning a model that reads images by the real commands, on a tiny LLaVA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atomtrain.cli.main import main
from atomtrain.data.sampler import SamplerConfig
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.events import read_events
from atomtrain.models.hugging_face import read_config
from atomtrain.training.config.optimizing import named_optimizer
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.texts import read_text
from atomtrain.views.plans.subject import subject
from tests.support.image_models import FEATURES, row_about, write_chats, write_llava, write_rows

hf = pytest.importorskip("transformers")
CONTEXT, SEQUENCES, STEPS, RATE = 64, 4, 3, 0.01
SMALL = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "3MiB",
    "--micro-batch", str(SEQUENCES),
    "--context", str(CONTEXT), "--sequences", str(SEQUENCES), "--plain", "--no-profile",
    "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "100",
    "--precision", "fp32", "--learning-rate", str(RATE), "--schedule", "constant",
    "--warmup-steps", "0", "--clip-norm", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_llava(folder / "model")
    write_chats(folder / "data")
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def train(run: str, *more: str, steps: int = STEPS, model: str = "model") -> int:
    return main(
        ["train", "--model", model, "--data", "data/chats.jsonl", "--run", run, *SMALL,
         "--steps", str(steps), *more]
    )  # fmt: skip


def resident(place: Path) -> dict[str, torch.Tensor]:
    """Train the folder's model by transformers and torch alone, on the run's batches."""
    sizes = read_config(place / "model")
    text = read_text(["data/chats.jsonl"], sizes, read_tokenizer(place / "model"))
    config = SamplerConfig(context_tokens=CONTEXT, sequences=SEQUENCES)
    sampler = text.material.sampler(config, "peer-0")
    model: Any = hf.LlavaForConditionalGeneration.from_pretrained(
        place / "model", dtype=torch.float32
    )
    model.train().model.vision_tower.requires_grad_(False)
    optimizer = named_optimizer(
        model, "adamw", "fp32", learning_rate=RATE, weight_decay=0.0, seed=0
    )  # fmt: skip
    objective = NextToken()
    for step in range(STEPS):
        (batch,) = objective.micro_batches(sampler.batch(step), SEQUENCES)
        inputs = {name: batch[name] for name in ("input_ids", "pixel_values")}
        objective.loss(model(**inputs, use_cache=False), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place / "resident")
    return load_file(place / "resident" / "model.safetensors")


def asked(folder: Path) -> Any:
    """Return a question about a picture as a folder's own processor makes it."""
    processor = hf.AutoProcessor.from_pretrained(folder, backend="pil")
    return processor.apply_chat_template(
        row_about("data/pictures/1.png")["messages"][:1], tokenize=True, return_dict=True,
        return_tensors="pt", add_generation_prompt=True,
    )  # fmt: skip


def logits_of(model: Any, given: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**given).logits
    return found


def test_a_run_is_that_of_transformers_and_so_is_its_export(place: Path) -> None:
    assert train("full", "--check-model", "always") == 0
    assert main(["export", "runs/full/peer-0", "exported"]) == 0
    exported = load_file(place / "exported" / "model.safetensors")
    before = load_file(place / "model" / "model.safetensors")
    expected = resident(place)
    assert exported.keys() == expected.keys() == before.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    changed = {name for name in before if not torch.equal(exported[name], before[name])}
    assert any("language_model.model.layers" in name for name in changed)
    assert any("multi_modal_projector" in name for name in changed)
    assert not any("vision_tower" in name for name in changed)
    given, again = asked(place / "model"), asked(place / "exported")
    assert all(torch.equal(given[name], again[name]) for name in ("input_ids", "pixel_values"))
    found, wanted, old = (
        logits_of(hf.LlavaForConditionalGeneration.from_pretrained(place / name).eval(), given)
        for name in ("exported", "resident", "model")
    )
    assert torch.equal(found, wanted)
    assert not torch.equal(found, old)


@pytest.mark.usefixtures("no_search_for_a_fit")
def test_a_run_is_resumed_and_evaluated_without_the_folder(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--train-tower", steps=2) == 0
    before = load_file(place / "model" / "model.safetensors")
    shutil.rmtree(place / "model")
    assert main(["train", "--run", "run", "--resume", *SMALL, "--steps", "3"]) == 0
    assert main(["export", "runs/run/peer-0", "exported"]) == 0
    exported = load_file(place / "exported" / "model.safetensors")
    assert not all(torch.equal(exported[n], before[n]) for n in before if "vision_tower" in n)
    events = read_events(place / "runs" / "run" / "peer-0" / "events.jsonl")
    last = [event for event in events if event["event"] == "evaluation"][-1]
    capsys.readouterr()
    assert main(["evaluate", "runs/run/peer-0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last["loss"], abs=1e-5)


@pytest.mark.usefixtures("no_search_for_a_fit")
def test_adapters_are_beside_the_language_part_and_peft_loads_them(place: Path) -> None:
    peft = pytest.importorskip("peft")
    assert train("adapted", "--lora", "r=4,alpha=64") == 0
    assert main(["export", "runs/adapted/peer-0", "adapters"]) == 0
    assert main(["export", "runs/adapted/peer-0", "merged", "--merge"]) == 0
    base = hf.LlavaForConditionalGeneration.from_pretrained(place / "model").eval()
    given = asked(place / "model")
    before = logits_of(base, given)
    adapted = peft.PeftModel.from_pretrained(base, place / "adapters").eval()
    wrapped = [name for name, _ in adapted.named_modules() if "lora_A.default" in name]
    assert wrapped
    assert not any("vision_tower" in name for name in wrapped)
    merged = hf.LlavaForConditionalGeneration.from_pretrained(place / "merged").eval()
    found = logits_of(merged, given)
    torch.testing.assert_close(found, logits_of(adapted, given), atol=1e-5, rtol=0)
    assert not torch.allclose(found, before, atol=1e-3)


def test_answers_alone_are_learnt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect = ["data", "inspect", "data/chats.jsonl", "--model", "model", "--context", str(CONTEXT)]
    assert main([*inspect, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds"] == {"messages": 12}
    seen = f"USER: {'<image>' * FEATURES}\nwhat colour?ASSISTANT: [[red</s>]]"
    assert found["samples"] == [seen]
    assert found["dropped"] == 0
    # Rows whose pictures are cut off are left out: what is left of one fits no features.
    assert main([*inspect[:-1], str(FEATURES), "--json"]) == 2
    assert "no example has an answer and its images within 16 tokens" in capsys.readouterr().err


def test_a_plan_has_the_tower(place: Path) -> None:
    planned = subject("model", 64)
    layers = planned.analyse(1).chain.layers
    assert any("vision_tower" in layer.name for layer in layers)
    trained = {name for name, p in planned.model.named_parameters() if p.requires_grad}
    assert trained
    assert not any("vision_tower" in name for name in trained)


def refused(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the one line with which a run is refused."""
    capsys.readouterr()
    assert train("refused", *more) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert not Path("runs/refused").exists()
    return line


def test_an_image_that_does_not_open_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "data" / "broken.png").write_bytes(b"no picture")
    rows = [row_about("pictures/0.png")] * 2 + [row_about("broken.png")]
    write_rows(place / "data" / "chats.jsonl", rows)
    line = refused(capsys)
    assert line.startswith("atom: data/chats.jsonl:3: the image data/broken.png cannot be opened")


def test_a_processor_that_is_missing_or_of_another_model_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "model" / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 8}))
    told = "the processor of model puts 4 tokens for an image, and the model makes 16 features"
    assert told in refused(capsys)
    file.unlink()
    assert "the model has no processor (processor_config.json or" in refused(capsys)


def test_what_is_for_texts_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--packing is for texts, and the model reads images" in refused(capsys, "--packing")
    line = refused(capsys, "--objective", "dpo")
    assert "--objective dpo is for texts, and model reads images" in line
    (place / "text.txt").write_text("the cat sat on the mat\n" * 400)
    capsys.readouterr()
    assert main(["train", "--model", "model", "--data", "text.txt", "--run", "t", *SMALL]) == 2
    assert "text.txt has running text, and the model reads images" in capsys.readouterr().err

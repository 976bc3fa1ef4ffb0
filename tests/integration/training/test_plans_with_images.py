"""What `atom plan` says of models that read images: their images count, as a step then has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.cli.main import main
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.models.hugging_face import read_config
from atomtrain.models.image_text import freeze_tower
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.texts import read_text
from tests.support.image_models import write_chats, write_llava, write_rows
from tests.support.vision_folders import FAMILIES, write_unlike_chats, write_vision

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("assumed_times")
SEQUENCES, MICRO_BATCHES = 2, 2
NAMES = ["llava", *FAMILIES]


def write(name: str) -> int:
    """Make folder and chats in the working directory; return the tokens of a sequence."""
    if name == "llava":
        write_llava(Path("model"))
        write_chats(Path("data"))
        return 64
    write_vision(Path("model"), name)
    write_unlike_chats(Path("data"))
    return 160


def planned(capsys: pytest.CaptureFixture[str], context: int, *more: str) -> dict[str, Any]:
    """Return what `atom plan` says of a step."""
    capsys.readouterr()
    tokens = str(SEQUENCES * MICRO_BATCHES * context)
    arguments = ["plan", "model", "--context", str(context), "--gpu", "rtx-3090", "--json",
                 "--micro-batch", str(SEQUENCES), "--tokens-per-step", tokens,
                 "--precision", "fp32", *more]  # fmt: skip
    assert main(arguments) == 0
    found = capsys.readouterr()
    assert "not counted" not in found.err
    made: dict[str, Any] = json.loads(found.out)
    return made


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_needs_at_most_what_was_predicted_for_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    context = write(name)
    sizes = read_config(Path("model"))
    text = read_text(["data/chats.jsonl"], sizes, read_tokenizer(Path("model")))
    objective = NextToken()
    (part,) = text.material.sources[0].parts(context)
    rows = range(SEQUENCES * MICRO_BATCHES)
    step = objective.micro_batches(part.batch(list(rows)), SEQUENCES)
    example = objective.micro_batches(text.largest(context, SEQUENCES), SEQUENCES)[0]
    model = hf.AutoModelForImageTextToText.from_pretrained("model", dtype=torch.float32).train()
    model.config.use_cache = model.config.get_text_config().use_cache = False
    freeze_tower(model)
    options = atomtrain.Options(
        micro_batches=MICRO_BATCHES, optimizer_on_device=False, activations="recompute"
    )
    with atomtrain.swap(
        model, example, optimizer=adamw, device="emulated:1000GB/s", device_memory="4MiB",
        loss=objective.loss, options=options,
    ) as engine:  # fmt: skip
        engine.step(step)
        assert engine.last is not None
        measured, plan = engine.last.device_peak_bytes, engine.plan
        step_with_largest = [example] * MICRO_BATCHES
        engine.step(step_with_largest)
        largest = engine.last.device_peak_bytes
        flops = [(at.forward_flops, at.backward_flops) for at in engine.planner.costs.layers]
    assert max(measured, largest) <= plan.device_peak_bytes
    assert largest >= 0.9 * plan.device_peak_bytes
    given = sum(value.nbytes for value in example.values())
    assert given > 0.02 * plan.host_bytes
    counted = planned(capsys, context, "--data", "data/chats.jsonl")
    assert counted["images"] == "the largest of data/chats.jsonl"
    names = ("forward_flops_per_micro_batch", "backward_flops_per_micro_batch")
    assert [counted["analysis"][name] for name in names] == [sum(each) for each in zip(*flops, strict=True)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_one_picture_a_sequence_is_assumed_without_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    context = write(name)
    found = planned(capsys, context)
    assert "in each sequence; --data counts those of data" in found["images"]
    Path("model/processor_config.json").unlink()
    Path("model/preprocessor_config.json").unlink(missing_ok=True)
    assert main(["plan", "model", "--context", str(context), "--gpu", "rtx-3090"]) == 0
    told = capsys.readouterr()
    assert "warning: images are not counted: the model has no processor" in told.err


@pytest.mark.parametrize("data", ["data/chats.jsonl", "texts.jsonl"])
def test_data_without_images_are_refused(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]
    write_rows(Path("texts.jsonl"), [{"messages": said}] * 12)
    write("gemma3")
    model = "gpt3-small" if data.startswith("data") else "model"
    assert main(["plan", model, "--gpu", "rtx-3090", "--context", "160", "--data", data]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "texts are planned by --context alone; leave --data out" in line

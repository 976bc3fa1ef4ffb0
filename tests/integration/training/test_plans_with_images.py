"""What `atom plan` says of models that read images: their images count, as a step then has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.cli.main import main
from atomtrain.cli.plan import pictured_in
from atomtrain.data.sampler import SamplerConfig
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.models.hugging_face import read_config
from atomtrain.models.image_text import freeze_tower
from atomtrain.planning.cost.memory import process_bytes
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.setup.texts import read_text
from atomtrain.views.plans.subject import subject
from tests.support.image_models import write_chats, write_llava, write_rows
from tests.support.vision_folders import write_unlike_chats, write_vision
from tests.unit.planning.test_memory import host_bytes_of, memory_of

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("assumed_times")
SEQUENCES, MICRO_BATCHES = 2, 2
NAMES = [
    "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "llava_next", "internvl", "ovis2",
]  # fmt: skip


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
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    context = write(name)
    sizes = read_config(Path("model"))
    text = read_text(["data/chats.jsonl"], sizes, read_tokenizer(Path("model")))
    objective = NextToken()
    drawn = SamplerConfig(context_tokens=context, sequences=SEQUENCES * MICRO_BATCHES)
    step = objective.micro_batches(text.material.sampler(drawn, "peer").batch(0), SEQUENCES)
    example = objective.micro_batches(text.largest(context, SEQUENCES), SEQUENCES)[0]
    model = hf.AutoModelForImageTextToText.from_pretrained("model", dtype=torch.float32).train()
    model.config.use_cache = model.config.get_text_config().use_cache = False
    model.free_shapes = () if name == "llava" else ("pixel_values",)
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
        engine.synchronize()
        given = sum(value.nbytes for value in example.values())
        held = host_bytes_of(engine) + (MICRO_BATCHES + 1) * given
        sent = memory_of(engine.planner, MICRO_BATCHES, plan.shape).sent_storages(plan.shape)
        host = plan.host_bytes - process_bytes(len(engine.planner.chain.layers), sent)
        flops = [(at.forward_flops, at.backward_flops) for at in engine.planner.costs.layers]
    assert max(measured, largest) <= plan.device_peak_bytes
    assert largest >= 0.9 * plan.device_peak_bytes
    assert 0.95 * host <= held <= host
    pictured = pictured_in("model", ("data/chats.jsonl",), context)
    counted = replace(subject("model", context), pictured=pictured).analyse(SEQUENCES).costs.layers
    if name != "llava":  # of its last layer, which nobody reads, part is left out without weights
        assert [(at.forward_flops, at.backward_flops) for at in counted] == flops


def test_one_picture_a_sequence_is_assumed_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    context = write("qwen2_5_vl")
    found = planned(capsys, context)
    assert "in each sequence; --data counts those of data" in found["images"]
    there = planned(capsys, context, "--data", "data/chats.jsonl")
    assert there["images"] == "the largest of data/chats.jsonl"
    for file in Path("model").glob("*processor_config.json"):
        file.unlink()
    told = subject("model", context).images_left_out
    assert told is not None
    assert told.startswith("the model has no processor")


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

"""`Trainer`: as a loop of one's own, resumable to the bit, with callbacks, and for notebooks."""

from __future__ import annotations

import dataclasses
import doctest
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.checkpoint import save
from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.events import read_events
from atomtrain.training.trainer import inline
from atomtrain.training.trainer import trainer as module
from atomtrain.training.trainer.callbacks import Callback, Course
from atomtrain.training.trainer.trainer import Trainer
from atomtrain.training.trainer.trainer_arguments import TrainerArguments, arguments_from, stacked
from tests.support import ROOT

pytestmark = pytest.mark.usefixtures("assumed_times")
DEVICE: dict[str, Any] = {"device": "emulated", "device_memory": "1MiB"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def data(count: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 4, generator=generator)
    return [(row, row.sum(0, keepdim=True)) for row in rows]


def loss_of(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).pow(2).mean()


def trainer(folder: Path, **fields: Any) -> Trainer:
    callbacks = fields.pop("callbacks", ())
    arguments = TrainerArguments(
        output_dir=folder, micro_batch=4, micro_batches=2, epochs=4, learning_rate=0.01,
        evaluate_every=5, checkpoint_every=4, **fields,
    )  # fmt: skip
    return Trainer(net(), arguments, data(), data(9), loss=loss_of, callbacks=callbacks, **DEVICE)


class Recorder(Callback):
    """Notes what it is told, and stops where it is told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, trainer: Trainer, course: Course) -> None:
        self.told.append(f"begin {course.step}/{course.steps}")

    def on_step_end(self, trainer: Trainer, course: Course, loss: float) -> None:
        self.told.append(f"step {course.step}")
        course.stop = course.step == self.stop_at

    def on_evaluate(self, trainer: Trainer, course: Course, loss: float) -> None:
        self.told.append(f"evaluate {course.step}")

    def on_save(self, trainer: Trainer, course: Course, path: Path) -> None:
        assert path.is_dir()
        self.told.append(f"save {course.step}")

    def on_train_end(self, trainer: Trainer, course: Course) -> None:
        self.told.append("end")


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("layer_lr_decay", 0.9, "its groups an lr_factor each"),
        ("weight_decay", 0.1, "it to the optimizer"),
        ("betas", (0.9, 0.95), "it to the optimizer"),
        ("epsilon", 1e-6, "it to the optimizer"),
    ],
)
def test_what_is_for_adamw_is_refused_beside_an_optimizer_of_ones_own(
    name: str, value: Any, instead: str
) -> None:
    arguments = TrainerArguments(**{name: value})
    with pytest.raises(ConfigError) as caught:
        Trainer(net(), arguments, data(), optimizer=torch.optim.SGD, **DEVICE)
    assert str(caught.value).startswith(f"{name}={value} is for Trainer's own AdamW")
    assert str(caught.value).endswith(f"give {instead}")


def test_it_learns_and_tells(tmp_path: Path) -> None:
    recorder = Recorder()
    with trainer(tmp_path, callbacks=[recorder]) as made:
        history = made.train()
        assert history.losses[-1] < history.losses[0]
        assert len(history.losses) == 12
        assert [step for step, _ in history.evaluations] == [5, 10, 12]
    assert recorder.told == [
        "begin 0/12", "step 1", "step 2", "step 3", "step 4", "save 4", "step 5", "evaluate 5",
        "step 6", "step 7", "step 8", "save 8", "step 9", "step 10", "evaluate 10", "step 11",
        "step 12", "evaluate 12", "save 12", "end",
    ]  # fmt: skip
    kinds = {event["event"] for event in read_events(tmp_path / "events.jsonl")}
    assert kinds == {
        "run_started", "plan", "step", "timeline", "evaluation", "checkpoint", "prediction",
        "run_finished",
    }  # fmt: skip


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_each_step_tells_its_gradients_norm_if_there_is_one_and_the_memory(
    tmp_path: Path, clip_norm: float | None
) -> None:
    norms: list[float | None] = []

    class Norms(Callback):
        def on_step_end(self, trainer: Trainer, course: Course, loss: float) -> None:
            norms.append(trainer.engine.gradient_norm)

    with trainer(tmp_path, clip_norm=clip_norm, callbacks=[Norms()]) as made:
        made.train()
    steps = [one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "step"]
    assert [one["gradient_norm"] for one in steps] == norms
    assert (norms[0] is None) is (clip_norm is None)
    assert all(one["host_resident_bytes"] > 10 << 20 for one in steps)


def test_stopped_and_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    with trainer(tmp_path / "whole") as whole:
        whole.train()
    with trainer(tmp_path / "parts", callbacks=[Recorder(stop_at=7)]) as first:
        assert len(first.train().losses) == 7
    with trainer(tmp_path / "parts") as second:
        assert second.train(resume_from_checkpoint=True).losses == whole.history.losses
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


class Masked(nn.Linear):
    """Its buffers are infinite, share memory, and are not contiguous."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        table = torch.arange(24.0)
        self.register_buffer("mask", torch.full((16, 16), -math.inf).triu(1))
        self.register_buffer("low", table[:16])
        self.register_buffer("high", table[8:])
        self.register_buffer("turned", table.view(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.mask.softmax(-1) + (self.low + self.high) / 100


def masked_net() -> nn.Module:
    model = net()
    assert isinstance(model, nn.Sequential)
    model.insert(1, Masked())
    return model


class Numbers(torch.optim.Optimizer):
    """Counts its steps in plain numbers, of a group and of each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                rate = group["lr"] / (group["steps"] + state["step"])
                parameter.add_(parameter.grad, alpha=-rate)


@pytest.mark.parametrize(
    ("make", "optimizer"), [(masked_net, None), (net, Numbers)], ids=["buffers", "numbers"]
)
def test_what_a_model_and_an_optimizer_hold_beside_parameters_goes_on(
    make: Any, optimizer: Any, tmp_path: Path
) -> None:
    def part(folder: Path, *callbacks: Callback) -> Trainer:
        arguments = TrainerArguments(output_dir=folder, micro_batch=4, learning_rate=0.01)
        return Trainer(
            make(), arguments, data(), loss=loss_of, optimizer=optimizer, callbacks=callbacks,
            **DEVICE,
        )  # fmt: skip

    with part(tmp_path / "whole") as whole:
        expected = whole.train().losses
    with part(tmp_path / "parts", Recorder(stop_at=3)) as first:
        first.train()
    with part(tmp_path / "parts") as second:
        assert second.train(resume_from_checkpoint=True).losses == expected
        for name, value in second.engine.state_dict().items():
            assert torch.equal(value, whole.model.state_dict()[name])


def test_a_second_training_is_refused_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    with trainer(tmp_path / "a") as whole:
        expected = whole.train().losses
        with pytest.raises(ConfigError, match="all 12 steps are done; make a new Trainer"):
            whole.train()
    with trainer(tmp_path / "b", callbacks=[Recorder(stop_at=5)]) as stopped:
        assert len(stopped.train().losses) == 5
        assert stopped.train().losses == expected


def test_a_named_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    with trainer(tmp_path / "whole") as whole:
        whole.train()
    eighth = tmp_path / "whole" / "checkpoints" / "step-00000008"
    with trainer(tmp_path / "other") as other:
        assert other.train(resume_from_checkpoint=str(eighth)).losses == whole.history.losses
        assert other.evaluate() == {"eval_loss": whole.history.evaluations[-1][1]}
    with trainer(tmp_path / "none") as lost, pytest.raises(CheckpointError, match="not a folder"):
        lost.train(resume_from_checkpoint=tmp_path / "missing")


def test_checkpoints_from_before_tokens_were_counted_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncounted(folder: Path, step: int, shards: Any, meta: dict[str, Any]) -> Path:
        return save(folder, step, shards, {k: v for k, v in meta.items() if k != "tokens"})

    with monkeypatch.context() as patched, trainer(tmp_path) as first:
        patched.setattr(module, "save", uncounted)
        first.train()
    with trainer(tmp_path) as second:
        assert second.train(resume_from_checkpoint=True).losses == first.history.losses


class Words(nn.Module):
    """A language model of one table; its loss is to say each token again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        losses = nn.functional.cross_entropy(
            self.table(input_ids).flatten(0, 1), input_ids.flatten(), reduction="none"
        )
        return {"loss": (losses * attention_mask.flatten()).sum() / attention_mask.sum()}


def test_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    rows = [
        {"input_ids": torch.arange(4), "attention_mask": torch.tensor([1, 1, 1, row % 2])}
        for row in range(16)
    ]
    arguments = TrainerArguments(output_dir=tmp_path, micro_batch=8, micro_batches=2, epochs=2)
    with Trainer(Words(), arguments, rows, **DEVICE) as first:
        history = first.train()
        assert history.global_step == 2
        assert history.training_loss == sum(history.losses) / 2
    arguments = dataclasses.replace(arguments, epochs=3)
    with Trainer(Words(), arguments, rows, **DEVICE) as second:
        second.train(resume_from_checkpoint=True)
        assert second.course.tokens == 3 * 56
    steps = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "step"]
    assert [(step["tokens"], step["tokens_total"]) for step in steps] == [
        (56, 56), (56, 112), (56, 168),
    ]  # fmt: skip
    assert all(step["tokens_per_s"] == step["tokens"] / step["step_s"] for step in steps)


def test_samples_without_tokens_count_none(tmp_path: Path) -> None:
    with trainer(tmp_path) as made:
        made.train()
    steps = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "step"]
    assert not any("tokens_per_s" in step for step in steps)


def test_a_loop_of_ones_own_gives_the_same_bits(tmp_path: Path) -> None:
    made = Trainer(
        net(), TrainerArguments(output_dir=tmp_path, micro_batch=8, schedule="constant",
                                clip_norm=None, learning_rate=0.01, epochs=2),
        data(), loss=loss_of, **DEVICE,
    )  # fmt: skip
    batches = [made._batches(step)[0] for step in range(6)]
    with made:
        losses = made.train().losses
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for step, batch in enumerate(batches):
        torch.manual_seed(42 + step)
        loss = loss_of(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == losses[step]


def test_each_epoch_sees_every_sample_once(tmp_path: Path) -> None:
    made = Trainer(
        net(), TrainerArguments(output_dir=tmp_path, micro_batch=8), data(), loss=loss_of
    )
    epochs = [
        torch.cat([made._batches(3 * epoch + step)[0][1] for step in range(3)]) for epoch in (0, 1)
    ]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.flatten().sort().values for epoch in epochs))


def hf(**fields: Any) -> Any:
    """What `transformers.TrainingArguments` hold."""
    usual = {
        "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_train_epochs": 3.0, "max_steps": -1, "learning_rate": 1e-4, "warmup_steps": 5,
        "lr_scheduler_type": SimpleNamespace(value="linear"), "weight_decay": 0.1,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 1.0,
        "bf16": True, "seed": 7,
        "optim": SimpleNamespace(value="adamw_torch"), "eval_strategy": "steps", "eval_steps": 10,
        "save_strategy": "epoch", "save_steps": 500, "fp16": False, "deepspeed": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **fields})


def test_arguments_of_transformers_keep_their_meaning() -> None:
    found = arguments_from(hf())
    assert found == TrainerArguments(
        output_dir="out", micro_batch=4, micro_batches=2, epochs=3.0, learning_rate=1e-4,
        warmup_steps=5, schedule="linear", final_factor=0.0, weight_decay=0.1, betas=(0.9, 0.95),
        epsilon=1e-6, clip_norm=1.0, precision="bf16", seed=7, evaluate_every=10,
        checkpoint_every="epoch", drop_unused=True,
    )  # fmt: skip
    assert arguments_from(hf(max_steps=9)).max_steps == 9
    share = arguments_from(hf(warmup_steps=0.1, lr_scheduler_type="constant_with_warmup"))
    assert share.schedule_of(95).warmup_steps == 10
    assert arguments_from(hf(lr_scheduler_type="constant")).schedule_of(95).warmup_steps == 0
    assert arguments_from(None) == TrainerArguments()


@pytest.mark.parametrize(
    "fields",
    [{"deepspeed": "x.json"}, {"optim": "sgd"}, {"lr_scheduler_type": "polynomial"},
     {"eval_steps": 0.1}, {"save_strategy": "best"}, {"report_to": ["wandb"]},
     {"load_best_model_at_end": True}, {"push_to_hub": True}],
    ids=str,
)  # fmt: skip
def test_what_would_be_done_otherwise_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        arguments_from(hf(**fields))


def test_defaults_of_transformers_are_known() -> None:
    kind = pytest.importorskip("transformers").TrainingArguments
    given = object.__new__(kind)  # as it is before it looks for devices
    for field in dataclasses.fields(kind):
        missing = field.default_factory is dataclasses.MISSING
        setattr(given, field.name, field.default if missing else field.default_factory())
    assert arguments_from(given) == TrainerArguments(
        epochs=3.0, schedule="linear", final_factor=0.0, checkpoint_every=500, log_every=500,
        drop_unused=True,
    )  # fmt: skip


def test_once_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    arguments = TrainerArguments(
        output_dir=tmp_path, micro_batch=8, epochs=3, evaluate_every="epoch",
        checkpoint_every="epoch", log_every="epoch",
    )  # fmt: skip
    with Trainer(
        net(), arguments, data(), data(9), loss=loss_of, callbacks=[recorder], **DEVICE
    ) as made:
        made.train()
    seen = [told for told in recorder.told if told.startswith(("evaluate", "save"))]
    assert seen == ["evaluate 3", "save 3", "evaluate 6", "save 6", "evaluate 9", "save 9"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        f"step {step} of 9: {what}"
        for step, held_out in made.course.evaluations
        for what in (
            f"loss {sum(made.course.losses[step - 3 : step]) / 3:.4f}",
            f"held-out loss {held_out:.4f}",
        )
    ]


class Named(nn.Module):
    """Takes its tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, rows: Tensor, goals: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(rows) - goals).pow(2).mean()}


class Tokenizer:
    """What is written beside a model."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_what_forward_does_not_name_is_left_out_if_asked_for(tmp_path: Path) -> None:
    named = [{"rows": row, "goals": goal, "text": "words"} for row, goal in data()]
    arguments = TrainerArguments(output_dir=tmp_path, max_steps=2, drop_unused=True)
    with Trainer(Named(), arguments, named, processing_class=Tokenizer(), **DEVICE) as made:
        assert len(made.train().losses) == 2
        assert (made.save_model() / "tokenizer.json").exists()
    kept = TrainerArguments(output_dir=tmp_path, max_steps=2)
    with (
        Trainer(Named(), kept, named, **DEVICE) as made,
        pytest.raises(ConfigError, match=r"samples\['text'\] cannot become one tensor"),
    ):
        made.train()


def test_samples_of_different_lengths_are_told() -> None:
    with pytest.raises(ConfigError, match=r"samples\[0\] cannot become one tensor \(stack expects"):
        stacked([(torch.ones(3),), (torch.ones(4),)])


def test_mistakes(tmp_path: Path) -> None:
    for field in ("evaluate_every", "micro_batch"):
        with pytest.raises(ConfigError, match=f"{field} must be"):
            TrainerArguments(**{field: "often"})
    with pytest.raises(ConfigError, match="warmup_steps"):
        TrainerArguments(warmup_steps=-1)
    with pytest.raises(ConfigError, match="train_dataset has 3 samples; a step takes 8"):
        Trainer(net(), None, data(3))
    with pytest.raises(ConfigError, match="TrainerArguments"):
        Trainer(net(), {"epochs": 3}, data())
    with pytest.raises(ConfigError, match="epochs must be above 0"):
        TrainerArguments(epochs=0)
    with trainer(tmp_path / "none") as made, pytest.raises(CheckpointError):
        made.train(resume_from_checkpoint=True)


def test_notebooks_show_pictures(tmp_path: Path) -> None:
    with trainer(tmp_path) as made:
        assert made.history._repr_png_() is None
        assert repr(made.history) == "no steps yet"
        history = made.train()
        assert "segments" in repr(made.plan)
        assert ">segments</th>" in made.plan._repr_html_()
        assert '<img src="data:image/png;base64,iVBOR' in made.plan._repr_html_()
        assert made.plan._repr_png_().startswith(b"\x89PNG")
        assert "<img" not in Trainer(net(), None, data(), loss=loss_of).history._repr_html_()
    assert (history._repr_png_() or b"").startswith(b"\x89PNG")
    assert ">12</td>" in history._repr_html_()
    assert "<img" in history._repr_html_(), "HTML counts more than a picture beside it"
    assert math.isclose(float(repr(history).split("loss ")[1].split(",")[0]), history.losses[-1],
                        abs_tol=1e-4)  # fmt: skip


@pytest.mark.slow
def test_a_notebook_shows_the_training_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    place, ipython = ModuleType("IPython.display"), ModuleType("IPython")
    place.HTML = str  # type: ignore[attr-defined]
    place.display = lambda it, display_id: (  # type: ignore[attr-defined]
        shown.append(it) or SimpleNamespace(update=shown.append)
    )
    ipython.display = place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", place)
    monkeypatch.setattr(inline, "_EVERY_S", 0.0)
    monkeypatch.setattr(inline, "_MOST_SHARE", math.inf)
    for kernel in (None, "a notebook's"):
        shell = SimpleNamespace(kernel=kernel)
        monkeypatch.setattr(ipython, "get_ipython", lambda shell=shell: shell, raising=False)
        assert not shown, "IPython in a terminal shows no pictures"
        with trainer(tmp_path / str(kernel)) as made:
            made.train()
    assert len(shown) == 13
    assert all("<img" in each for each in shown)
    assert "step 1 of 12<" in shown[0]
    assert re.search(r"step 2 of 12, .+ a step, .+ left<", shown[1])
    assert "step 12 of 12<" in shown[-1]


def test_a_model_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with trainer(tmp_path) as made:
        made.train()
        made.save_model(tmp_path / "model")
        state = made.engine.state_dict()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())


def test_the_docstring_is_true(tmp_path: Path) -> None:
    finder = doctest.DocTestFinder()
    (example,) = finder.find(Trainer, "Trainer", module, extraglobs={"folder": str(tmp_path)})[:1]
    assert doctest.DocTestRunner().run(example).failed == 0


def test_names_are_at_hand() -> None:
    assert atomtrain.Trainer is Trainer
    assert atomtrain.Callback is Callback


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "python.md"
    monkeypatch.chdir(tmp_path)
    found = doctest.testfile(str(page), module_relative=False)
    assert (found.failed, found.attempted > 10) == (0, True)

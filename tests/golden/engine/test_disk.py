"""Training with state on disk equals resident training bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.checkpoint import load_latest, save
from atomtrain.engine.devices.disk_file import DiskFile
from atomtrain.engine.devices.streams import Inject
from atomtrain.optimizers import AdamW, Muon, decay_groups, muon_groups
from atomtrain.optimizers import moments as moments_module
from atomtrain.training.setup.state import restore, shards_of
from tests.support import swapped
from tests.support.injecting import device_with
from tests.support.reference import HeadFirst, assert_equal_training, assert_same_bits, train, twin
from tests.support.swapped import STEPS

Factory = Callable[[nn.Module], torch.optim.Optimizer]
gpt = partial(swapped.gpt, tied=False, layers=4)
FACTORIES: dict[str, Factory] = {
    "float32": lambda model: AdamW(decay_groups(model), lr=1e-3),
    "bfloat16": lambda model: AdamW(decay_groups(model), lr=1e-3, state="bfloat16", seed=9),
    "int8": lambda model: AdamW(decay_groups(model), lr=1e-3, state="int8", seed=9),
    "muon": lambda model: Muon(muon_groups(model), lr=1e-3),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    # Its state has other sizes than those that are reserved for one that does not tell.
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
}
MASTERS = {"16": ("float32", "float32"), "12": ("float32", "bfloat16"), "8": ("split", "int8")}
"""Master and moments, by the bytes of a parameter."""


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices a parameter, the last of them not full."""
    torch.manual_seed(1234)
    monkeypatch.setattr(moments_module, "SLICE", 1024)


def token_batches(micro_batches: int = 1, steps: int = STEPS) -> list[list[dict[str, Tensor]]]:
    return swapped.token_batches(micro_batches, steps, sequences=2)


def swap(
    model: nn.Module,
    example: Any,
    factory: Factory,
    folder: Path,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        example,
        optimizer=lambda _: factory(model),
        device=device_with(inject, "emulated:1GiB/s", "64MiB"),
        device_memory="64MiB",
        options=atomtrain.Options(
            **{"profile": False, "disk": folder, "on_disk": "moments", **options}
        ),
    )


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_every_bit_is_equal(name: str, clip_norm: float | None, tmp_path: Path) -> None:
    factory, steps = FACTORIES[name], token_batches(2)
    model = gpt()
    reference = twin(model)
    resident = factory(reference)
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    options = {"micro_batches": 2, "segments": 3, "clip_norm": clip_norm}
    with swap(model, steps[0][0], factory, tmp_path, **options) as engine:
        assert engine.plan.on_disk == ("moments",)
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        assert_equal_training(engine, reference, resident)
    assert not list(tmp_path.iterdir())


def test_a_shared_weight_dropout_and_an_evaluation(tmp_path: Path) -> None:
    factory, steps = FACTORIES["bfloat16"], token_batches(3)
    model = gpt(tied=True, dropout=0.2)
    reference = twin(model)
    head_first = HeadFirst(reference)
    resident = factory(reference)
    torch.manual_seed(5)
    expected = [head_first.step(step, resident) for step in steps]
    torch.manual_seed(5)
    with swap(model, steps[0][0], factory, tmp_path, micro_batches=3, segments=4) as engine:
        losses = []
        for step in steps:
            losses.append(engine.step(step))
            before = torch.get_rng_state()
            engine.evaluate(step)
            torch.set_rng_state(before)
        assert losses == expected


def test_a_parameter_without_a_gradient_and_a_frozen_one(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(3))
            self.frozen = nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x)) + x

    model = nn.Sequential(Odd(), Odd(), Odd())
    reference = twin(model)
    factory: Factory = lambda m: AdamW([p for p in m.parameters() if p.requires_grad])  # noqa: E731
    resident = factory(reference)
    steps = [[torch.randn(4, 8)] for _ in range(3)]

    def loss(output: Tensor) -> Tensor:
        return output.pow(2).mean()

    expected = train(reference, steps, resident, lambda m, x: loss(m(x)))
    engine = atomtrain.swap(
        model, steps[0][0], optimizer=lambda _: factory(model), device="emulated:1GiB/s", loss=loss,
        options=atomtrain.Options(profile=False, segments=3, disk=tmp_path, on_disk="moments"),
    )  # fmt: skip
    with engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("on_disk", ["moments", "masters"])
def test_bfloat16_with_masters(name: str, on_disk: str, tmp_path: Path) -> None:
    master, state = MASTERS[name]

    def factory(model: nn.Module) -> AdamW:
        return AdamW(decay_groups(model), lr=1e-3, state=state, master=master, seed=9)

    steps = token_batches(2)
    model = gpt()
    reference = twin(model).to(torch.bfloat16)
    resident = factory(reference)
    for parameter, value in zip(reference.parameters(), model.parameters(), strict=True):
        resident.set_master(parameter, value.detach().clone())
    expected = train(reference, steps, resident, clip_norm=0.5)
    options = {"micro_batches": 2, "segments": 3, "clip_norm": 0.5, "precision": "bf16"}
    with swap(model, steps[0][0], factory, tmp_path, on_disk=on_disk, **options) as engine:
        assert engine.plan.on_disk[-1] == on_disk
        assert [engine.step(step) for step in steps] == expected
        found = engine.state_dict()
        for key, parameter in reference.named_parameters():
            assert_same_bits(found[key], resident.master_of(parameter), key)
        start, stop = engine.fragment_ranges()[0]
        with engine.fragment(start, stop) as values:
            before = values.clone()
            values.mul_(0.5)
        with engine.fragment(start, stop) as values:
            assert_same_bits(values, before * 0.5, "fragment")


@pytest.mark.parametrize("name", ["float32", "int8", "muon", "torch"])
def test_a_checkpoint_goes_from_disk_to_memory_and_back(name: str, tmp_path: Path) -> None:
    factory, steps = FACTORIES[name], token_batches(steps=4)
    folder = tmp_path / "disk"
    folder.mkdir()
    with swap(gpt(), steps[0][0], factory, folder) as engine:
        for step in steps[:2]:
            engine.step(step)
        save(tmp_path, 2, shards_of(engine), {})
        expected = [engine.step(step) for step in steps[2:]]
        end = {key: value.clone() for key, value in engine.state_dict().items()}
    for on_disk in ("nothing", "moments"):
        with swap(gpt(), steps[0][0], factory, folder, on_disk=on_disk) as engine:
            engine.step(steps[3])  # state that is replaced
            restore(engine, load_latest(tmp_path))
            assert [engine.step(step) for step in steps[2:]] == expected
            for key, value in engine.state_dict().items():
                assert_same_bits(value, end[key], key)


@pytest.mark.parametrize("seed", range(4))
def test_delays_change_no_bit(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    factory, steps = FACTORIES["bfloat16"], token_batches(2)
    model = gpt()
    reference = twin(model)
    resident = factory(reference)
    clip_norm = source.choice([None, 0.5])
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    slow = source.sample(["load", "unload", "update", "read", "write"], 2)

    def delay(stream: str) -> None:
        if stream in slow and source.random() < 0.7:
            time.sleep(0.003 * source.random())

    if seed % 2:
        monkeypatch.setattr(DiskFile, "_try_direct", lambda _: False)
    options = {
        "micro_batches": 2, "segments": source.randint(1, 5), "clip_norm": clip_norm,
        "slots": source.randint(1, 2), "inject": delay,
    }  # fmt: skip
    with swap(model, steps[0][0], factory, tmp_path, **options) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parameters_on_disk(
    direct: bool, clip_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(DiskFile, "_try_direct", lambda _: False)
    factory, steps = FACTORIES["float32"], token_batches(2, 4)
    model = gpt()
    reference = twin(model)
    resident = factory(reference)
    expected = train(reference, steps[:2], resident, clip_norm=clip_norm)
    options = {"micro_batches": 2, "segments": 4, "clip_norm": clip_norm, "on_disk": "parameters"}
    with swap(model, steps[0][0], factory, tmp_path, **options) as engine:
        assert engine.plan.on_disk == ("moments", "masters", "parameters")
        assert [engine.step(micro_batches) for micro_batches in steps[:2]] == expected
        assert_equal_training(engine, reference, resident)
        # What others write between two steps is what the next one uses.
        start, stop = engine.fragment_ranges()[1]
        with engine.fragment(start, stop) as values:
            values.mul_(0.5)
        changed = {key: value.clone() for key, value in engine.state_dict().items()}
        reference.load_state_dict(changed)
        expected = train(reference, steps[2:], resident, clip_norm=clip_norm)
        assert [engine.step(micro_batches) for micro_batches in steps[2:]] == expected
        assert_equal_training(engine, reference, resident)
        save(tmp_path / "saved", 1, shards_of(engine), {})
        engine.load_state_dict(changed)
        restore(engine, load_latest(tmp_path / "saved"))
        assert_equal_training(engine, reference, resident)
    for name, value in model.state_dict().items():  # the model stays usable
        assert_same_bits(value, reference.state_dict()[name], name)


@pytest.mark.parametrize("seed", range(3))
def test_delays_change_no_bit_with_parameters_on_disk(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    factory, steps = FACTORIES["bfloat16"], token_batches(1, 4)
    model = gpt(tied=seed == 1)
    reference = twin(model)
    resident = factory(reference)
    expected = train(reference, steps, resident)
    slow = source.sample(["load", "unload", "update", "read", "write"], 2)

    def delay(stream: str) -> None:
        if stream in slow and source.random() < 0.7:
            time.sleep(0.003 * source.random())

    options = {"segments": source.randint(2, 5), "on_disk": "parameters", "inject": delay}
    if seed == 2:
        options["host_layers"] = 1
    with swap(model, steps[0][0], factory, tmp_path, **options) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)

"""Swapped training in bfloat16 equals the ordinary loop on a bfloat16 model bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.checkpoint import load_latest, save
from atomtrain.engine.devices.streams import Inject
from atomtrain.optimizers import SGD, AdamW, Muon, decay_groups, muon_groups
from atomtrain.optimizers import moments as moments_module
from atomtrain.training.setup.state import restore, shards_of
from tests.support import swapped
from tests.support.injecting import device_with
from tests.support.reference import HeadFirst, assert_same_bits, train, twin
from tests.support.swapped import token_batches

FORMATS = {
    "16": ("float32", "float32"), "14": ("split", "float32"), "12": ("float32", "bfloat16"),
    "10": ("split", "bfloat16"), "8": ("split", "int8"),
}  # fmt: skip
"""Master and moments, by the bytes of a parameter on the host, gradient and stream included."""
Kept = AdamW | Muon | SGD
Factory = Callable[[nn.Module], Kept]
OTHERS: dict[str, Factory] = {
    "muon": lambda model: Muon(muon_groups(model), lr=1e-3),
    "muon-split": lambda model: Muon(muon_groups(model), lr=1e-3, state="int8", master="split"),
    "sgd": lambda model: SGD(decay_groups(model), lr=1e-2, momentum=0.9),
    "sgd-split": lambda model: SGD(model.parameters(), lr=1e-2, master="split"),
}
gpt = partial(swapped.gpt, layers=3)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices a parameter, the last of them not full."""
    torch.manual_seed(1234)
    monkeypatch.setattr(moments_module, "SLICE", 1024)


def factory_of(name: str) -> Factory:
    if name in OTHERS:
        return OTHERS[name]
    master, state = FORMATS[name]
    return lambda model: AdamW(
        decay_groups(model), lr=1e-3, state=state, master=master, seed=9, betas=(0.9, 0.95)
    )


def narrowed(model: nn.Module, factory: Factory) -> tuple[nn.Module, Kept]:
    """Return a bfloat16 twin and an optimizer whose masters are the model's parameters."""
    reference = twin(model).to(torch.bfloat16)
    optimizer = factory(reference)
    for parameter, value in zip(reference.parameters(), model.parameters(), strict=True):
        if parameter.requires_grad:
            optimizer.set_master(parameter, value.detach().clone())
    return reference, optimizer


def swap(
    model: nn.Module,
    example: Any,
    factory: Factory,
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
            precision="bf16", profile=False, optimizer_on_device=False, **options
        ),
    )


def assert_equal(engine: atomtrain.Engine, reference: nn.Module, optimizer: Kept) -> None:
    """Check streams, masters and moments bit for bit."""
    masters, moments = engine.state_dict(), engine.optimizer_state()
    streams = dict(engine.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert_same_bits(streams[name], parameter, name)
        if not parameter.requires_grad:
            continue
        assert_same_bits(masters[name], optimizer.master_of(parameter), name)
        for key, value in optimizer.state[parameter].items():
            if key not in optimizer.master_keys():
                assert_same_bits(moments[name][key], value, f"{name}/{key}")


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
@pytest.mark.parametrize(
    ("segments", "micro_batches", "clip_norm"), [(1, 1, None), (3, 3, None), (5, 3, 0.5)]
)
def test_every_bit_is_equal(
    name: str, segments: int, micro_batches: int, clip_norm: float | None
) -> None:
    factory, steps = factory_of(name), token_batches(micro_batches)
    model = gpt(tied=False, dropout=0.1 if segments == 3 else 0.0)
    reference, resident = narrowed(model, factory)
    torch.manual_seed(3)
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    options = {"micro_batches": micro_batches, "segments": segments, "clip_norm": clip_norm}
    with swap(model, steps[0][0], factory, **options) as engine:
        torch.manual_seed(3)
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_shared_weight(name: str, dropout: float) -> None:
    factory, steps = factory_of(name), token_batches(1)
    model = gpt(dropout=dropout)
    reference, resident = narrowed(model, factory)
    torch.manual_seed(3)
    expected = train(reference, steps, resident)
    with swap(model, steps[0][0], factory, segments=2) as engine:
        torch.manual_seed(3)
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)


@pytest.mark.parametrize("segments", [2, 4])
def test_a_shared_weight_and_several_micro_batches(segments: int) -> None:
    factory, steps = factory_of("16"), token_batches(3)
    model = gpt()
    reference, resident = narrowed(model, factory)
    head_first = HeadFirst(reference)
    expected = [head_first.step(batches, resident) for batches in steps]
    with swap(model, steps[0][0], factory, micro_batches=3, segments=segments) as engine:
        assert [engine.step(batches) for batches in steps] == expected
        masters = engine.state_dict()
        expected_weight = resident.master_of(head_first.weight)
        assert_same_bits(masters["head.weight"], expected_weight, "head.weight")


@pytest.mark.parametrize("seed", [0, 1])
def test_delays_change_no_bit(seed: int) -> None:
    """The update writes masters and streams while other segments are loaded."""
    drawn = random.Random(seed)

    def delay(_: str) -> None:
        time.sleep(drawn.choice([0.0, 0.0, 0.003]))

    factory, steps, model = factory_of("8"), token_batches(2), gpt(tied=False)
    reference, resident = narrowed(model, factory)
    expected = train(reference, steps, resident, clip_norm=0.5 if seed else None)
    options = {"micro_batches": 2, "segments": 5, "clip_norm": 0.5 if seed else None}
    with swap(model, steps[0][0], factory, inject=delay, **options) as engine:
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_whole_and_split_masters_train_alike(state: str, clip_norm: float | None) -> None:
    steps, model = token_batches(2, steps=5), gpt()
    ends: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for master in ("float32", "split"):
        copy = twin(model)

        def factory(owned: nn.Module, master: str = master) -> AdamW:
            return AdamW(decay_groups(owned), lr=1e-3, state=state, master=master, seed=9)

        with swap(copy, steps[0][0], factory, micro_batches=2, clip_norm=clip_norm) as engine:
            losses = [engine.step(batches) for batches in steps]
            end = {name: value.clone() for name, value in engine.state_dict().items()}
            for name, moments in engine.optimizer_state().items():
                end |= {f"{name}/{key}": value.clone() for key, value in moments.items()}
            end |= {f"{n}/stream": p.detach().clone() for n, p in engine.model.named_parameters()}
        ends.append((losses, end))
    (losses, whole), (split_losses, split) = ends
    assert losses == split_losses
    assert whole.keys() == split.keys()
    for key, value in whole.items():
        assert_same_bits(value, split[key], key)


@pytest.mark.parametrize("saved", FORMATS)
@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_checkpoint_goes_on_with_the_same_bits(saved: str, master: str, tmp_path: Path) -> None:
    """Also with a master of the other format: a checkpoint holds float32."""
    state = FORMATS[saved][1]
    steps = token_batches(1, steps=4)

    def resumed(model: nn.Module) -> AdamW:
        return AdamW(decay_groups(model), lr=1e-3, betas=(0.9, 0.95), state=state, master=master, seed=9)  # fmt: skip # noqa: E501

    with swap(gpt(), steps[0][0], factory_of(saved)) as engine:
        for batches in steps[:2]:
            engine.step(batches)
        save(tmp_path, 2, shards_of(engine), {})
        expected = [engine.step(batches) for batches in steps[2:]]
        end = {key: value.clone() for key, value in engine.state_dict().items()}
    tensors = load_latest(tmp_path).tensor_names["embedding"]
    assert not any(key.endswith(("/master", "/rest")) for key in tensors)
    with swap(gpt(), steps[0][0], resumed) as engine:
        restore(engine, load_latest(tmp_path))
        assert [engine.step(batches) for batches in steps[2:]] == expected
        for key, value in engine.state_dict().items():
            assert_same_bits(value, end[key], key)


@pytest.mark.parametrize("name", FORMATS)
def test_states_go_round(name: str) -> None:
    steps, factory = token_batches(1), factory_of(name)
    with swap(gpt(), steps[0][0], factory) as engine:
        engine.step(steps[0])
        state = {key: value.clone() for key, value in engine.state_dict().items()}
        moments = {n: {k: v.clone() for k, v in s.items()} for n, s in engine.optimizer_state().items()}  # fmt: skip # noqa: E501
        expected = engine.step(steps[1])
    assert all(value.dtype is torch.float32 for value in state.values())
    with swap(gpt(), steps[0][0], factory) as engine:
        engine.load_state_dict(state)
        engine.load_optimizer_state(moments)
        assert engine.step(steps[1]) == expected

"""`atom bench context` and `large`: they run on any device, and keep to their budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from atombench.common import BenchmarkOptions
from atombench.engine import context, large
from atombench.engine.context import ContextSetup
from atombench.engine.large import LargeSetup
from atomtrain.errors import ConfigError
from atomtrain.models import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.views.plans.subject import subject

pytestmark = pytest.mark.slow


def test_a_long_sequence_keeps_to_its_budget() -> None:
    setup = ContextSetup(tokens=2048, layers=2, width=32, device_memory="24MiB")
    result = context.run(BenchmarkOptions(), setup)
    assert 0 < result["device_peak_bytes"] <= result["predicted_device_peak_bytes"]
    assert result["predicted_device_peak_bytes"] <= result["device_budget_bytes"] == 24 << 20
    assert result["attention_matrix_bytes"] == 2 * 4 * 2048 * 2048 > result["device_budget_bytes"]


SETUP = LargeSetup(
    model="tiny", context_tokens=32, sequences=2, micro_batches=3, device="emulated",
    device_memory="16MiB", steps=2,
)  # fmt: skip


@pytest.mark.usefixtures("assumed_times")
def test_a_small_model_on_the_emulated_device() -> None:
    result = large.run(BenchmarkOptions(), SETUP)
    assert result["tokens_per_s"] == pytest.approx(3 * 2 * 32 / result["step_s"])
    flops = 3 * subject("tiny", 32).analyse(2).step_flops
    assert result["model_flops_per_s"] == pytest.approx(flops / result["step_s"])
    assert 0 < result["device_peak_bytes"] <= result["predicted_device_peak_bytes"]
    assert result["predicted_device_peak_bytes"] <= result["device_budget_bytes"] == 16 << 20
    assert len(result["losses"]) == 3
    assert result["optimizer"] == "adamw"
    assert 0 <= result["link_wait_share"] < 1


@pytest.mark.usefixtures("assumed_times")
def test_what_is_known_is_kept_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(large, "keep_partial", lambda result, out: kept.append((dict(result), out)))
    options = BenchmarkOptions(
        out=tmp_path / "large.json", optimizer="adamw-bfloat16-split", micro_batches=2, steps=2
    )
    result = large.run(options, SETUP)
    assert result["optimizer"] == "adamw-bfloat16-split"
    assert result["inputs"]["micro_batches"] == result["steps"] == 2
    assert [found.get("steps") for found, _ in kept] == [None, None, 1, 2]
    assert {out for _, out in kept} == {options.out}
    assert kept[0][0]["plan"] == result["plan"]
    assert kept[1][0]["first_step_s"] == result["first_step_s"]


def test_all_blocks_are_drawn_at_once_as_deep_models_are() -> None:
    torch.manual_seed(0)
    sizes = dataclasses.replace(preset("tiny"), width=256, heads=8, layers=16)
    model, usual = large.random_gpt(sizes), GPT(sizes)
    for name, parameter in model.state_dict().items():
        alike = usual.state_dict()[name]
        assert float(parameter.std()) == pytest.approx(float(alike.std()), rel=0.05, abs=1e-6)
        assert float(parameter.mean()) == pytest.approx(float(alike.mean()), abs=1e-3)
    assert model.head.weight is model.embedding.token.weight
    one, other = (model.blocks[index].state_dict() for index in (0, 15))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [({"model": "gpt3-6b"}, "gpt3-6b"), ({"optimizer": "adam"}, "there is no optimizer 'adam'")],
)
def test_what_does_not_exist_is_told(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        large.run(BenchmarkOptions(**chosen), SETUP)


@pytest.mark.parametrize(
    ("bytes_each", "name"), [(16, "adamw"), (15, "adamw-split"), (8.5, "adamw-int8")]
)
def test_the_most_exact_state_that_host_memory_can_hold(
    monkeypatch: pytest.MonkeyPatch, bytes_each: float, name: str
) -> None:
    monkeypatch.setattr(large, "host_memory_bytes", lambda: int(1e9 * bytes_each / 0.9) + 1)
    assert large._largest_state(10**9, "bf16") == name
    with pytest.raises(ConfigError, match="run this on a host with more"):
        large._largest_state(10**10, "bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run there")
def test_without_a_gpu_it_says_what_predicts_one() -> None:
    with pytest.raises(ConfigError, match=r"there is no CUDA device.*atom plan"):
        large.run(BenchmarkOptions())

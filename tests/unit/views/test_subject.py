"""Models by name or by their configuration, without weights; what fits them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.analysis.costs.costs import ChainCosts, layer_costs
from atomtrain.errors import AnalysisError, ConfigError, PlanError
from atomtrain.models import GPT, PRESETS
from atomtrain.models.lora_config import LoraConfig
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import GPUS, gpu, machine_for
from atomtrain.planning.search.batch_search import Workload
from atomtrain.views.plans.report import forecaster, least_fitting, make_report
from atomtrain.views.plans.subject import subject

pytestmark = pytest.mark.slow

GIB = 1 << 30
LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip


def test_presets_are_on_the_meta_device() -> None:
    model = subject("gpt3-175b")
    assert all(parameter.is_meta for parameter in model.model.parameters())
    assert 174e9 < model.parameters < 176e9
    assert model.context_tokens == 2048
    assert subject("gpt3-175b", 512).context_tokens == 512


def test_each_size_of_a_micro_batch_is_analysed_once() -> None:
    model = subject("tiny")
    assert model.analyse(2) is model.analyse(2)
    one, two = model.analyse(1), model.analyse(2)
    assert two.step_flops == pytest.approx(2 * one.step_flops)
    assert one.parameters == two.parameters == model.parameters


def test_a_gpu_of_the_catalogue_needs_what_its_kernels_take_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What that is, `tests/unit/analysis/test_costs.py` shows."""
    asked = []

    def costs(*given: Any, on_gpu: bool) -> ChainCosts:
        asked.append(on_gpu)
        return layer_costs(*given, on_gpu=on_gpu)

    monkeypatch.setattr("atomtrain.views.plans.subject.layer_costs", costs)
    model, card = subject("tiny"), gpu("h100")
    workload = Workload(context_tokens=64, micro_batch=1, tokens_per_step=64)
    found = forecaster(model)(
        Setting(machine=machine_for(card, 64 * GIB), workload=workload, card=card)
    )
    assert asked == [True]
    assert found.analysis is model.analyse(1, on_gpu=True)
    assert model.analyse(1) is not found.analysis
    assert asked == [True, False]


def test_a_hugging_face_configuration_is_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json"):
        model = subject(str(path))
        assert model.name == "small-llama"
        assert model.context_tokens == 64
        assert all(parameter.is_meta for parameter in model.model.parameters())
    analysis = subject(str(folder), 32).analyse(2)
    assert len(analysis.chain.layers) >= 3
    assert analysis.parameters == sum(p.numel() for p in analysis.chain.parameters)
    with pytest.raises(ConfigError, match="at most 64 tokens"):
        subject(str(folder), 65)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_matrices_in_few_bits_have_as_many_parameters(bits: int | None) -> None:
    whole = subject("tiny")
    assert isinstance(whole.model, GPT)
    wide = [m for m in whole.model.modules() if isinstance(m, torch.nn.Linear)]
    adapted = {id(m): m for m in wide if m is not whole.model.head}.values()
    adapters = sum(2 * (m.in_features + m.out_features) for m in adapted)
    before = whole.parameters
    narrow = subject("tiny").with_adapters(LoraConfig(r=2, alpha=4, bits=bits))
    assert narrow.parameters == before + adapters


def test_a_configuration_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "hidden_act": "none such"}))
    with pytest.raises(AnalysisError, match="cannot be made a model"):
        subject(str(file))


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean .gpt3-6\.7b."):
        subject("gpt3-6.7")
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        subject("nowhere.json")


def test_every_preset_can_be_asked_for() -> None:
    for name in PRESETS:
        assert subject(name).name == name


def setting_of(name: str, **fields: float) -> Setting:
    card = gpu(name)
    machine = dataclasses.replace(machine_for(card, 64 * GIB), **fields)
    return Setting(machine=machine, workload=Workload(context_tokens=64), card=card)


def test_the_least_machine_that_fits_really_fits_and_the_next_smaller_does_not() -> None:
    model = subject("demo", 64)
    setting = setting_of("rtx-3090", device_memory_bytes=1 << 20)
    forecast = forecaster(model)
    found = least_fitting(setting, forecast)
    assert found is not None
    memory = {card.name: card.memory_bytes for card in GPUS.values()}
    assert memory[found.cards[0]] == min(memory[name] for name in found.cards)
    for fields, fits in (
        ({"device_memory_bytes": found.device_memory_bytes}, True),
        ({"device_memory_bytes": 1 << 20}, False),
    ):
        setting = setting_of("rtx-3090", host_memory_bytes=found.host_bytes, **fields)
        if fits:
            assert forecast(setting).plan.host_bytes <= found.host_bytes
        else:
            with pytest.raises(PlanError):
                forecast(setting)


def test_with_state_on_disk_a_step_is_as_long_as_host_memory_allows() -> None:
    model = subject("demo", 64)
    forecast = forecaster(model)
    disk = {"storage_read_bytes_per_s": 1e9, "storage_write_bytes_per_s": 1e9}
    small = setting_of("rtx-3090", device_memory_bytes=64 << 20, **disk)
    workload = Workload(context_tokens=64, disk=True, on_disk="parameters", micro_batch=1)
    small = dataclasses.replace(small, workload=workload)
    least = least_fitting(small, forecast)
    assert least is not None
    steps = []
    for host_bytes in (least.host_bytes, least.host_bytes + (8 << 20), 2 * least.host_bytes):
        machine = dataclasses.replace(small.machine, host_memory_bytes=host_bytes)
        found = forecast(dataclasses.replace(small, machine=machine))
        assert found.plan.host_bytes <= host_bytes
        steps.append(found)
    tokens = [found.tokens_per_step for found in steps]
    assert tokens[0] == 64 < tokens[1] < tokens[2]
    assert steps[0].tokens_per_s < steps[1].tokens_per_s < steps[2].tokens_per_s


def test_the_report_of_what_does_not_fit_names_gpus_and_host_memory() -> None:
    model = subject("demo", 64)
    with pytest.raises(PlanError, match=r"--device-memory.*GPUs with memory enough: rtx-4060"):
        make_report(model, setting_of("rtx-3090", device_memory_bytes=1 << 20))
    with pytest.raises(PlanError, match=r"raise --host-memory to at least 1GiB; or hold fewer"):
        make_report(model, setting_of("rtx-3090", host_memory_bytes=1 << 20))


def test_the_least_host_memory_is_not_that_of_the_fastest_plan() -> None:
    forecast = forecaster(subject("demo", 64))
    setting = setting_of("rtx-3090", device_memory_bytes=64 << 20)
    found = least_fitting(setting, forecast)
    assert found is not None
    assert found.host_bytes < forecast(setting).plan.host_bytes
    just = setting_of("rtx-3090", device_memory_bytes=64 << 20, host_memory_bytes=found.host_bytes)
    assert forecast(just).plan.host_bytes <= found.host_bytes


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'atomtrain\[hf\]'"):
        subject(str(tmp_path))

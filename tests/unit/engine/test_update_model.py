"""What plans count for an optimizer is what the engine then has."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.models import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.planning.plan.updating import ADAMW_BYTES, work_of
from atomtrain.training.config.optimizing import (
    check_precision,
    host_bytes_per_parameter,
    named_optimizer,
)
from atomtrain.views.plans.subject import subject

pytestmark = pytest.mark.usefixtures("assumed_times")
CASES: list[tuple[str, Literal["bf16", "fp16"] | None]] = [
    ("adamw", None), ("adamw-bfloat16", None), ("adamw-int8", None), ("muon", None),
    ("adamw", "bf16"), ("adamw-split", "bf16"), ("adamw-bfloat16-split", "bf16"),
    ("adamw-int8", "bf16"), ("adamw", "fp16"), ("muon", "bf16"), ("muon", "fp16"),
    ("sgd", None), ("sgd", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_plan_and_engine_agree_on_host_bytes(name: str, precision: Any) -> None:
    check_precision(precision or "fp32", name)
    model = GPT(preset("tiny"))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    with atomtrain.swap(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=lambda _: named_optimizer(model, name, precision or "fp32"),
        device="emulated:1000GB/s",
        device_memory="64MiB",
        options=atomtrain.Options(precision=precision, segments=2, optimizer_on_device=False),
    ) as engine:
        taken, state_bytes = engine.planner.updates, engine.state_bytes
    asked = subject("tiny", 16).trained_with(
        lambda owned: named_optimizer(owned, name, precision or "fp32"), precision
    )
    planned = asked.analyse(1).updates
    assert taken is not None
    assert planned is not None
    assert planned.host_bytes == taken.host_bytes
    assert sorted(planned.parameters.values()) == sorted(taken.parameters.values())
    assert asked.analyse(1).parameter_bytes == sum(p.nbytes for p in model.parameters())
    each = state_bytes / engine.parameters
    most = host_bytes_per_parameter(name, precision or "fp32")
    assert each <= 1.01 * most
    if name != "muon":  # whose matrices take 4 bytes less
        assert each == pytest.approx(most, rel=0.01)


def test_time_follows_what_is_moved_and_multiplied() -> None:
    weight = torch.empty(64, 64, device="meta")
    assert work_of(weight, 8 * weight.numel()) == (weight.numel(), weight.numel())
    half = work_of(weight.bfloat16(), 6 * weight.numel())
    assert half.host == pytest.approx(weight.numel() * (3 * 2 + 2 * 6) / ADAMW_BYTES)
    products = work_of(weight, 4 * weight.numel(), flops=1e9)
    assert products.host > products.device > weight.numel()


def test_muon_s_products_count_for_matrices_only() -> None:
    model = subject("tiny", 16).trained_with(lambda owned: named_optimizer(owned, "muon"))
    optimizer: Any = model.optimizer
    norms: list[nn.Parameter] = [p for p in model.model.parameters() if p.ndim == 1]
    matrix = optimizer.param_groups[0]["params"][0]
    short, long = sorted(matrix.shape)
    assert optimizer.flops_of(matrix) >= 3 * short * short * long
    assert optimizer.flops_of(norms[0]) == 0

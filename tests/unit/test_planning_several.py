"""Plans for several devices of a host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import chain_of
from atomtrain.cli.main import main
from atomtrain.errors import ConfigError
from atomtrain.planning.prospect import Workload
from atomtrain.planning.several import share_of, shared_updates
from atomtrain.planning.updating import two_moments


@pytest.mark.parametrize(("count", "devices", "share"), [(1, 4, 1), (5, 2, 3), (6, 3, 2)])
def test_the_largest_share(count: int, devices: int, share: int) -> None:
    assert share_of(count, devices) == share


def test_further_devices_take_memory_and_time_of_the_host() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    chain = chain_of(model, torch.randn(2, 64), lambda output: output.sum()).chain
    alone = two_moments(chain)
    assert shared_updates(alone, chain, 1) is alone
    three = shared_updates(alone, chain, 3)
    gradients_bytes = three.scratch_bytes // 2
    assert gradients_bytes >= sum(p.nbytes for p in chain.parameters if p.requires_grad)
    # Twice 12 bytes moved for a gradient of 4, against 28 for the update itself.
    assert three.host_work == pytest.approx(alone.host_work * (1 + 24 / 28))
    assert three.device_scratch_bytes is None


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    given = ["plan", "tiny", "--gpu", "rtx-3090", "--context", "64", "--micro-batch", "4"]
    assert main([*given, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_atom_plan_devices(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["--tokens-per-step", str(8 * 4 * 64)]
    one, two = plan(capsys, *tokens), plan(capsys, *tokens, "--devices", "2")
    assert one["devices"] == 1
    assert two["devices"] == 2
    assert two["plan"]["micro_batches"] == one["plan"]["micro_batches"] // 2
    assert two["tokens_per_step"] == one["tokens_per_step"]
    assert two["plan"]["host_bytes"] > one["plan"]["host_bytes"]
    assert two["peak_flops_per_s"] == 2 * one["peak_flops_per_s"]
    assert two["plan"]["device_blocks"] == []
    given = ["plan", "tiny", "--gpu", "rtx-3090", "--context", "64", "--devices", "2"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "2 x " in shown
    assert "on each of 2 devices" in shown


def test_steps_that_devices_cannot_divide() -> None:
    with pytest.raises(ConfigError, match=r"divided equally among 3 devices; .* 3072 tokens"):
        Workload(context_tokens=512, tokens_per_step=4 * 512, micro_batch=2, devices=3)
    with pytest.raises(ConfigError, match="devices must be at least 1"):
        Workload(context_tokens=512, devices=0)

"""Compiled templates: one for each kind of layer, whatever the depth; the model's own result."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.execution.compiled import compiled
from atomtrain.errors import ConfigError
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import adamw, gpt, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")


def opened(model: nn.Module, example: Any, device: str, **options: Any) -> atomtrain.Engine:
    """Return an engine whose layers shall be compiled."""
    return atomtrain.swap(
        model,
        example,
        optimizer=adamw,
        device=device,
        options=atomtrain.Options(compile=True, **options),
    )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run what would be compiled operation by operation; list what was handed over."""
    handed: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        handed.append(graph)
        return graph.forward

    monkeypatch.setattr(
        "atomtrain.engine.api.compiled", lambda chain, costs: compiled(chain, costs, backend)
    )
    monkeypatch.setenv("CXX", sys.executable)  # any program: none is needed here
    torch._dynamo.reset()
    return handed


def test_a_deeper_model_compiles_no_more(graphs: list[Any]) -> None:
    counts = []
    for layers in (2, 6):
        torch.manual_seed(0)
        model, steps = gpt(tied=False, layers=layers), token_batches(2)
        reference = twin(model)
        resident = adamw(reference.parameters())
        expected = train(reference, steps, resident)
        torch._dynamo.reset()
        graphs.clear()
        with opened(model, steps[0][0], "cpu", micro_batches=2, segments=layers + 2) as engine:
            assert [engine.step(step) for step in steps] == expected
            assert_equal_training(engine, reference, resident)
        counts.append(len(graphs))
    assert counts[0] == counts[1]
    assert counts[0] <= 2 * 3, "embedding, block and head, with and without gradients"


@pytest.mark.parametrize(
    ("device", "why"),
    [("emulated", "leave compile out"), ("cpu", "there is no no-such-compiler; install it")],
)
def test_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str, why: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=why):
        opened(gpt(), token_batches(1)[0][0], device)

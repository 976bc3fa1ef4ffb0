"""Compiled templates: one for each kind of layer, whatever the depth; the model's own result."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from reference import assert_equal_training, train, twin
from swapped import adamw, token_batches
from torch import nn

import atomtrain
from atomtrain.errors import ConfigError
from atomtrain.models import GPT, GPTConfig
from atomtrain.swapping.compiled import compiled

pytestmark = pytest.mark.usefixtures("assumed_times")


def gpt(layers: int) -> GPT:
    model = GPT(
        GPTConfig(layers=layers, width=30, heads=3, head_width=7, vocabulary=101, context=19)
    )
    model.head.weight = nn.Parameter(torch.randn(101, 30) * 0.02)
    return model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run what would be compiled operation by operation; list what was handed over."""
    handed: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        handed.append(graph)
        return graph.forward

    monkeypatch.setattr(
        "atomtrain.swapping.opening.compiled", lambda chain, costs: compiled(chain, costs, backend)
    )
    monkeypatch.setenv("CXX", sys.executable)  # any program: none is needed here
    torch._dynamo.reset()
    return handed


def test_a_deeper_model_compiles_no_more(graphs: list[Any]) -> None:
    counts = []
    for layers in (2, 6):
        torch.manual_seed(0)
        model, steps = gpt(layers), token_batches(2)
        reference = twin(model)
        resident = adamw(reference.parameters())
        expected = train(reference, steps, resident)
        torch._dynamo.reset()
        graphs.clear()
        with atomtrain.swap(
            model,
            steps[0][0],
            optimizer=adamw,
            device="cpu",
            options=atomtrain.Options(micro_batches=2, segments=layers + 2, compile=True),
        ) as engine:
            assert [engine.step(step) for step in steps] == expected
            assert_equal_training(engine, reference, resident)
        counts.append(len(graphs))
    assert counts[0] == counts[1]
    assert counts[0] <= 2 * 3, "embedding, block and head, with and without gradients"


def test_the_emulated_device_cannot_count_compiled_code() -> None:
    with pytest.raises(ConfigError, match="leave compile out"):
        atomtrain.swap(
            gpt(2),
            token_batches(1)[0][0],
            optimizer=adamw,
            device="emulated",
            options=atomtrain.Options(compile=True),
        )


def test_compiling_for_the_processor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler; install it"):
        atomtrain.swap(
            gpt(2),
            token_batches(1)[0][0],
            optimizer=adamw,
            device="cpu",
            options=atomtrain.Options(compile=True),
        )

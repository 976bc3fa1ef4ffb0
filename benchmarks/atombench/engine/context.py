"""One very long sequence on a small device: does a step of 131,072 tokens keep to its budget?

A GPT of a few layers is trained for one step on a single sequence. What forward saves is offloaded,
attention is PyTorch's fused kernel, and the head makes its logits in pieces.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.models import GPT, GPTConfig
from atomtrain.planning.plan.shape import Activation

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ContextSetup:
    """Inputs of the benchmark."""

    tokens: int = 131072
    """Of the one sequence of a step."""
    layers: int = 4
    width: int = 128
    heads: int = 2
    vocabulary: int = 512
    head_pieces: int = 8
    activations: Activation = "offload"
    device_memory: str = "2GiB"
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)


QUICK = ContextSetup(tokens=8192, device_memory="192MiB")


def run(options: BenchmarkOptions, setup: ContextSetup | None = None) -> Result:
    """Measure; return the keys of the benchmarks' contract and the inputs.

    Raises:
        PlanError: the sequence does not fit the budget.
    """
    setup = setup or (QUICK if options.quick else ContextSetup())
    torch.manual_seed(setup.seed)
    config = GPTConfig(
        layers=setup.layers,
        width=setup.width,
        heads=setup.heads,
        head_width=setup.width // setup.heads,
        vocabulary=setup.vocabulary,
        context=setup.tokens,
        head_pieces=setup.head_pieces,
    )
    tokens = torch.randint(setup.vocabulary, (1, setup.tokens + 1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    with atomtrain.swap(
        GPT(config),
        batch,
        optimizer=torch.optim.AdamW,
        device="emulated",
        device_memory=setup.device_memory,
        options=atomtrain.Options(activations=setup.activations, profile=False),
    ) as engine:
        progress(engine.plan.describe())
        loss = engine.step([batch])
        assert engine.last is not None
        return {
            "step_s": engine.last.step_s,
            "loss": loss,
            "device_peak_bytes": engine.last.device_peak_bytes,
            "predicted_device_peak_bytes": engine.plan.device_peak_bytes,
            "device_budget_bytes": engine.device.memory_bytes,
            "attention_matrix_bytes": setup.heads * _FLOAT_BYTES * setup.tokens**2,
            "threads": torch.get_num_threads(),
            "inputs": asdict(setup),
            **description(),
        }

"""A 7B model on one GPU, under a cap of the GPU's memory: tokens and FLOPs a second.

The model's weights are random, its micro-batches too, clipped as `atom train` clips. Of the
optimizer states the most exact one is taken that host memory can hold. FLOPs are those of the
model, forward and backward; what is computed again does not count. A step ends when its updates
have: the clock stops after `Engine.wait`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.engine.calibration.machines import host_memory_bytes
from atomtrain.errors import ConfigError
from atomtrain.models import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.models.making import parameter_count
from atomtrain.training.config.optimizing import (
    host_bytes_per_parameter,
    named_optimizer,
    precision_of,
    smaller_states,
)
from atomtrain.units import format_bytes
from atomtrain.views.plans.subject import subject

_HOST_SHARE = 0.9
"""Of the host's memory that parameters, gradients and states may take; the rest is for values that
wait, and for the system."""


@dataclass(frozen=True, kw_only=True)
class LargeSetup:
    """Inputs of the benchmark."""

    model: str = "gpt3-6.7b"
    context_tokens: int = 2048
    sequences: int = 4
    """Of a micro-batch."""
    micro_batches: int = 16
    """Of a step."""
    precision: str = "bf16"
    device: str = "cuda"
    device_memory: str = "24GiB"
    """The cap; a card with so much would leave a little less."""
    steps: int = 3
    """Counted ones, after one that is not; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches."""
        return self.micro_batches * self.sequences * self.context_tokens


QUICK = LargeSetup(model="gpt3-xl", device_memory="8GiB", micro_batches=4, steps=2)


def run(options: BenchmarkOptions, setup: LargeSetup | None = None) -> Result:
    """Measure; return the keys of the benchmarks' contract and the inputs.

    Raises:
        ConfigError: there is no CUDA device, or the host cannot hold the model in any form.
        PlanError: the model cannot be trained under the cap.
    """
    setup = setup or (QUICK if options.quick else LargeSetup())
    if setup.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device, and a 7B model takes days on a CPU; `atom plan gpt3-6.7b "
            "--gpu h100 --precision bf16` predicts what a GPU does"
        )
    torch.manual_seed(setup.seed)
    sizes = preset(setup.model)
    outline = subject(setup.model, setup.context_tokens)
    parameters = parameter_count(outline.model)
    optimizer = _largest_state(parameters, setup.precision)
    progress(f"{setup.model} with {optimizer}: {parameters / 1e9:.2f}B parameters")
    model = GPT(sizes)
    micro_batches = [_micro_batch(setup, sizes.vocabulary) for _ in range(setup.micro_batches)]
    with atomtrain.swap(
        model,
        micro_batches[0],
        optimizer=lambda _: named_optimizer(model, optimizer, setup.precision),
        device=setup.device,
        device_memory=options.device_memory or setup.device_memory,
        options=atomtrain.Options(
            micro_batches=setup.micro_batches,
            clip_norm=1.0,
            head_pieces="auto",
            precision=precision_of(setup.precision),
        ),
    ) as engine:
        plan = engine.plan
        progress(plan.describe())
        losses = [engine.step(micro_batches)]
        engine.wait()
        waits_s, peaks_bytes = [], []
        started_s = time.perf_counter()
        for step in range(setup.steps):
            losses.append(engine.step(micro_batches))
            assert engine.last is not None
            waits_s.append(engine.last.link_wait_s)
            peaks_bytes.append(engine.last.device_peak_bytes)
            progress(f"step {step + 1} of {setup.steps}: {engine.last.step_s:.2f} s")
        engine.wait()
        step_s = (time.perf_counter() - started_s) / setup.steps
        device, budget_bytes = engine.device_name, engine.device.memory_bytes
    flops = outline.analyse(setup.sequences).step_flops
    return {
        "tokens_per_s": setup.tokens_per_step / step_s,
        "model_flops_per_s": setup.micro_batches * flops / step_s,
        "step_s": step_s,
        "predicted_step_s": plan.step_s,
        "link_wait_share": sum(waits_s) / setup.steps / step_s,
        "device": device,
        "device_budget_bytes": budget_bytes,
        "device_peak_bytes": max(peaks_bytes),
        "predicted_device_peak_bytes": plan.device_peak_bytes,
        "predicted_host_bytes": plan.host_bytes,
        "parameters": parameters,
        "optimizer": optimizer,
        "losses": losses,
        "plan": plan.to_json(),
        "inputs": asdict(setup),
        **description(),
    }


def _largest_state(parameters: int, precision: str) -> str:
    """Return the most exact of AdamW's states that the host can hold."""
    there_bytes = _HOST_SHARE * host_memory_bytes()
    forms = {"adamw": host_bytes_per_parameter("adamw", precision)}
    forms |= smaller_states("adamw", precision)
    for name, each_bytes in forms.items():
        if parameters * each_bytes <= there_bytes:
            return name
    least = min(forms.values()) * parameters
    raise ConfigError(
        f"the model takes at least {format_bytes(int(least))} of host memory, "
        f"{format_bytes(int(there_bytes))} can be used; run this on a host with more"
    )


def _micro_batch(setup: LargeSetup, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (setup.sequences, setup.context_tokens + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

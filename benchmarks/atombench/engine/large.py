"""A 7B model on one GPU, under a cap of the GPU's memory: tokens and FLOPs a second.

The model's weights are random, its micro-batches too, clipped as `atom train` clips. Of the
optimizer states the most exact one is taken that host memory can hold. FLOPs are those of the
model, forward and backward; what is computed again does not count. A step ends when its updates
have: the clock stops after `Engine.wait`. What is known after each step is kept in `--out`.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import atomtrain
from atombench.common import (
    BenchmarkOptions,
    Result,
    description,
    keep_partial,
    progress,
    require_positive,
)
from atomtrain.engine.calibration.machines import host_memory_bytes
from atomtrain.errors import ConfigError
from atomtrain.models import GPT
from atomtrain.models.gpt_config import GPTConfig, preset
from atomtrain.models.making import make_empty, parameter_count
from atomtrain.training.config.optimizing import (
    check_optimizer,
    check_precision,
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
    optimizer: str | None = None
    """By name; `None` is the most exact AdamW that host memory can hold."""
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
        ConfigError: there is no CUDA device, no such model or optimizer, or the host cannot hold
            the model in any form.
        PlanError: the model cannot be trained under the cap.
    """
    setup = _chosen(setup or (QUICK if options.quick else LargeSetup()), options)
    if setup.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device, and a 7B model takes days on a CPU; `atom plan gpt3-6.7b "
            "--gpu h100 --precision bf16` predicts what a GPU does"
        )
    torch.manual_seed(setup.seed)
    sizes = preset(setup.model)
    outline = subject(setup.model, setup.context_tokens)
    parameters = parameter_count(outline.model)
    optimizer = setup.optimizer or _largest_state(parameters, setup.precision)
    progress(f"{setup.model} with {optimizer}: {parameters / 1e9:.2f}B parameters")
    flops = setup.micro_batches * outline.analyse(setup.sequences).step_flops
    model = random_gpt(sizes)
    micro_batches = [_micro_batch(setup, sizes.vocabulary) for _ in range(setup.micro_batches)]
    opened_s = time.perf_counter()
    with atomtrain.swap(
        model,
        micro_batches[0],
        optimizer=lambda _: named_optimizer(model, optimizer, setup.precision),
        device=setup.device,
        device_memory=setup.device_memory,
        options=atomtrain.Options(
            micro_batches=setup.micro_batches,
            clip_norm=1.0,
            head_pieces="auto",
            precision=precision_of(setup.precision),
            compile=False,  # `scripts/first-hour` shows what that gains
        ),
    ) as engine:
        progress(engine.plan.describe())
        result: Result = {
            "predicted_step_s": engine.plan.step_s,
            "open_s": time.perf_counter() - opened_s,
            "device": engine.device_name,
            "device_budget_bytes": engine.device.memory_bytes,
            "predicted_device_peak_bytes": engine.plan.device_peak_bytes,
            "predicted_host_bytes": engine.plan.host_bytes,
            "parameters": parameters,
            "optimizer": optimizer,
            "plan": engine.plan.to_json(),
            "inputs": asdict(setup),
            **description(),
        }
        keep_partial(result, options.out)
        return result | _measured(engine, micro_batches, setup, flops, options, result)


def _chosen(setup: LargeSetup, options: BenchmarkOptions) -> LargeSetup:
    """Return the inputs with what a user chose.

    Raises:
        ConfigError: there is no such optimizer.
    """
    names = ("model", "micro_batches", "optimizer", "steps", "device_memory")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    setup = replace(setup, **{name: one for name, one in given.items() if one is not None})
    if setup.optimizer is not None:
        check_optimizer(setup.optimizer)
        check_precision(setup.precision, setup.optimizer)
    return setup


def _measured(
    engine: atomtrain.Engine,
    micro_batches: list[dict[str, torch.Tensor]],
    setup: LargeSetup,
    flops: float,
    options: BenchmarkOptions,
    known: Result,
) -> Result:
    """Train; return what steps took, and keep it after each of them."""
    losses = [engine.step(micro_batches)]
    assert engine.last is not None
    result: Result = {"first_step_s": engine.last.step_s, "losses": losses}
    keep_partial(known | result, options.out)
    engine.wait()
    waits_s, peak_bytes = 0.0, 0
    started_s = time.perf_counter()
    for step in range(1, setup.steps + 1):
        losses.append(engine.step(micro_batches))
        if step == setup.steps:
            engine.wait()
        step_s = (time.perf_counter() - started_s) / step
        waits_s += engine.last.link_wait_s
        peak_bytes = max(peak_bytes, engine.last.device_peak_bytes)
        progress(f"step {step} of {setup.steps}: {engine.last.step_s:.2f} s")
        result |= {
            "tokens_per_s": setup.tokens_per_step / step_s,
            "model_flops_per_s": flops / step_s,
            "step_s": step_s,
            "steps": step,
            "link_wait_share": waits_s / step / step_s,
            "device_peak_bytes": peak_bytes,
        }
        keep_partial(known | result, options.out)
    return result


def random_gpt(sizes: GPTConfig) -> GPT:
    """Return a GPT whose blocks all have the same random weights: one is drawn, others copy it.

    To draw 7 billion numbers takes a minute, and how fast they are multiplied is the same.
    """
    drawn = GPT(replace(sizes, layers=1)).state_dict()
    for name, weight in drawn.items():
        if name.endswith(("attention_out.weight", "mlp_out.weight")):
            weight.mul_(sizes.layers**-0.5)  # as `GPT.reset_parameters` has it by depth
    model = make_empty(sizes)
    assert isinstance(model, GPT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn[re.sub(r"^blocks\.\d+", "blocks.0", name)])
    return model


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

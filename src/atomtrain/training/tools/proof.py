"""A proof that training through a small device memory gives the bits of ordinary training.

The same model learns the same tokens twice: swapped through a device that holds a part of its
training state, by the engine, and whole, by an ordinary loop of PyTorch that is written out here,
so that whoever doubts can read it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atomtrain.engine.api import swap
from atomtrain.engine.devices.gpus import library_bytes
from atomtrain.engine.options import Options
from atomtrain.models import GPT, GPTConfig
from atomtrain.progress import each
from atomtrain.units import parse_bytes

_STATE_BYTES = 16
"""Of a parameter, its gradient and AdamW's moments, in float32."""
_RATE = 1e-3
MicroBatch = Mapping[str, Tensor]


CONFIG = GPTConfig(layers=8, width=256, heads=4, head_width=64, vocabulary=4096, context=128)
"""Of the model: small enough for a minute on two cores."""
MICRO_BATCHES = 4
"""Of each step, one sequence each."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What both ways gave."""

    parameters: int
    state_bytes: int
    """Parameters, gradients and optimizer state: what ordinary training holds on the device."""
    device: str
    device_budget_bytes: int
    device_peak_bytes: int
    """Most that was on the device at once, values of forward included."""
    segments: int
    swapped_losses: tuple[float, ...]
    resident_losses: tuple[float, ...]
    swapped_hash: str
    resident_hash: str
    differing: tuple[str, ...]
    """Parameters of which not every bit is the same."""

    @property
    def equal(self) -> bool:
        """Losses and parameters are the same, bit for bit."""
        same_losses = self.swapped_losses == self.resident_losses
        return same_losses and self.swapped_hash == self.resident_hash and not self.differing


def prove(steps: int, device: str = "auto", device_memory: str | int | None = None) -> Proof:
    """Train both ways.

    Args:
        steps: Optimizer steps of each.
        device: As for `swap`.
        device_memory: Budget; `None` is a quarter of the training state, and on a GPU what
            libraries take.

    Raises:
        ConfigError: a device or size that cannot be used.
        PlanError: the budget is too small for one layer.
    """
    swapped = _model()
    resident = copy.deepcopy(swapped)
    parameters = sum(p.numel() for p in swapped.parameters())
    state_bytes = _STATE_BYTES * parameters
    budget = state_bytes // 4 + library_bytes(device)
    if device_memory is not None:
        budget = parse_bytes(device_memory, "budget")
    data = _data(steps)
    engine = swap(
        swapped, data[0][0], optimizer=_optimizer, device=device, device_memory=budget,
        options=Options(
            micro_batches=MICRO_BATCHES, clip_norm=None, deterministic=True
        ),
    )  # fmt: skip
    with engine:  # ordinary training, too, is to find the kernels that it chooses
        swapped_losses = [engine.step(step) for step in each("training swapped", data, "steps")]
        engine.synchronize()
        last = engine.last
        assert last is not None, "there was a step"
        found, compute = engine.device_name, engine.device.torch_device
        segments = len(engine.plan.backward_bounds) - 1
        resident_losses = _resident(resident, data, compute)
    ours, theirs = (
        {name: p.detach().cpu() for name, p in model.named_parameters()}
        for model in (swapped, resident)
    )
    return Proof(
        parameters=parameters,
        state_bytes=state_bytes,
        device=found,
        device_budget_bytes=budget,
        device_peak_bytes=last.device_peak_bytes,
        segments=segments,
        swapped_losses=tuple(swapped_losses),
        resident_losses=tuple(resident_losses),
        swapped_hash=_hash(ours),
        resident_hash=_hash(theirs),
        differing=tuple(name for name in theirs if not torch.equal(ours[name], theirs[name])),
    )


def _model() -> GPT:
    """Return the model, with a head of its own.

    Of a weight that head and embedding share the engine adds the head's gradients first, and an
    ordinary loop by turns: sums in another order are rounded differently.
    """
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _data(steps: int) -> list[list[MicroBatch]]:
    generator = torch.Generator().manual_seed(0)
    shape = (steps, MICRO_BATCHES, 1, CONFIG.context + 1)
    tokens = torch.randint(CONFIG.vocabulary, shape, generator=generator)
    return [[{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in step] for step in tokens]


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_RATE, fused=True)


def _resident(
    model: nn.Module, data: Sequence[Sequence[MicroBatch]], device: torch.device
) -> list[float]:
    """Train as PyTorch's users do; return the loss of each step.

    On a GPU the optimizer has the parameters on the host, as the engine's has: the two round
    differently.
    """
    held = [*model.parameters()]
    on_device = copy.deepcopy(model).to(device) if device.type != "cpu" else model
    optimizer = _optimizer(held)
    history = []
    for micro_batches in each("training whole", data, "steps"):
        losses = []
        for one in micro_batches:
            loss = on_device(**{name: value.to(device) for name, value in one.items()}).loss
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        if on_device is not model:
            for parameter, there in zip(held, on_device.parameters(), strict=True):
                assert there.grad is not None, "every parameter is used"
                parameter.grad = there.grad.cpu()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_device is not model:
            on_device.zero_grad(set_to_none=True)
            on_device.load_state_dict(model.state_dict())
        history.append(sum(losses) / len(losses))
    return history


def _hash(parameters: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, values in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

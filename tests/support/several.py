"""Resident training that adds gradients as several devices do: the truth for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.engine.execution.randomness import micro_batch_seeds
from tests.support.reference import LossOf, counted, draws_random_numbers, gpt_loss


def train_in_shares(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimizer: torch.optim.Optimizer,
    devices: int,
    loss_of: LossOf = gpt_loss,
    clip_norm: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Train with the micro-batches divided; return the loss of each step.

    Each share's gradients are added up as in an ordinary loop; then the shares' sums are added, in
    the order of the devices. What the first share makes of buffers stays.
    """
    history = []
    for step in steps:
        of = counted(step, weights)
        micro_batches, count = of.micro_batches, len(of.micro_batches)
        seeds = micro_batch_seeds(count) if count > 1 and draws_random_numbers(model) else []
        after = torch.get_rng_state()
        totals: dict[nn.Parameter, Tensor] = {}
        losses = []
        begun = kept = _buffers_of(model)
        for number, share in enumerate(in_shares(count, devices)):
            _put_buffers(model, begun)
            optimizer.zero_grad(set_to_none=True)
            for index in share:
                if seeds:
                    torch.manual_seed(seeds[index])
                loss = loss_of(model, micro_batches[index])
                of.part(loss, index).backward()
                losses.append(float(loss.detach()))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    known = totals.get(parameter)
                    totals[parameter] = parameter.grad if known is None else known + parameter.grad
            if not number:
                kept = _buffers_of(model)
        _put_buffers(model, kept)
        if seeds:
            torch.set_rng_state(after)
        for parameter in model.parameters():
            parameter.grad = totals.get(parameter)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        history.append(of.mean(losses))
    return history


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _put_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def in_shares(count: int, devices: int) -> list[range]:
    """Return which micro-batches each device has: the first ones have one more if need be."""
    starts = [0]
    for number in range(devices):
        starts.append(starts[-1] + count // devices + (number < count % devices))
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]

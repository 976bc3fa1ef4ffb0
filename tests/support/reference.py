"""Resident training, written as the ordinary loop that it is: the truth for swapped training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.engine.execution.randomness import micro_batch_seeds

LossOf = Callable[[nn.Module, Any], Tensor]


def gpt_loss(model: nn.Module, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    return model(**micro_batch).loss


class Counted(NamedTuple):
    """The micro-batches of a step that count, and how much each of them does."""

    micro_batches: Sequence[Any]
    weights: Sequence[float] | None

    def part(self, loss: Tensor, index: int) -> Tensor:
        """Return a micro-batch's part of the step's loss."""
        if self.weights is None:
            return loss / len(self.micro_batches)
        return loss * self.weights[index]

    def mean(self, losses: Sequence[float]) -> float:
        """Return the step's loss."""
        if self.weights is None:
            return sum(losses) / len(losses)
        return sum(loss * weight for loss, weight in zip(losses, self.weights, strict=True))


def counted(micro_batches: Sequence[Any], weights: Sequence[float] | None) -> Counted:
    """Return what counts with weights of any unit; `None`: all alike."""
    if weights is None:
        return Counted(micro_batches, None)
    pairs = [(each, w) for each, w in zip(micro_batches, weights, strict=True) if w]
    total = sum(weights)
    return Counted([each for each, _ in pairs], [weight / total for _, weight in pairs])


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimizer: torch.optim.Optimizer,
    loss_of: LossOf = gpt_loss,
    clip_norm: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Train with gradient accumulation; return the loss of each step."""
    history = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        of = counted(step, weights)
        micro_batches, count = of.micro_batches, len(of.micro_batches)
        seeded = count > 1 and draws_random_numbers(model)
        if seeded:
            seeds = micro_batch_seeds(count)
            after = torch.get_rng_state()
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            if seeded:
                torch.manual_seed(seeds[index])
            loss = loss_of(model, micro_batch)
            of.part(loss, index).backward()
            losses.append(float(loss.detach()))
        if seeded:
            torch.set_rng_state(after)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        history.append(of.mean(losses))
    return history


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether training draws random numbers."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0) or hasattr(module, "neftune_noise_alpha")
        for module in model.modules()
    )


class HeadFirst(nn.Module):
    """A GPT whose tied weight adds all of the head's gradients, then all of the embedding's.

    That is the order of the vertical schedule. The embedding works on a second parameter that
    shares the data; its gradients are kept one by one and added when all of the head's are in.
    """

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt
        self.weight = gpt.head.weight
        self.alias = nn.Parameter(self.weight.data)
        gpt.embedding.token.weight = self.alias
        self.kept: list[Tensor] = []

    def step(self, micro_batches: Sequence[Any], optimizer: torch.optim.Optimizer) -> float:
        """Run one step in that order."""
        optimizer.zero_grad(set_to_none=True)
        count = len(micro_batches)
        seeded = draws_random_numbers(self.gpt)
        seeds = micro_batch_seeds(count) if seeded else []
        after = torch.get_rng_state()
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            if seeded:
                torch.manual_seed(seeds[index])
            loss = self.gpt(**micro_batch).loss
            (loss / count).backward()
            self.kept.append(self.alias.grad)
            self.alias.grad = None
            losses.append(float(loss.detach()))
        torch.set_rng_state(after)
        for gradient in self.kept:
            self.weight.grad += gradient
        self.kept.clear()
        optimizer.step()
        return sum(losses) / count


def assert_equal_training(
    engine: Any, reference: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Check every parameter, buffer and optimizer moment bit for bit."""
    swapped = engine.state_dict()
    for name, tensor in reference.state_dict().items():
        assert_same_bits(swapped[name], tensor, name)
    states = engine.optimizer_state()
    for name, parameter in reference.named_parameters():
        expected = optimizer.state.get(parameter, {})
        assert set(states[name]) == set(expected), name
        for key, value in expected.items():
            assert_same_bits(torch.as_tensor(states[name][key]), torch.as_tensor(value), name)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """Compare bytes, so that 0.0 and -0.0 differ and NaN equals itself."""
    assert actual.shape == expected.shape, name
    assert actual.dtype == expected.dtype, name
    left = actual.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    right = expected.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(left, right), f"{name} differs"


def twin(model: nn.Module) -> nn.Module:
    """Return an independent copy of a model, shared weights still shared."""
    return copy.deepcopy(model)

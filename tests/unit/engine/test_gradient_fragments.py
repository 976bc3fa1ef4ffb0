"""What a peer gives to a round of gradients: their mean since the last one, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.training.setup.gradients import GradientCollector, GradientFragments
from tests.support.engine_models import mlp, square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH = 8


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(3)
    return mlp(3, WIDTH)


@pytest.fixture
def engine(model: nn.Sequential) -> Iterator[atomtrain.Engine]:
    with swap(model, torch.randn(4, WIDTH), optimizer=GradientCollector, loss=square) as engine:
        yield engine


def gradients_of(model: nn.Sequential, batch: Tensor) -> list[Tensor]:
    """Return the gradients of a batch's loss, by the model's own parameters."""
    layers = list(model.parameters())
    return list(torch.autograd.grad(square(model(batch)), layers))


def lent(fragments: GradientFragments, model: nn.Sequential) -> list[Tensor]:
    """Return what a round gets, by the model's own parameters."""
    engine, [(start, stop)] = fragments._engine, fragments._ranges
    places = {id(p): first for p, first in engine.fragment_places(start, stop)}
    with fragments.gradient(0) as flat:
        return [
            flat[places[id(p)] : places[id(p)] + p.numel()].view(p.shape).clone()
            for p in model.parameters()
        ]


def test_a_round_gets_the_mean_of_the_steps_since_the_last_one(
    model: nn.Sequential, engine: atomtrain.Engine
) -> None:
    fragments = GradientFragments(engine)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert sum(fragments.elements) >= sum(parameter.numel() for parameter in before)
    assert not any(part.any() for part in lent(fragments, model)), "nothing was learnt yet"
    for count in (3, 2):
        batches = [torch.randn(4, WIDTH) for _ in range(count)]
        for batch in batches:
            engine.step([batch])
            fragments.note_step()
        each = [gradients_of(model, batch) for batch in batches]
        for mean, *parts in zip(lent(fragments, model), *each, strict=True):
            torch.testing.assert_close(mean, sum(parts) / count)
        fragments.forget(0)
        assert not any(part.any() for part in lent(fragments, model))
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old), "only a round changes parameters"


def test_weights_decay_and_biases_do_not(model: nn.Sequential, engine: atomtrain.Engine) -> None:
    fragments = GradientFragments(engine)
    decayed = torch.zeros(fragments.elements[0], dtype=torch.bool)
    for start, stop in fragments.decayed(model):
        decayed[start:stop] = True
    places = dict(engine.fragment_places(*fragments._ranges[0]))
    for parameter, first in places.items():
        here = decayed[first : first + parameter.numel()]
        assert here.all() if parameter.ndim == 2 else not here.any()
    assert int(decayed.sum()) == 3 * WIDTH * WIDTH


def test_sums_on_the_device_begin_anew_too(model: nn.Sequential) -> None:
    batches = [torch.randn(4, WIDTH) for _ in range(3)]
    with swap(
        model, batches[0], optimizer=GradientCollector, loss=square, optimizer_on_device=True
    ) as engine:
        fragments = GradientFragments(engine)
        for batch in batches:
            engine.step([batch])
            fragments.note_step()
            expected = gradients_of(model, batch)
            for got, own in zip(lent(fragments, model), expected, strict=True):
                assert torch.equal(got, own)
            fragments.forget(0)

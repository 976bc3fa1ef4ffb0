"""Each micro-batch has a stream of its own, and recomputing draws the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atomtrain.engine.execution.randomness import Randomness, micro_batch_seeds


def draw() -> Tensor:
    return torch.rand(3)


@pytest.mark.parametrize("count", [1, 3])
def test_replay_draws_what_forward_drew_whatever_came_between(count: int) -> None:
    torch.manual_seed(5)
    randomness = Randomness(torch.default_generator, used=True, starts=range(3))
    randomness.begin(count)
    drawn: dict[tuple[int, int], Tensor] = {}
    for segment in range(3):
        for micro_batch in range(count):
            randomness.reach(micro_batch, segment, first=True)
            drawn[micro_batch, segment] = draw()
            randomness.leave(micro_batch)
            draw()  # somebody else draws
    for segment in reversed(range(3)):
        for micro_batch in range(count):
            randomness.replay(micro_batch, segment)
            assert torch.equal(draw(), drawn[micro_batch, segment])
    randomness.finish()
    after = draw()
    torch.manual_seed(5)
    if count == 1:
        expected = [draw() for _ in range(3)]
    else:
        seeds = micro_batch_seeds(count)
        state = torch.get_rng_state()
        torch.manual_seed(seeds[1])
        expected = [draw() for _ in range(3)]
        torch.set_rng_state(state)
    of = min(1, count - 1)
    assert all(torch.equal(drawn[of, s], expected[s]) for s in range(3))
    assert torch.equal(after, draw()), "the generator is left where a loop would leave it"


def test_without_random_layers_the_generator_is_not_touched() -> None:
    randomness = Randomness(torch.default_generator, used=False, starts=range(3))
    before = torch.get_rng_state()
    randomness.begin(4)
    randomness.reach(3, 0, first=True)
    randomness.leave(3)
    randomness.replay(3, 0)
    randomness.finish()
    assert torch.equal(torch.get_rng_state(), before)

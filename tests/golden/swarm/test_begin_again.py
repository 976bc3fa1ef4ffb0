"""A model whose optimizer begins anew takes the steps that one with a new optimizer takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.optimizers import SGD, AdamW, Muon, muon_groups
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.training.setup.peering import EngineFragments
from tests.support.swapped import adamw, gpt, sgd, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")


def factory(optimizer: Any, model: nn.Module) -> Any:
    """Return what makes an optimizer; Muon has to know the model."""
    return (lambda _: Muon(muon_groups(model), lr=1e-3)) if optimizer is Muon else optimizer


def spoil_moments(engine: atomtrain.Engine) -> None:
    """Have the next step make no number of any parameter."""
    state = engine.optimizer_state()
    for moments in state.values():
        for value in moments.values():
            if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                value.fill_(torch.nan)
    engine.load_optimizer_state(state)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (adamw, {}),
        (sgd, {}),
        (AdamW, {}),
        (AdamW, {"precision": "bf16"}),
        (AdamW, {"optimizer_on_device": True}),
        (partial(AdamW, state="int8"), {}),
        (partial(SGD, lr=0.1, momentum=0.9), {}),
        (Muon, {}),
        (AdamW, {"on_disk": "moments"}),
    ],
)
def test_after_a_step_that_made_no_number(
    optimizer: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    if "on_disk" in options:
        options = {**options, "disk": tmp_path, "profile": False}
    torch.manual_seed(5)
    model, fresh = gpt(), gpt()
    first, second, *others = token_batches(1, steps=5)
    with swap(model, first[0], factory(optimizer, model), **options) as engine:
        engine.step(first)
        engine.step(second)
        access = EngineFragments(engine, most=2)
        store = AnchorStore(access.elements, 0)
        store.adopt_local(access)
        held = {name: value.clone() for name, value in engine.state_dict().items()}
        spoil_moments(engine)
        engine.step(second)
        assert not store.is_sound(access), "nothing was spoilt"
        store.begin_again(access)
        losses = [engine.step(batches) for batches in others]
        ended = {name: value.clone() for name, value in engine.state_dict().items()}
    fresh.load_state_dict(held)
    with swap(fresh, first[0], factory(optimizer, fresh), **options) as engine:
        assert [engine.step(batches) for batches in others] == losses
        for name, value in engine.state_dict().items():
            assert torch.equal(value, ended[name]), name

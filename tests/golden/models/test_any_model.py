"""Models that know nothing of ATOM: swapped training equals resident training bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import atomtrain
from atomtrain.errors import AnalysisError
from tests.support import any_models
from tests.support.any_models import Case
from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin

pytestmark = pytest.mark.usefixtures("assumed_times")
STEPS = 2


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def loss_in(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output["loss"] if isinstance(output, dict) else output.loss


def check(
    case: Case,
    micro_batches: int,
    segments: int,
    loss_of: Callable[..., Tensor] = loss_in,
    loss: Any = None,
) -> atomtrain.Engine:
    """Train a model and its twin from the same random state, then evaluate both."""
    model, draw = case
    reference = twin(model)
    resident = adamw(reference.parameters())
    steps = [[draw() for _ in range(micro_batches)] for _ in range(STEPS)]
    state = torch.get_rng_state()
    engine = swap(
        model, steps[0][0], optimizer=adamw, loss=loss, segments=segments,
        micro_batches=micro_batches,
    )  # fmt: skip
    with engine:
        assert torch.equal(torch.get_rng_state(), state), "analysis draws no random numbers"
        expected = train(reference, steps, resident, loss_of)
        left_at = torch.get_rng_state()
        torch.set_rng_state(state)
        assert [engine.step(step) for step in steps] == expected
        assert torch.equal(torch.get_rng_state(), left_at)
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        reference.eval()
        with torch.no_grad():
            expected_loss = sum(float(loss_of(reference, b)) for b in steps[0]) / micro_batches
        assert engine.evaluate(steps[0]) == expected_loss
        assert model.training
        assert_equal_training(engine, reference, resident)
    return engine


@pytest.mark.parametrize("make", any_models.HUGGING_FACE, ids=lambda make: make.__name__)
def test_hugging_face_models(make: Callable[[], Case]) -> None:
    check(make(), micro_batches=1, segments=4)


@pytest.mark.usefixtures("fastest_plans")
@pytest.mark.parametrize(
    "make",
    [
        any_models.llama, any_models.llama_with_padding, any_models.phi, any_models.gpt_neox,
        any_models.mixtral, any_models.vit, any_models.resnet,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_hugging_face_models_with_several_micro_batches(make: Callable[[], Case]) -> None:
    check(make(), micro_batches=3, segments=3)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("segments", [1, 3, 5])
def test_two_heads_and_a_loss_of_the_callers(micro_batches: int, segments: int) -> None:
    case = any_models.actor_critic()
    unused = case.model.unused.detach().clone()  # type: ignore[union-attr]
    engine = check(
        case,
        micro_batches,
        segments,
        lambda model, batch: any_models.policy_loss(model(batch["state"]), batch),
        any_models.policy_loss,
    )
    assert torch.equal(case.model.unused, unused)  # type: ignore[arg-type]
    assert not engine.model.unused.requires_grad or not engine.masters.moments(
        case.model.unused  # type: ignore[arg-type]
    )


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(("micro_batches", "segments"), [(1, 3), (2, 1)])
def test_a_loss_has_weights_of_classes(micro_batches: int, segments: int) -> None:
    counted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1]))

    def draw() -> tuple[Tensor, Tensor]:
        return torch.randn(8, 16), torch.randint(5, (8,))

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return counted(model(batch[0]), batch[1])  # type: ignore[no-any-return]

    check(
        (Classes(), draw), micro_batches, segments, loss_of,
        loss=lambda output, batch: counted(output, batch[1]),
    )  # fmt: skip


def test_what_is_trained_belongs_to_the_model() -> None:
    factor = nn.Parameter(torch.ones(5))
    with pytest.raises(AnalysisError, match="is trained and is not given to it"):
        swap(Classes(), torch.randn(8, 16), loss=lambda output: (output * factor).mean())
    assert factor.grad is None


class Recomputed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_layers_by_hand_recompute_nothing_themselves() -> None:
    """Their weights are there while they are called, not in backward."""
    model = nn.Sequential(Recomputed(8, 8), nn.Linear(8, 8))
    with pytest.raises(AnalysisError, match=r"take out torch\.utils\.checkpoint"):
        atomtrain.swap(
            model, torch.randn(2, 8), optimizer=adamw, device_memory="1MiB", device="emulated",
            loss=lambda y: y.mean(), layers=["0", "1"],
        )  # fmt: skip


@pytest.mark.usefixtures("fastest_plans")
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("segments", [1, 3, 6])
def test_skips_over_several_cuts(micro_batches: int, segments: int) -> None:
    check(any_models.u_net(), micro_batches, segments)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda _, given: (given[0] / 2,))
    model.register_forward_hook(lambda _, __, output: output.exp())
    return model


class SavesElsewhere(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda: SavesElsewhere(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        hooked,
    ],
)
def test_a_sequential_may_do_more_than_its_modules(make: Callable[[], nn.Module]) -> None:
    def square(output: Tensor) -> Tensor:
        return output.pow(2).mean()

    case = Case(make(), lambda: (torch.randn(2, 8),))
    check(case, 2, 1, lambda model, batch: square(model(*batch)), square)

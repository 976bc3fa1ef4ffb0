"""An embedding on the host: swapped training equals resident training bit for bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import PlanError
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.reference import HeadFirst, twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import TIED, adamw, check, deep_gpt, random_delays, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.mark.parametrize("segments", [1, 2, LAYERS - 1])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_untied_gpt(segments: int, micro_batches: int, clip_norm: float | None) -> None:
    steps = token_batches(micro_batches, steps=3)
    options: dict[str, Any] = {"segments": segments, "clip_norm": clip_norm}
    engine = check(
        deep_gpt(0.0, tied=False), steps, host_layers=1, inject=random_delays(segments), **options
    )
    assert engine.plan.host_layers == 1
    assert engine.plan.backward_bounds[0] == 1


@pytest.mark.parametrize("segments", [1, 2, LAYERS - 1])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_tied_gpt(segments: int, clip_norm: float | None) -> None:
    check(
        deep_gpt(0.0, tied=True), token_batches(1, steps=3), host_layers=1, segments=segments,
        clip_norm=clip_norm, inject=random_delays(segments),
    )  # fmt: skip


@pytest.mark.parametrize("boundary", ["device", "host"])
@pytest.mark.parametrize("resident", [(), (TIED,)])
def test_tied_gpt_adds_the_heads_gradients_first(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[int, ...], boundary: Any
) -> None:
    use_shape(monkeypatch, Shape((1, 2, 3), (1, 3, LAYERS), 2, 1, boundary, resident, 1))
    model, steps = deep_gpt(0.0, tied=True), token_batches(7, steps=3)
    head_first = HeadFirst(twin(model))
    sgd = torch.optim.SGD(
        [p for p in head_first.parameters() if p is not head_first.alias], lr=0.1, momentum=0.9
    )
    expected = [head_first.step(micro_batches, sgd) for micro_batches in steps]
    with swap(
        model, steps[0][0], lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), micro_batches=7
    ) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        weights = head_first.gpt.state_dict()
        for name, value in engine.state_dict().items():
            assert torch.equal(value, weights[name]), name


class Skipping(nn.Module):
    """The embedding is read by every block, and drops nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.embed(ids)
        hidden = first
        for block in self.blocks:
            hidden = self.dropout(torch.tanh(block(hidden)) * first)
        return self.head(self.norm(hidden))


def squares(output: Tensor) -> Tensor:
    return output.pow(2).mean()


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_embedding_that_all_segments_read(segments: int, micro_batches: int) -> None:
    steps = [[torch.randint(301, (6,)) for _ in range(micro_batches)] for _ in range(3)]
    check(
        Skipping(), steps, loss_of=lambda model, ids: squares(model(ids)), loss=squares,
        host_layers=1, segments=segments, inject=random_delays(segments),
    )  # fmt: skip


def test_a_frozen_embedding() -> None:
    model = deep_gpt(0.0, tied=False)
    model.embedding.requires_grad_(False)

    def trainable(parameters: Any) -> Any:
        return adamw([p for p in parameters if p.requires_grad])

    check(model, token_batches(2, steps=3), trainable, host_layers=1)


def test_the_caller_may_reuse_his_tensors_at_once() -> None:
    steps = token_batches(1, steps=3)
    expected = twin(model := deep_gpt(0.0, tied=False))
    with swap(expected, steps[0][0], host_layers=0) as engine:
        losses = [engine.step(step) for step in steps]
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
    batch = {name: value.clone() for name, value in steps[0][0].items()}
    # The host's backward is held back until the next batch is in the same tensors.
    with swap(model, steps[0][0], host_layers=1, inject=random_delays(0)) as engine:
        for step, loss in zip(steps, losses, strict=True):
            for name, value in step[0].items():
                batch[name].copy_(value)
            assert engine.step([batch]) == loss
        for name, value in engine.state_dict().items():
            assert torch.equal(value, weights[name]), name


def test_evaluation_and_more_micro_batches_than_before() -> None:
    steps = token_batches(2, steps=2)
    model = deep_gpt(0.0, tied=False)
    with swap(model, steps[0][0], host_layers=1) as engine:
        with torch.no_grad():
            expected = [float(twin(model).eval()(**batch).loss) for batch in steps[0]]
        assert engine.evaluate(steps[0]) == sum(expected) / 2
        engine.step(steps[0])
        assert engine.plan.host_layers == 1


def test_the_host_waits_for_what_still_reads_its_outputs() -> None:
    """Two passes of one evaluation, on a device whose compute runs behind the caller."""
    batches = token_batches(5, steps=1)[0]
    with swap(deep_gpt(0.0, tied=False), batches[0], host_layers=1, micro_batches=2) as engine:
        order: list[str] = []
        device, host = engine.device, engine._core.executor._host
        synchronize, forward = device.synchronize, host.forward
        device.synchronize = lambda: (order.append("synchronize"), synchronize())[1]
        host.forward = lambda *given: (order.append("forward"), forward(*given))[1]
        engine.evaluate(batches)
    passes = [index for index, what in enumerate(order) if what == "forward"]
    assert len(passes) == 3
    assert all(index > 0 and order[index - 1] == "synchronize" for index in passes)


def test_the_mode_may_change_while_the_host_is_still_at_work() -> None:
    """An exported model, whose layers look at the model's mode."""
    steps = [[torch.randint(301, (6,))] for _ in range(3)]
    model = Skipping()
    expected = twin(model)

    def late(stream: str) -> None:
        if stream == "update":
            time.sleep(0.02)

    weights = []
    for candidate, inject in ((expected, None), (model, late)):
        torch.manual_seed(5)
        options = {"host_layers": 1, "inject": inject}
        with swap(candidate, steps[0][0], loss=squares, **options) as engine:
            for step in steps:
                engine.step(step)
                engine.evaluate(step)
            weights.append({name: value.clone() for name, value in engine.state_dict().items()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_only_look_ups_can_run_on_the_host(dropout: float) -> None:
    wrong = 1 if dropout else 2
    with pytest.raises(PlanError, match=f"host_layers is {wrong}; with this model it can be 0"):
        swap(deep_gpt(dropout, tied=False), token_batches(1)[0][0], host_layers=wrong)

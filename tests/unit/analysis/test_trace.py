"""`swap` and the chains it finds: every way to give a model, an example and a loss; and misuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis import Layer, chain_of, layer_costs
from atomtrain.engine.devices.devices import open_device
from atomtrain.errors import AnalysisError, ConfigError, PlanError
from tests.support.engine_models import adamw, gpt, mlp, regression, square, swap, tokens

pytestmark = pytest.mark.usefixtures("assumed_times")
X, Y = torch.ones(2, 8), torch.zeros(2, 8)


def test_example_as_mapping_tuple_and_tensor_give_the_same_loss() -> None:
    def by_name(output: Tensor, batch: Any) -> Tensor:
        return (output - batch["target"]).pow(2).mean()

    losses = []
    for example, loss in (
        ((X, Y), regression),
        ({"input": X, "target": Y}, by_name),
        ({"target": Y, "input": X}, by_name),
        (X, square),
        ((X, Y), square),
    ):
        torch.manual_seed(0)
        with swap(mlp(), example, loss=loss, segments=2) as engine:
            losses.append(engine.step([example]))
    assert losses == [losses[0]] * 5


def test_a_gpt_takes_a_mapping_or_a_tuple() -> None:
    example = tokens()
    losses = []
    for given in (example, tuple(example.values())):
        torch.manual_seed(0)
        with swap(gpt(), given) as engine:
            losses.append(engine.step([given]))
    assert losses[0] == losses[1]


def test_a_module_used_several_times_runs_every_time() -> None:
    act, shared = nn.Tanh(), nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), act, shared, act, shared, act)
    with torch.no_grad():
        expected = float(square(model(X)))
    assert len(chain_of(model, X, square).chain.layers) == 6
    for segments in (1, 3, 6):
        with swap(model, X, loss=square, segments=segments) as engine:
            assert engine.evaluate([X]) == expected


def test_layers_that_differ_in_an_attribute_are_of_different_kinds() -> None:
    class Repeat(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(self.times, 1).sum(0, keepdim=True).expand(2, -1) + x

    model = nn.Sequential(nn.Linear(8, 8), Repeat(2), Repeat(50), Repeat(50), nn.Linear(8, 8))
    traced = chain_of(model, X, square)
    costs = layer_costs(traced.chain, traced.bind(X)).layers
    assert costs[2].forward_bytes > costs[1].forward_bytes
    assert costs[2].kind == costs[3].kind != costs[1].kind


class Empty(nn.Module):
    def chain_layers(self) -> list[Layer]:
        return []

    def forward(self, x: Tensor) -> Tensor:
        return x


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.stray = nn.Linear(8, 8), nn.Linear(2, 2)

    def chain_layers(self) -> list[Layer]:
        return [Layer("used", self.used, ("x",), ("loss",))]

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


@pytest.mark.parametrize(
    ("model", "example", "loss", "kind", "message"),
    [
        (mlp, X, None, ConfigError, r"no loss of its own; pass loss=callable"),
        (Stray, X, square, ConfigError, r"Stray computes its own loss; leave out loss"),
        (nn.Sequential, X, square, AnalysisError, r"nn\.Sequential is empty"),
        (Empty, X, None, AnalysisError, r"chain_layers\(\) of Empty must return at least one"),
        (Stray, X, None, AnalysisError, r"'stray\.weight' belongs to no layer"),
        (mlp, (), square, ConfigError, r"example is empty"),
        (mlp, {}, square, ConfigError, r"example is empty"),
        (gpt, {"input_ids": X}, None, ConfigError, r"micro-batch lacks labels; it has input_ids"),
        (on_meta, X, square, AnalysisError, r"'0\.weight' is on the meta device .* no data"),
        (mlp, torch.ones(2, 7), square, AnalysisError, r"layer '0' cannot run on input0 \[2, 7\]"),
        (mlp, X, lambda output: output, AnalysisError, r"loss is of shape \[2, 8\]; it must be a"),
        (mlp, X, lambda output: None, AnalysisError, r"loss is not a tensor; it must be a scalar"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
            X, square, AnalysisError, r"layer '1' cannot run .* use inplace=False",
        ),
        (
            lambda: mlp().requires_grad_(False),
            X, square, ConfigError, r"requires_grad=True; nothing can be trained",
        ),
    ],
)  # fmt: skip
def test_models_examples_and_losses_that_cannot_be_used(
    model: Any, example: Any, loss: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        swap(model(), example, loss=loss)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"micro_batches": 0}, PlanError, "micro_batches must be at least 1, not 0"),
        ({"segments": 4}, PlanError, "no partition has 4 segments; .* layers allow 1 to 3"),
        ({"slots": 0}, PlanError, "slots must be at least 1"),
        ({"clip_norm": 0.0}, ConfigError, "clip_norm must be positive"),
        ({"clip_norm": float("nan")}, ConfigError, "clip_norm must be positive"),
        ({"optimizer": lambda _: None}, ConfigError, "must return a torch.optim.Optimizer"),
        ({"memory": "many"}, ConfigError, "device memory 'many' is not a size"),
        ({"memory": 0}, ConfigError, "device memory 0 must be at least one byte"),
    ],
)
def test_options_that_cannot_be_used(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        swap(mlp(), X, loss=square, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("emulatd", "no device 'emulatd'. Did you mean 'emulated'"),
        ("cuda:x", "write cuda or cuda:NUMBER"),
        ("cuda:99", "there is no CUDA device 99"),
        ("emulated:fast", "link 'fast' is not a rate"),
        ("", "there is no device ''"),
    ],
)
def test_devices_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_device(name)


def test_steps_that_cannot_be_run_change_nothing() -> None:
    model = mlp()
    with swap(model, (X, Y), loss=regression, segments=3) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        for wrong in ([], (X, Y), X, {"input0": X}, [(X,)], [{"input0": X}]):
            with pytest.raises(ConfigError):
                engine.step(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="lacks input1; it has input0"):
            engine.evaluate([(X,)])
        assert all(torch.equal(before[n], v) for n, v in engine.state_dict().items())
        assert engine.step([(X, Y)]) > 0


def test_a_closed_engine_refuses_and_leaves_a_model_that_works() -> None:
    model = mlp()
    with swap(model, X, loss=square, segments=3) as engine:
        assert isinstance(engine, atomtrain.Engine)
        first = engine.step([X])
    engine.close()
    assert float(square(model(X)).detach()) < first
    with pytest.raises(ConfigError, match=r"engine is closed; call atomtrain\.swap again"):
        engine.step([X])
    with swap(model, X, loss=square) as again:
        assert again.step([X]) < first


def test_unknown_optimizer_state_is_refused() -> None:
    with (
        swap(mlp(), X, loss=square) as engine,
        pytest.raises(ConfigError, match=r"'9\.weight', which the model does not have"),
    ):
        engine.load_optimizer_state({"9.weight": {}})


def test_the_optimizer_gets_each_trainable_parameter_once() -> None:
    got: list[nn.Parameter] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        got.extend(parameters)
        return adamw(parameters)

    model = gpt()
    model.blocks[0].qkv.weight.requires_grad_(False)
    with swap(model, tokens(), optimizer=factory):
        expected = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in got} == expected
    assert len(got) == len(expected)


def _losses(loss: Any, example: Any) -> list[float]:
    torch.manual_seed(0)
    with swap(gpt(), example, loss=loss, segments=3) as engine:
        return [engine.step([example]) for _ in range(3)]


@pytest.mark.slow
def test_a_gpt_takes_another_loss_on_what_it_returns() -> None:
    def from_logits(output: Any, batch: Any) -> Tensor:
        logits, labels = output.logits, batch["labels"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    batch = tokens()
    own = _losses(None, batch)
    assert _losses(lambda output: output.loss, batch) == own
    assert _losses(from_logits, batch) == own
    # The model's forward takes no labels here, so they are for the loss alone.
    unlabelled = {"input_ids": batch["input_ids"]}
    first = _losses(lambda output: output.logits.logsumexp(-1).mean(), unlabelled)
    assert first[-1] < first[0]


class WithLoss(nn.Module):
    """Returns an object with a `.loss`, as models of Hugging Face do."""

    def forward(self, value: Tensor) -> Any:
        return SimpleNamespace(loss=value.pow(2).mean())


def test_the_outputs_own_loss_needs_no_callable() -> None:
    torch.manual_seed(0)
    with swap(nn.Sequential(*mlp(), WithLoss()), X, segments=2) as engine:
        own = engine.step([X])
    torch.manual_seed(0)
    with swap(mlp(), X, loss=square, segments=2) as engine:
        assert engine.step([X]) == own

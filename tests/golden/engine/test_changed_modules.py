"""What a caller changes of the model's modules between steps is used as in an ordinary loop, or
refused; it is never passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.errors import ConfigError
from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import adamw

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH = 8
X = {"x": torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)}


class Annealed(nn.Module):
    """Its loss has a factor that callers change from step to step, as schedules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.beta, self.parts, self.epoch = 1.0, [1.0, 0.5], 0
        self.config, self.other = Config(), Config()
        self.weights, self.act = torch.tensor([1.0, 1.0]), torch.tanh
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = self.dropout(self.act(layer(x)))
        loss = x.pow(2).mean() * self.beta * self.parts[1] * self.config.factor
        loss = loss * self.weights[0] * self.other.factor
        return {"loss": loss * self.scale}


class Config:
    factor = 1.0

    def __init__(self) -> None:
        self.factor = 2.0


def change_number(model: Annealed) -> None:
    model.beta = 0.5


def change_item(model: Annealed) -> None:
    model.parts[1] = 1.0


def change_config(model: Annealed) -> None:
    model.config.factor = 1.0


def change_dropout(model: Annealed) -> None:
    model.dropout.p = 0.3


def change_mode(model: Annealed) -> None:
    model.dropout.eval()


def add_hook(model: Annealed) -> None:
    model.layers[0].register_forward_hook(lambda *_: None)


def write_tensor(model: Annealed) -> None:
    model.weights[0] = 2.0


def put_tensor(model: Annealed) -> None:
    model.weights = torch.tensor([2.0, 1.0])


def change_object(model: Annealed) -> None:
    model.other.factor = 1.0


def change_function(model: Annealed) -> None:
    model.act = torch.relu


def put_forward(model: Annealed) -> None:
    model.layers[0].forward = torch.relu


CHANGES = [
    (write_tensor, r"weights was tensor\(\[1\., 1\.\]\) and is tensor\(\[2\., 1\.\]\)"),
    (put_tensor, r"weights was tensor\(\[1\., 1\.\]\) and is tensor\(\[2\., 1\.\]\)"),
    (change_object, "other.factor was 2.0 and is 1.0"),
    (change_number, "beta was 1.0 and is 0.5"),
    (change_item, r"parts was \[1.0, 0.5\] and is \[1.0, 1.0\]"),
    (change_config, "config.factor was 2.0 and is 1.0"),
    (change_function, "act was <built-in method tanh.* and is <built-in method relu"),
    (put_forward, r"layers\.0\.forward was not there and is"),
    (change_dropout, "dropout.p was 0.1 and is 0.3"),
    (change_mode, "dropout.training was True and is False"),
    (add_hook, "layers.0._forward_hooks has other hooks"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_a_traced_model_reads_must_stay(
    change: Callable[[Annealed], None], message: str
) -> None:
    model = Annealed()
    with swap(model, X, segments=2) as engine:
        engine.step([X])
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        state = torch.get_rng_state()
        change(model)
        with pytest.raises(ConfigError, match=message):
            engine.step([X])
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name]), "nothing was done"


@pytest.mark.parametrize(("change", "message"), CHANGES[:6])
def test_in_evaluation_too(change: Callable[[Annealed], None], message: str) -> None:
    model = Annealed()
    with swap(model, X, segments=2) as engine:
        engine.evaluate([X])
        change(model)
        with pytest.raises(ConfigError, match=message):
            engine.evaluate([X])


def test_what_is_put_back_and_what_forward_does_not_read_goes_on() -> None:
    model = Annealed()
    reference = twin(model)
    resident = adamw(reference.parameters())
    with swap(model, X, optimizer=adamw, segments=2) as engine:
        for epoch in range(3):
            state = torch.get_rng_state()
            expected = train(reference, [[X]], resident, lambda m, batch: m(**batch)["loss"])
            torch.set_rng_state(state)
            assert [engine.step([X])] == expected
            model.epoch, model.beta = epoch + 1, 0.5
            model.beta = 1.0
            model.best_loss = expected[0]
            model.seen = torch.tensor(expected)
            engine.evaluate([X])
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_a_buffer_is_the_way(tell: bool, device: str) -> None:
    """As the message says; what is written is seen without being told, too."""
    model = Annealed()
    model.dropout.p = 0.0
    reference = twin(model)
    resident = adamw(reference.parameters())
    with atomtrain.swap(model, X, optimizer=adamw, device=device, device_memory="1MiB") as engine:
        for scale in (0.5, 0.25):
            expected = train(reference, [[X]], resident, lambda m, batch: m(**batch)["loss"])
            assert [engine.step([X])] == expected
            engine.synchronize()
            for one in (model, reference):
                one.scale.fill_(scale)
            if tell:
                engine.refresh_buffers()
            assert float(engine.state_dict()["scale"]) == scale
        assert_equal_training(engine, reference, resident)


# Modules that run by their own code ---------------------------------------------------------


def raise_dropout(model: nn.Sequential) -> None:
    model[1].p = model[3].p = 0.4


def thaw_statistics(model: nn.Sequential) -> None:
    model.train()


def with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0),
        nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip


def with_statistics() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip
    for index in (1, 3):
        model[index].eval()
    return model


@pytest.mark.parametrize(
    ("make", "change"), [(with_dropout, raise_dropout), (with_statistics, thaw_statistics)]
)
@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_layers_may_begin_to_draw_and_to_change_buffers(
    make: Callable[[], nn.Sequential], change: Callable[[nn.Sequential], None], activations: Any
) -> None:
    """Recomputing has to repeat what forward drew, and to leave alone what it changed."""

    def loss(output: Tensor) -> Tensor:
        return output.pow(2).mean()

    model, batch = make(), X["x"]
    reference = twin(model)
    resident = adamw(reference.parameters())
    with swap(
        model, batch, optimizer=adamw, loss=loss, segments=3, host_layers=0,
        activations=activations,
    ) as engine:  # fmt: skip
        for _ in range(3):
            state = torch.get_rng_state()
            expected = train(reference, [[batch]], resident, lambda m, x: loss(m(x)))
            torch.set_rng_state(state)
            assert [engine.step([batch])] == expected
            change(model)
            change(reference)
        assert_equal_training(engine, reference, resident)

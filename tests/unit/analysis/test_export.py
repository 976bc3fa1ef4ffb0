"""Any module becomes a chain: what is folded, carried, refused, and said about it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.export import constants
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.errors import AnalysisError, ConfigError
from tests.support.engine_models import square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
CPU, OTHER = torch.device("cpu"), torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + bias


class Stack(nn.Module):
    """Blocks that share a table which depends on nothing."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)
        self.register_buffer("scale", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        table = torch.outer(place, self.scale).cos()
        hidden = self.embed(x) * 2
        for block in self.blocks:
            hidden = block(hidden, table[None])
        return self.head(hidden)


X = torch.ones(2, 5, 4)


def test_blocks_become_layers_and_identical_ones_share_a_template() -> None:
    chain = chain_of(Stack(), X, square).chain
    assert [layer.name for layer in chain.layers] == [
        "embed", "blocks.0", "blocks.1", "blocks.2", "head",
    ]  # fmt: skip
    blocks = [layer.module for layer in chain.layers[1:4]]
    assert all(isinstance(block, GraphLayer) for block in blocks)
    assert len({id(block.template) for block in blocks}) == 1
    costs = layer_costs(chain, {"x": X}).layers
    assert costs[1].kind == costs[2].kind == costs[3].kind != costs[0].kind
    assert costs[1].forward_flops == 2 * 10 * 8 * 16 * 2


def test_parameters_are_the_models_own() -> None:
    model = Stack()
    chain = chain_of(model, X, square).chain
    assert {id(p) for p in chain.parameters} == {id(p) for p in model.parameters()}
    names = set(chain.names.values())
    assert names == {name for name, _ in model.named_parameters()}


def test_constants_are_folded_once_and_not_carried() -> None:
    model = Stack()
    chain = chain_of(model, X, square).chain
    assert chain.crossing(2) == chain.layers[1].writes
    tables = {id(b) for layer in chain.layers for b in layer.buffers.values()}
    assert len(tables) == 1
    [table] = chain.layers[1].buffers.values()
    assert torch.equal(table, torch.outer(torch.arange(5.0), torch.arange(8.0)).cos())
    costs = layer_costs(chain, {"x": X}).layers
    assert sum(cost.buffer_bytes for cost in costs) == 5 * 8 * 4


def test_constants_are_computed_on_the_device_if_it_has_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is told of its use: here the device has no room, or is asked for the processor's."""
    asked: list[torch.device] = []
    computed = constants._result

    def on_device(node: Any, values: Any, device: torch.device) -> Any:
        asked.append(device)
        if full and device != CPU:
            raise torch.OutOfMemoryError("full")
        return computed(node, values, CPU)

    monkeypatch.setattr(constants, "_result", on_device)
    monkeypatch.setattr(constants, "_computing_device", lambda _: OTHER)
    monkeypatch.setattr(constants.Constants, "_there", lambda self, tensor: tensor)
    for full in (False, True):
        asked.clear()
        caplog.clear()
        [table] = chain_of(Stack(), X, square).chain.layers[1].buffers.values()
        assert torch.equal(table, torch.outer(torch.arange(5.0), torch.arange(8.0)).cos())
        assert set(asked) == ({OTHER, CPU} if full else {OTHER})
        assert ("their last bits may differ" in caplog.text) is full


def test_constants_are_computed_on_the_processor_without_such_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: list[torch.device | None] = [None, OTHER, torch.device("xpu")]
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: there.pop()
    )
    assert [constants._computing_device(OTHER) for _ in range(3)] == [CPU, OTHER, CPU]


def test_what_a_checkpoint_may_replace_is_not_folded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x - self.mean * 2)

    model = Scaled()
    with swap(model, X, loss=square) as engine:
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.load_state_dict({**state, "mean": torch.full((4,), 3.0)})
        with torch.no_grad():
            expected = float(square(model(X)))
        assert engine.evaluate([X]) == expected


def test_a_constant_that_is_written_in_place_has_its_last_value() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            early = torch.zeros(4)
            mask = torch.zeros(4)
            mask[2:] = 5
            mask += 1
            x = self.linear(x) + early
            early.add_(1)  # after it was read
            return x * mask + early

    model = Masked()
    with swap(model, X, loss=square) as engine:
        assert engine.evaluate([X]) == float(square(model(X)).detach())
        assert engine.evaluate([X]) == float(square(model(X)).detach())


def test_meta_weights_are_analysed() -> None:
    with torch.device("meta"):
        model = Stack(width=8)
    traced = chain_of(model, X, square)
    real = chain_of(Stack(), X, square)
    assert [layer.name for layer in traced.chain.layers] == [
        layer.name for layer in real.chain.layers
    ]
    assert layer_costs(traced.chain, traced.bind(X)) == layer_costs(real.chain, real.bind(X))


def test_random_state_and_mode_are_left_alone() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model.forward = lambda x: torch.dropout(model["a"](x), 0.5, model.training)
    model.train()
    before = torch.get_rng_state()
    chain_of(model, X, square)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


class Output(NamedTuple):
    value: Tensor
    more: dict[str, Any]


class Structured(nn.Module):
    """Takes a nested argument and a switch, returns a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, pair: list[Tensor], double: bool = False) -> Output:
        value = self.linear(x) + pair[0] * pair[1]
        return Output(value * 2 if double else value, {"input": x, "name": "this", "none": None})


def test_nested_inputs_and_outputs() -> None:
    model = Structured()
    batch = {"x": X, "pair": [X + 1, X + 2], "double": True, "target": X}
    seen: list[Any] = []

    def loss(output: Output, given: dict[str, Any]) -> Tensor:
        seen.append((output, given))
        return (output.value - given["target"]).pow(2).mean()

    with torch.no_grad():
        expected = float(loss(model(X, [X + 1, X + 2], True), batch))
    with swap(model, batch, loss=loss) as engine:
        assert engine.evaluate([batch]) == expected
        output, given = seen[-1]
        assert isinstance(output, Output)
        assert torch.equal(output.more["input"], X)
        assert (output.more["name"], output.more["none"]) == ("this", None)
        assert list(given) == list(batch)
        assert torch.equal(given["pair"][1], X + 2)
        assert given["double"] is True
        with pytest.raises(ConfigError, match=r"double is False, but .* with True; swap it again"):
            engine.step([{**batch, "double": False}])
        with pytest.raises(ConfigError, match=r"pair holds 1 tensors, but .* with 2"):
            engine.step([{**batch, "pair": [X]}])


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Bare(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Named(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"twice": 2 * super().forward(x)}


class Paired(nn.Linear):
    def forward(self, x: Tensor) -> Pair:
        return Pair(super().forward(x), x)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Bare, lambda output: output.pow(2).mean()),
        (Named, lambda output: output["twice"].pow(2).mean()),
        (Paired, lambda output: output.first.pow(2).mean() + output.second.mean()),
    ],
)
def test_the_callers_loss_gets_what_the_model_returns(kind: type[nn.Module], loss: Any) -> None:
    with swap(kind(4, 4), X, loss=loss) as engine:
        expected = float(loss(engine.model(X)).detach())
        assert engine.step([X]) == expected


@pytest.mark.slow
def test_another_shape_is_refused_with_both() -> None:
    with swap(Stack(), X, loss=square) as engine:
        message = r"x is float32 \[1, 5, 4\], but .* with float32 \[2, 5, 4\]; pad it"
        with pytest.raises(ConfigError, match=message):
            engine.step([X[:1]])
        with pytest.raises(ConfigError, match=r"x is float64 \[2, 5, 4\], but"):
            engine.evaluate([X.double()])
        assert engine.step([X]) > 0
    with swap(Stack(), X[:1], loss=square) as engine:
        assert engine.step([X[:1]]) > 0


class ByData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # this line
            return super().forward(x)
        return x


class Picks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]  # this line


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Prepares(nn.Linear):
    """Its first call does something else than the later ones."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        scale, self.ready = 1 if self.ready else 2, True
        return super().forward(x * scale if scale > 1 else x)


class Scales(nn.Linear):
    """Its first call does the same operations as the later ones with another number."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        scale, self.ready = 0.5 if self.ready else 2.0, True
        return super().forward(x * scale)


class Shifts(nn.Linear):
    """The same with a tensor in its code."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        shift, self.ready = torch.tensor([0.5 if self.ready else 2.0]), True
        return super().forward(x + shift)


class Settles(nn.Linear):
    """Its first call does the same as the later ones."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        self.ready = True
        return super().forward(x)


class Checks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        count = (x > 0).sum()
        message = f"{count} are positive"
        torch._check_tensor_all(count >= 0, lambda: message)
        return super().forward(x)


class ShowsOutput(nn.Linear):
    """For whoever wants to look at it; it is not read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.shown = y.detach()
        return y


@pytest.mark.parametrize("kind", [Settles, Checks, ShowsOutput])
def test_what_does_not_change_the_results_is_let_through(kind: type[nn.Module]) -> None:
    with swap(kind(4, 4), X, loss=square) as engine:
        expected = float(square(engine.model(X)).detach())
        assert engine.step([X]) == expected


def test_checks_that_are_left_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), swap(Checks(4, 4), X, loss=square):
        pass
    [said, *_] = [m for m in caplog.messages if "checks its data" in m]
    assert re.search(r"leaves out, at .*test_export\.py:\d+ \(torch\._check_tensor_all", said)


class KeepsCount(nn.Linear):
    """Of an attribute that was there before the first call, torch takes back what forward did."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class KeepsArray(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x)


class KeepsList(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class KeepsOutput(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        given = y if self.before is None else y + self.before
        self.before = y.detach()
        return given


class KeepsTensor(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.before = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        given = y + self.before
        self.before = y.detach().mean()
        return given


class PutsBuffer(KeepsTensor):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        del self.before
        self.register_buffer("before", torch.zeros(()))


class Hooks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / 2)
        return y


class SavesLess(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float):
            return super().forward(x).relu()


class WritesInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += 1  # this line
        return super().forward(x)


class WritesWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)  # this line
        return super().forward(x)


class WritesRow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[0].zero_()  # this line
        return super().forward(x)


class WritesPart(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x[..., 0] = 0  # this line
        return super().forward(x)


class Shortens(nn.Linear):
    """As `nn.Embedding(max_norm=...)` does."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten().long() % 4
        return super().forward(x) * F.embedding(rows, self.weight, max_norm=0.5).sum()


class WritesData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)  # this line
        return super().forward(x)


class WritesHidden(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        hidden.data.clamp_(-1, 1)
        return hidden


class Numbers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2) + super().forward(x)  # this line


class Autocast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)  # this line


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ByData, r"test_export\.py:\d+ \(if x\.sum.*\): what runs depends on data"),
        (Picks, r"test_export\.py:\d+ \(return super.*this line\)"),
        (Counts, r"changes the attribute 'calls' of module ''.* keep such a state in a registered"),
        (Prepares, r"changes the attribute 'ready' of module ''"),
        (Scales, r"changes the attribute 'ready' of module ''"),
        (Shifts, r"changes the attribute 'ready' of module ''"),
        (KeepsCount, r"changes the attribute 'count' of module ''"),
        (KeepsArray, r"changes the attribute 'calls' of module ''"),
        (KeepsList, r"changes the attribute 'seen' of module ''"),
        (KeepsOutput, r"changes the attribute 'before' of module ''"),
        (KeepsTensor, r"puts another tensor in the place of 'before'"),
        (PutsBuffer, r"puts another tensor in the place of 'before'"),
        (Hooks, r"calls register_hook on a tensor"),
        (SavesLess, r"hooks into what autograd saves"),
        (WritesInput, r"changes its input in place at .*test_export\.py:\d+"),
        (WritesWeight, r"changes a parameter in place at .*test_export\.py:\d+"),
        (WritesRow, r"changes a parameter in place at .*test_export\.py:\d+"),
        (WritesPart, r"changes its input in place at .*test_export\.py:\d+"),
        (Shortens, r"changes a parameter in place at .*test_export\.py:\d+"),
        (WritesData, r"changes a parameter in place at .*test_export\.py:\d+"),
        (WritesHidden, r"cannot analyse WritesHidden .*works on a tensor's \.data"),
        (Numbers, r"test_export\.py:\d+ \(return torch\.from_numpy"),
        (Autocast, r"uses autocast at .*test_export\.py:\d+"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_its_line(
    kind: type[nn.Module], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnalysisError, match=message) as caught:
        swap(kind(4, 4), X, loss=square)
    assert "\n" not in str(caught.value)
    assert "layers=[" in str(caught.value), "tells the manual way out"
    out, err = capfd.readouterr()
    assert not out + err


def test_types_that_cannot_be_trained() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, dtype=torch.complex64)})
    model.forward = lambda x: model["a"](x.to(torch.complex64)).abs()
    with pytest.raises(AnalysisError, match=r"'a\.weight' is of torch\.complex64; trainable are"):
        swap(model, X, loss=square)


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"the example is empty"):
        swap(Stack(), {}, loss=square)
    with pytest.raises(ConfigError, match=r"forward of Stack does not take y; leave it out"):
        swap(Stack(), {"x": X, "y": X})
    with pytest.raises(ConfigError, match=r"output \(Tensor\) has no loss of its own; pass loss"):
        swap(Stack(), X)
    with pytest.raises(AnalysisError, match=r"test_export\.py:\d+ \(hidden = .*embed.*\[10, 3\]"):
        swap(Stack(), torch.ones(2, 5, 3), loss=square)
    with swap(Stack(), {"x": X}, loss=square) as engine, pytest.raises(ConfigError, match="lacks"):
        engine.step([{}])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.first(x))
        return self.second(x)


def test_a_module_called_twice_is_two_layers_with_one_weight() -> None:
    model = Deep()
    chain = chain_of(model, X, square).chain
    assert [layer.name for layer in chain.layers] == ["first", "first#2", "second"]
    assert chain.users[id(model.first.weight)] == (0, 1)


class Moody(nn.Module):
    """Does something else in evaluation."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        value = x
        for layer in self.layers:
            value = torch.dropout(layer(value), 0.5, self.training)
        if not self.training and self.extra:
            return self.layers[0](value)
        return value if self.training else value * 3


def test_evaluation_runs_what_the_model_does_then() -> None:
    model = Moody(extra=False)
    with swap(model, X, loss=square, segments=3) as engine:
        model.eval()
        with torch.no_grad():
            expected = float(square(model(X)))
        with pytest.raises(
            ConfigError, match=r"swapped with training=True .* model\.train\(True\)"
        ):
            engine.step([X])
        model.train()
        assert engine.evaluate([X]) == expected
        assert engine.step([X]) > 0


def test_evaluation_that_does_not_fit_the_layers_is_refused_and_training_goes_on() -> None:
    model = Moody(extra=True)
    with swap(model, X, loss=square, segments=3) as engine:
        with pytest.raises(AnalysisError, match=r"'layers_0_weight' in layer 'layers\.2'"):
            engine.evaluate([X])
        assert model.training
        assert engine.step([X]) > 0

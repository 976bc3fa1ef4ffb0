"""Equal modules are traced once: the chain is the one that tracing all of them gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.export import equal_modules, export
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.errors import AnalysisError
from atomtrain.models.lora import add_adapters
from atomtrain.models.lora_config import parse_lora
from tests.support import any_models
from tests.support.any_models import Case

X = torch.ones(2, 5, 4)


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_modules, "LEAST_EQUAL", 2)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collects for each trace that was shortened the modules that were called."""
    traces: list[list[str]] = []
    repeat = export.repeat

    def noted(graph: Any, sources: Any, paths: list[str]) -> None:
        repeat(graph, sources, paths)
        traces.append(paths)

    monkeypatch.setattr(export, "repeat", noted)
    return traces


def whole(monkeypatch: pytest.MonkeyPatch, model: nn.Module, example: Any, loss: Any = None) -> Any:
    """Return the chain as it is if every module is traced."""
    with monkeypatch.context() as patch:
        patch.setattr(export, "equal_modules", lambda model: [])
        return chain_of(model, example, loss)


def described(chain: Chain) -> list[Any]:
    """Return all that makes a chain but the names of values, which are numbered by first use."""
    values: dict[str, int] = {}

    def numbers(names: tuple[str, ...]) -> list[int]:
        return [values.setdefault(name, len(values)) for name in names]

    templates: dict[int, int] = {}
    layers = []
    for layer in chain.layers:
        module = layer.module if isinstance(layer.module, GraphLayer) else layer.module.module
        assert isinstance(module, GraphLayer)
        layers.append(
            (
                layer.name,
                numbers(layer.reads),
                numbers(layer.writes),
                [(name, id(p)) for name, p in layer.parameters.items()],
                [(name, b.shape, b.dtype, b.stride()) for name, b in layer.buffers.items()],
                templates.setdefault(id(module.template), len(templates)),
                str(module.template.graph),
            )
        )
    return layers


def check_same(one: Any, two: Any, example: Any) -> None:
    assert described(one.chain) == described(two.chain)
    for left, right in zip(one.chain.layers, two.chain.layers, strict=True):
        for name, buffer in left.buffers.items():
            assert buffer.is_meta or torch.equal(buffer, right.buffers[name])
    costs, others = (layer_costs(t.chain, t.bind(example)) for t in (one, two))
    assert costs.layers == others.layers
    assert list(costs.values.values()) == list(others.values.values())


def _decoder(model: type[nn.Module], config: Any) -> Case:
    tokens = torch.ones(2, 13, dtype=torch.int64)
    return Case(model(config).train(), lambda: {"input_ids": tokens, "labels": tokens})


def gemma_of_two_kinds() -> Case:
    sizes = {**any_models._GROUPED, "num_hidden_layers": 6}
    config = hf.Gemma3TextConfig(
        **sizes, head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return _decoder(hf.Gemma3ForCausalLM, config)


def qwen3_with_adapters() -> Case:
    case = any_models.qwen3()
    add_adapters(case.model, parse_lora("r=2,bits=4"))
    return case


def mixtral_with_adapted_experts() -> Case:
    case = any_models.mixtral()
    add_adapters(case.model, parse_lora("r=2,targets=q_proj+experts"))
    return case


def half_sized_gpt2() -> Case:
    case = any_models.gpt2_with_dropout()
    case.model.bfloat16()
    return case


@pytest.mark.parametrize(
    "make",
    [
        any_models.llama_with_padding, any_models.mixtral, any_models.whisper, half_sized_gpt2,
        gemma_of_two_kinds, qwen3_with_adapters, mixtral_with_adapted_experts,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_the_chain_is_that_of_tracing_every_module(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch, stood_in: list[list[str]]
) -> None:
    model, draw = make()
    model.config.use_cache = False  # as `atomtrain.models` does: nothing is generated in training
    example = draw()
    one = chain_of(model, example)
    assert stood_in, "stand-ins were used"
    check_same(one, whole(monkeypatch, model, example), example)


def test_alternating_kinds_are_told_apart() -> None:
    groups = equal_modules.equal_modules(gemma_of_two_kinds().model)
    assert [len(group.paths) for group in groups] == [4, 2]
    assert groups[1].paths == ("model.layers.2", "model.layers.5")


class Block(nn.Module):
    """Does something else from its number on, or not."""

    def __init__(self, number: int, special: Callable[[int], bool]) -> None:
        super().__init__()
        self.number, self.special = number, special
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.tanh() if self.special(self.number) else y.relu()


class Stack(nn.Module):
    def __init__(self, special: Callable[[int], bool], blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, special) for i in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def operations(chain: Chain) -> list[set[str]]:
    found = []
    for layer in chain.layers[:-1]:
        assert isinstance(layer.module, GraphLayer)
        found.append({str(node.target) for node in layer.module.template.graph.nodes})
    return found


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def test_a_number_that_decides_what_a_module_does_is_noticed(stood_in: list[list[str]]) -> None:
    chain = chain_of(Stack(lambda number: number == 4), X, square).chain
    assert not stood_in
    assert ["aten.tanh.default" in done for done in operations(chain)] == [
        False, False, False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("special", "reason"),
    [
        (lambda number: number == 4, "a module's number decides"),
        (lambda number: torch.full((2,), number).dim() == 0, "where only a number can be"),
    ],
    ids=["compared", "given to C"],
)
def test_that_every_module_is_traced_is_logged(
    special: Callable[[int], bool],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    stood_in: list[list[str]],
) -> None:
    with caplog.at_level(logging.INFO, logger="atomtrain.analysis"):
        chain_of(Stack(special), X, square)
    assert not stood_in
    assert [message for message in caplog.messages if reason in message] == caplog.messages != []
    assert "Stack" in caplog.messages[0]


def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each trace."""
    counted: list[None] = []
    program = export._program

    def counting(*arguments: Any) -> Any:
        counted.append(None)
        return program(*arguments)

    monkeypatch.setattr(export, "_program", counting)
    return counted


def test_other_errors_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("copies are wrong")

    monkeypatch.setattr(export, "repeat", broken)
    with (
        caplog.at_level(logging.INFO, logger="atomtrain.analysis"),
        pytest.raises(AnalysisError, match="copies are wrong"),
    ):
        chain_of(Stack(lambda number: False), X, square)
    assert not caplog.messages


class Wrong(Stack):
    """Fails in any trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.ones(3, 3)


def test_a_wrong_model_is_not_traced_twice_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = traces(monkeypatch)
    with pytest.raises(AnalysisError, match=r"super\(\).forward"):
        chain_of(Wrong(lambda number: False), X, square)
    assert len(counted) == 2, "unawares, then as models are exported"


def test_a_number_that_decides_nothing_is_put_back(stood_in: list[list[str]]) -> None:
    model = Stack(lambda number: False)
    chain_of(model, X, square)
    assert stood_in
    assert [block.number for block in model.blocks] == [*range(6)]
    assert all("forward" not in vars(block) for block in model.blocks)


class Uneven(Stack):
    """Calls its blocks in different ways."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x if index % 3 else x[..., :2].repeat(1, 1, 2).flatten(0, 1))
            x = x.view(2, 5, 4)
        return self.head(x)


def test_other_inputs_are_another_trace(
    monkeypatch: pytest.MonkeyPatch, stood_in: list[list[str]]
) -> None:
    model = Uneven(lambda number: False)
    one = chain_of(model, X, square)
    assert stood_in == [[f"model.blocks.{i}" for i in range(6)]]
    check_same(one, whole(monkeypatch, model, X, square), {"x": X})


class Watched(Stack):
    """Collects what happens inside of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handles = [
            block.linear.register_forward_hook(lambda _, given, out: seen.append(out))
            for block in self.blocks
        ]
        x = super().forward(x)
        for handle in handles:
            handle.remove()
        return x + sum(value.mean() for value in seen)


class Shared(Stack):
    """One block, many places."""

    def __init__(self) -> None:
        super().__init__(lambda number: False)
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


class Outside(Stack):
    """Blocks that use a weight which is not theirs, and was not given to them."""

    def __init__(self) -> None:
        super().__init__(lambda number: False)
        self.scale = nn.Parameter(torch.ones(4))
        for block in self.blocks:
            block.special = self._special

    def _special(self, number: Any) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale

        class Scaled(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * scale

        for block in self.blocks:
            block.__class__ = Scaled
            x = block(x)
            block.__class__ = Block
        return self.head(x)


@pytest.mark.parametrize("kind", [Watched, Shared, Outside])
def test_what_is_not_certain_is_traced_as_a_whole(
    kind: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, stood_in: list[list[str]]
) -> None:
    model = kind(lambda number: False) if kind is Watched else kind()
    one = chain_of(model, X, square)
    assert not stood_in
    left = [module for module in model.modules() if module._forward_hooks]
    assert not left, "a call that was given up has left its hooks"
    check_same(one, whole(monkeypatch, model, X, square), {"x": X})

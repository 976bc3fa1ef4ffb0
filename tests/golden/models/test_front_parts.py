"""What is before a language model as several layers: same bits, smaller slots, clear limits."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.profile import layer_times
from atomtrain.analysis.layers import trace
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.front import Front, OwnCode
from atomtrain.errors import AnalysisError, ConfigError, PlanError
from atomtrain.models.neftune import with_noise
from tests.golden.models.test_any_model import check
from tests.support import vision_models
from tests.support.any_models import Case
from tests.support.engine_models import swap

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")
tied = vision_models.qwen2_5_vl_with_a_large_vocabulary
untied = functools.partial(tied, tied=False)


def layers_of(case: Case) -> tuple[Layer, ...]:
    return chain_of(case.model, case.draw()).chain.layers


def own_code(layers: tuple[Layer, ...]) -> list[Layer]:
    return [layer for layer in layers if isinstance(layer.module, OwnCode)]


def weights(layer: Layer) -> int:
    return sum(parameter.numel() for parameter in layer.parameters.values())


@pytest.mark.parametrize(
    ("make", "micro_batches"),
    [
        (vision_models.qwen2_5_vl, 2), (vision_models.qwen3_vl, 1), (vision_models.gemma3, 2),
        (tied, 1),
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "gemma3", "tied"],
)  # fmt: skip
def test_each_layer_may_be_a_segment(make: Callable[[], Case], micro_batches: int) -> None:
    case = make()
    layers = layers_of(make())
    assert len(own_code(layers)) > 1
    engine = check(case, micro_batches, segments=len(layers))
    assert engine.plan.backward_bounds == tuple(range(len(layers) + 1))


@pytest.mark.parametrize("make", vision_models.MODELS, ids=lambda make: make.__name__)
def test_parts_hold_each_weight_once_and_are_not_larger_than_need_be(
    make: Callable[[], Case],
) -> None:
    case = make()
    layers = layers_of(case)
    parts = own_code(layers)
    held = [id(p) for part in parts for p in part.parameters.values()]
    assert len(held) == len(set(held))
    language = case.model.get_decoder()  # type: ignore[operator]
    embedding = case.model.get_input_embeddings().weight  # type: ignore[operator]
    within = {id(p) for p in language.parameters()} - {id(embedding)}
    within |= {id(p) for layer in layers if layer not in parts for p in layer.parameters.values()}
    assert set(held) == {id(p) for p in case.model.parameters()} - within
    several = [layer for layer in parts if layer.name.startswith("front")]
    most = max(weights(layer) for layer in layers if layer not in several)
    assert all(weights(layer) <= most for layer in several)


def test_a_large_embedding_and_the_tower_are_two_layers() -> None:
    names = [layer.name for layer in own_code(layers_of(tied()))]
    assert names == ["model.language_model.embed_tokens", "front"]


def least_kib(case: Case) -> int:
    """Return the device memory of which the user is told that it is enough."""
    with pytest.raises(PlanError) as refused:
        swap(case.model, case.draw(), memory="4KiB")
    found = re.search(r"--device-memory to at least (\d+)KiB", str(refused.value))
    assert found, refused.value
    return int(found[1])


def test_less_device_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_kib(untied())
    case = untied()
    with swap(case.model, case.draw(), memory=f"{least}KiB") as engine:
        engine.step([case.draw()])
        assert engine.device.peak_bytes() <= least * 1024
    monkeypatch.setattr(trace, "front_layers", lambda front, most_bytes: [front.layer])
    assert least_kib(untied()) > least


def test_layers_are_measured_on_images_like_the_example() -> None:
    model, draw = vision_models.qwen2_5_vl()
    example = draw()
    chain, bind, *_ = chain_of(model, example)
    costs = layer_costs(chain, bind(example))
    times = layer_times(chain, costs, bind(example), torch.device("cpu"), lambda: None)
    assert set(times) == {cost.kind for cost in costs.layers}


def twice(model: Any) -> None:
    """Have the tower look twice."""
    own = model.model.visual.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own(*args, **kwargs)
        return own(*args, **kwargs)

    model.model.visual.forward = forward


def test_other_modules_than_with_the_example_are_refused() -> None:
    model, draw = vision_models.qwen2_5_vl()
    traced = chain_of(model, draw())
    twice(model)
    with pytest.raises(ConfigError, match="call other modules before its language model"):
        traced.chain.loss_of(traced.bind(draw()))


def noise(module: nn.Module, _: Any, result: Tensor) -> Tensor:
    return result + torch.rand_like(result) if module.training else result


def own_weight(module: nn.Module, _: Any, result: Tensor) -> Tensor:
    weight: Tensor = module.proj.weight  # type: ignore[union-attr, assignment]
    return result + weight.mean()


@pytest.mark.parametrize("hook", [noise, own_weight])
def test_what_cannot_be_divided_stays_one_layer(hook: Callable[..., Tensor]) -> None:
    def hooked() -> Case:
        case = vision_models.qwen2_5_vl()
        case.model.get_submodule("model.visual.patch_embed").register_forward_hook(hook)
        return case

    (only,) = own_code(layers_of(hooked()))
    assert isinstance(only.module, Front)
    check(hooked(), 1, segments=3)


def test_a_tower_that_looks_twice_stays_one_layer() -> None:
    case = vision_models.qwen2_5_vl()
    twice(case.model)
    assert len(own_code(layers_of(case))) == 1


def double(module: nn.Module, _: Any, result: Tensor) -> Tensor:
    return result * 2


def test_hooks_run_once_and_noise_on_embeddings_is_drawn_once() -> None:
    def hooked() -> Case:
        case = untied()
        with_noise(case.model, 5)
        for name in ("language_model.embed_tokens", "visual.blocks.0", "visual.merger"):
            case.model.get_submodule(f"model.{name}").register_forward_hook(double)
        return case

    assert len(own_code(layers_of(hooked()))) > 1
    check(hooked(), 2, segments=5)


class Drifting(nn.Module):
    """Runs a module that holds no weights; what it gives grows with each micro-batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            self.seen += 0.125
        return tree_map(lambda value: value + self.seen, self.inner(*args, **kwargs))


def drifting() -> Case:
    case = vision_models.qwen2_5_vl()
    visual: Any = case.model.get_submodule("model.visual")
    visual.rotary_pos_emb = Drifting(visual.rotary_pos_emb)
    return case


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_buffer_that_changes_between_the_modules_changes_once_a_micro_batch(
    micro_batches: int,
) -> None:
    assert len(own_code(layers_of(drifting()))) == 1
    check(drifting(), micro_batches, segments=3)


def test_parts_that_begin_to_change_buffers_are_refused() -> None:
    model, draw = drifting()
    visual: Any = model.get_submodule("model.visual")
    visual.rotary_pos_emb.eval()
    with swap(model, draw()) as engine:
        assert len(own_code(engine.traced.chain.layers)) > 1
        engine.step([draw()])
        visual.rotary_pos_emb.train()
        told = r"visual.rotary_pos_emb was swapped with training=False and has training=True now"
        with pytest.raises(ConfigError, match=told):
            engine.step([draw()])
        visual.rotary_pos_emb.eval()
        engine.step([draw()])


def test_a_buffer_that_is_replaced_is_refused() -> None:
    model, draw = vision_models.qwen2_5_vl()
    visual: Any = model.get_submodule("model.visual")
    visual.patch_embed.register_buffer("seen", torch.zeros(()))

    def replace(module: Any, _: Any, result: Tensor) -> Tensor:
        module.seen = module.seen + 1
        return result

    visual.patch_embed.register_forward_hook(replace)
    with pytest.raises(AnalysisError, match="forward replaces the buffer 'seen'"):
        chain_of(model, draw())

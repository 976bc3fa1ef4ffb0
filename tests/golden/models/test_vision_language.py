"""A language model that reads images: swapped training equals resident training bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from atomtrain.analysis import chain_of
from atomtrain.analysis.layers import trace
from atomtrain.analysis.layers.checking import check_chain
from atomtrain.analysis.layers.exported_chain import ExportedLayers, exported_layers
from atomtrain.errors import AnalysisError, ConfigError
from atomtrain.models.image_text import tower_of
from tests.golden.models.test_any_model import check
from tests.support import vision_models
from tests.support.any_models import Case

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")
IMAGE, PATCHES = 100, 16


def llava(*, frozen: bool) -> Case:
    """A CLIP tower and a Llama; each row has its image at another place, and one has padding."""
    tower = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        image_size=16, patch_size=4,
    )  # fmt: skip
    language = hf.LlamaConfig(
        vocab_size=IMAGE + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    config = hf.LlavaConfig(vision_config=tower, text_config=language, image_token_index=IMAGE)
    model = hf.LlavaForConditionalGeneration(config).train()
    model.model.vision_tower.requires_grad_(not frozen)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(3, IMAGE, (2, PATCHES + 9))
        for row, start in zip(tokens, torch.randint(0, 6, (2,)).tolist(), strict=True):
            row[start : start + PATCHES] = IMAGE
        mask = torch.ones_like(tokens)
        mask[1, -3:] = 0
        labels = tokens.masked_fill((tokens == IMAGE) | (mask == 0), -100)
        pixels = torch.randn(2, 3, 16, 16)
        return {
            "input_ids": tokens, "attention_mask": mask, "labels": labels, "pixel_values": pixels,
        }  # fmt: skip

    return Case(model, draw)


@pytest.mark.parametrize("frozen", [True, False])
def test_llava(frozen: bool) -> None:
    check(llava(frozen=frozen), micro_batches=1, segments=4)


def test_blocks_of_both_towers_are_layers() -> None:
    model, draw = llava(frozen=True)
    names = [layer.name for layer in chain_of(model, draw()).chain.layers]
    assert {f"model.language_model.layers.{index}" for index in range(3)} <= set(names)
    assert {f"model.vision_tower.encoder.layers.{index}" for index in range(2)} <= set(names)


@pytest.mark.parametrize("change", [-1, 1])
def test_other_numbers_of_image_tokens_are_refused(change: int) -> None:
    model, draw = llava(frozen=True)
    example = draw()
    bind = chain_of(model, example).bind
    bind(example)
    ids = example["input_ids"].clone()
    at = int((ids[0] == IMAGE).nonzero()[0]) - (change > 0)
    ids[0, at if at >= 0 else -1] = IMAGE if change > 0 else 3
    told = f"has {2 * PATCHES + change} image tokens .100., and the images of a micro-batch have 32"
    with pytest.raises(ConfigError, match=told):
        bind({**example, "input_ids": ids})


@pytest.mark.parametrize("make", vision_models.MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("frozen", "micro_batches"), [(True, 1), (False, 2)])
def test_models_whose_data_decide(
    make: Callable[[], Case], frozen: bool, micro_batches: int
) -> None:
    case = make()
    tower = tower_of(case.model)
    assert tower is not None
    case.model.get_submodule(tower).requires_grad_(not frozen)
    check(case, micro_batches, segments=3)


def test_language_layers_of_such_models_are_layers() -> None:
    model, draw = vision_models.qwen3_vl()
    names = [layer.name for layer in chain_of(model, draw()).chain.layers]
    layers = [f"model.language_model.layers.{index}" for index in range(3)]
    assert names[0] == "front"
    assert names[-4:] == [*layers, "lm_head"]
    assert model.model.rope_deltas is None, "analysis leaves nothing behind"  # type: ignore[union-attr]


@pytest.mark.parametrize("own", [True, False])
def test_ways_of_tracing_that_may_change_last_bits_come_after_its_own_code(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def layers(*given: Any, **named: Any) -> ExportedLayers:
        asked.append(named.get("as_eager", False))
        return exported_layers(*given, **named)

    def refused(*_: Any) -> Any:
        raise AnalysisError("it has none")

    monkeypatch.setattr(trace, "exported_layers", layers)
    model, draw = vision_models.qwen2_5_vl()
    if own:
        assert chain_of(model, draw()).chain.layers[0].name == "front"
    else:
        monkeypatch.setattr(trace, "Front", refused)
        with pytest.raises(AnalysisError, match=r"depends on data.*; it has none"):
            chain_of(model, draw())
    assert asked[:2] == [True, False], "the whole; what is behind its own code, or the whole again"


def test_running_leaves_nothing_behind_that_misleads_generating() -> None:
    model, draw = vision_models.qwen2_5_vl()
    traced = chain_of(model, draw())
    traced.chain.loss_of(traced.bind(draw()))
    check_chain(model, traced, draw())
    assert model.model.rope_deltas is None  # type: ignore[union-attr]


def test_other_shapes_of_tokens_are_refused_and_other_images_taken() -> None:
    model, draw = vision_models.qwen2_5_vl()
    traced = chain_of(model, draw())
    other = draw()
    assert traced.chain.loss_of(traced.bind(other)) == model(**other).loss
    tokens = ("input_ids", "labels", "mm_token_type_ids")
    short = {n: t[:, :-1] if n in tokens else t for n, t in draw().items()}
    short["labels"] = other["labels"]
    with pytest.raises(ConfigError, match="other shapes or values than the example"):
        traced.chain.loss_of(traced.bind(short))


def test_more_image_tokens_than_features_are_told_with_the_models_own_reason() -> None:
    model, draw = vision_models.gemma3()
    example = draw()
    example["input_ids"][0, -1] = IMAGE
    with pytest.raises(AnalysisError, match="Image features and image tokens do not match"):
        chain_of(model, example)


def test_a_model_that_changes_what_its_language_model_returns_is_refused() -> None:
    model, draw = vision_models.qwen3_vl()
    base: Any = model.model
    original = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        made.last_hidden_state = made.last_hidden_state * 2
        return made

    base.forward = forward
    with pytest.raises(AnalysisError, match="language model returns is changed before its head"):
        chain_of(model, draw())

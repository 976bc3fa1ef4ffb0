"""A language model that reads images: swapped training equals resident training bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from atomtrain.analysis import chain_of
from atomtrain.errors import AnalysisError, ConfigError
from tests.golden.models.test_any_model import check
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


_TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def gemma3() -> tuple[Any, dict[str, Tensor]]:
    config = hf.Gemma3Config(
        text_config=_TEXT, vision_config=_VISION, mm_tokens_per_image=4, image_token_id=IMAGE,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    return hf.Gemma3ForConditionalGeneration(config), images


def idefics3() -> tuple[Any, dict[str, Tensor]]:
    config = hf.Idefics3Config(
        text_config={"model_type": "llama", **_TEXT}, vision_config=_VISION, scale_factor=2,
        image_token_id=IMAGE,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(2, 1, 3, 16, 16)}
    return hf.Idefics3ForConditionalGeneration(config), images


def qwen2_vl() -> tuple[Any, dict[str, Tensor]]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {name: value for name, value in _TEXT.items() if name != "head_dim"}
    config = hf.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, image_token_id=IMAGE,
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
            "mlp_ratio": 2,
        },
    )  # fmt: skip
    images = {
        "pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)
    }  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config), images


@pytest.mark.parametrize(
    ("make", "types", "reason"),
    [
        (gemma3, "token_type_ids", "ModIndex, a torch.autograd.Function"),
        (idefics3, None, "a shape or number depends on data"),
        (qwen2_vl, "mm_token_type_ids", "what runs depends on data"),
    ],
)
def test_models_whose_data_decide_are_refused_with_the_line(
    make: Any, types: str | None, reason: str
) -> None:
    model, images = make()
    tokens = torch.randint(3, IMAGE, (2, 16))
    tokens[:, 4:8] = IMAGE
    example = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100), **images}
    if types is not None:
        example[types] = (tokens == IMAGE).long()
    assert model(**example).loss.isfinite(), "as it is it runs"
    with pytest.raises(AnalysisError, match=rf"transformers.*{reason}|{reason}.*transformers"):
        chain_of(model.train(), example)

"""A language model that reads images: swapped training equals resident training bit for bit."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor

from atomtrain.analysis import chain_of
from atomtrain.errors import ConfigError
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

"""Small random models that read images and that only Python trains: no command makes their pixels.

Those in `FREE` take images of any number and size; the others as the example has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.support.any_models import Case
from tests.support.vision_models import (
    _PATCHED,
    _ROPE,
    FEATURES,
    IMAGE,
    LENGTH,
    PATCH,
    ROWS,
    SIDE,
    TEXT,
    VISION,
    _batch,
    _numbers,
    _qwen,
)

_SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _tiled(model: Any) -> Case:
    """Take tiles, as many as the images of a micro-batch have together."""
    numbers = _numbers()

    def draw() -> dict[str, Tensor]:
        counts = next(numbers)
        pixels = torch.randn(sum(counts), 3, SIDE, SIDE)
        return _batch([FEATURES * n for n in counts], None, pixel_values=pixels)

    model.free_shapes = ("pixel_values",)
    return Case(model.train(), draw)


def llama4() -> Case:
    """Its head is within its language model, so the whole model is what is around that."""
    config = hf.Llama4Config(
        text_config={
            **TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4,
            "moe_layers": [1], "attention_chunk_size": 8, "no_rope_layers": [1, 1, 0],
        },
        vision_config={
            **VISION, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32, "rope_parameters": _PLAIN_ROPE,
        },
        image_token_index=IMAGE,
    )  # fmt: skip
    return _tiled(hf.Llama4ForConditionalGeneration(config))


def cohere2_vision() -> Case:
    config = hf.Cohere2VisionConfig(
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 8},
        vision_config=_SIGLIP, image_token_id=IMAGE, alignment_intermediate_size=48,
    )  # fmt: skip
    return _tiled(hf.Cohere2VisionForConditionalGeneration(config))


def lfm2_vl() -> Case:
    """Pads patches of images to as many as the largest has, and drops them again."""
    vision = {name: size for name, size in VISION.items() if name != "image_size"}
    patches = (SIDE // PATCH) ** 2
    config = hf.Lfm2VlConfig(
        text_config={
            "model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention", "conv"],
            "block_ff_dim": 48, "block_auto_adjust_ff_dim": False,
        },
        vision_config={
            "model_type": "siglip2_vision_model", **vision, "num_patches": patches,
            "vision_use_head": False,
        },
        image_token_id=IMAGE, projector_hidden_size=32,
    )  # fmt: skip
    grids = itertools.chain([(4, 4), (4, 4)], itertools.cycle([(2, 4), (4, 2), (2, 2)]))

    def draw() -> dict[str, Tensor]:
        sizes = list(itertools.islice(grids, ROWS))
        pixels = torch.zeros(ROWS, patches, 3 * PATCH**2)
        mask = torch.zeros(ROWS, patches, dtype=torch.int32)
        for row, (height, width) in enumerate(sizes):
            pixels[row, : height * width] = torch.randn(height * width, 3 * PATCH**2)
            mask[row, : height * width] = 1
        return _batch(
            [h * w // 4 for h, w in sizes], None, pixel_values=pixels,
            spatial_shapes=torch.tensor(sizes), pixel_attention_mask=mask,
        )  # fmt: skip

    return Case(hf.Lfm2VlForConditionalGeneration(config).train(), draw)


def paligemma() -> Case:
    """Image and question see each other, whichever comes first."""
    features = (SIDE // PATCH) ** 2
    config = hf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT, "head_dim": 8}, vision_config=_SIGLIP,
        image_token_index=IMAGE, projection_dim=32, hidden_size=32, vocab_size=TEXT["vocab_size"],
    )  # fmt: skip

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(3, IMAGE, (ROWS, LENGTH))
        tokens[:, :features] = IMAGE
        answer = torch.arange(LENGTH).expand(ROWS, LENGTH) >= features + 2
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(~answer, -100),
            "token_type_ids": answer.long(),
            "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE),
        }

    return Case(hf.PaliGemmaForConditionalGeneration(config).train(), draw)


def mllama() -> Case:
    """Text looks at images by cross attention; they have no tokens of their own."""
    tiles = 2
    config = hf.MllamaConfig(
        text_config={**TEXT, "cross_attention_layers": [1], "rope_parameters": _PLAIN_ROPE},
        vision_config={
            **VISION, "attention_heads": 2, "num_global_layers": 1, "max_num_tiles": tiles,
            "intermediate_layers_indices": [0], "vision_output_dim": 64,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=IMAGE,
    )  # fmt: skip
    model = hf.MllamaForConditionalGeneration(config)
    for name, gate in model.named_parameters():
        if "cross_attn" in name and name.endswith("gate"):
            gate.data.fill_(0.3)  # zeros would let nothing of an image through

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(3, IMAGE, (ROWS, LENGTH))
        tokens[:, 1] = IMAGE
        seen = torch.zeros(ROWS, LENGTH, 1, tiles, dtype=torch.long)
        seen[:, 1:] = 1
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(tokens == IMAGE, -100),
            "pixel_values": torch.randn(ROWS, 1, tiles, 3, SIDE, SIDE),
            "aspect_ratio_ids": torch.full((ROWS, 1), 2),
            "aspect_ratio_mask": torch.ones(ROWS, 1, tiles, dtype=torch.long),
            "cross_attention_mask": seen,
        }

    return Case(model.train(), draw)


def _omni() -> Any:
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": _ROPE},
        vision_config={**_PATCHED, "window_size": 8, "fullatt_block_indexes": [1]},
        audio_config={
            "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48, "d_model": 32, "max_source_positions": 16, "output_dim": 32,
            "n_window": 4,
        },
        image_token_id=IMAGE, audio_token_id=101, video_token_id=102, vision_start_token_id=103,
    )  # fmt: skip
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config)


def qwen2_5_omni_texts() -> Case:
    """The thinker, without what it sees and hears."""

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(3, IMAGE, (ROWS, LENGTH))
        return {"input_ids": tokens, "labels": tokens}

    return Case(_omni().train(), draw)


def qwen2_5_omni() -> Case:
    """The thinker with images."""
    model, draw = _qwen(_omni())

    def without_types() -> dict[str, Tensor]:
        return {name: value for name, value in draw().items() if name != "mm_token_type_ids"}

    return Case(model, without_types)


FREE: list[Callable[[], Case]] = [llama4, cohere2_vision, lfm2_vl, qwen2_5_omni]
ALIKE: list[Callable[[], Case]] = [paligemma, mllama, qwen2_5_omni_texts]

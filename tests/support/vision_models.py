"""Small random models whose data decide how they see, with micro-batches of unlike images.

The first micro-batch of each has the largest images, as an example should.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.support.any_models import Case

IMAGE, LENGTH, ROWS = 100, 20, 2
SIDE, PATCH = 16, 4
TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": SIDE, "patch_size": PATCH,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_PATCHED: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "intermediate_size": 48,
    "out_hidden_size": 32,
}  # fmt: skip
GRIDS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
"""Sizes that LLaVA-NeXT cuts into tiles."""
FEATURES = 4
"""Of an image of `SIDE`, with every model but those that cut images into patches by size."""


def qwen2_vl_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH,
        "mlp_ratio": 2,
    }  # fmt: skip
    return hf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": _ROPE, **text}, image_token_id=image,
        vision_config=vision,
    )  # fmt: skip


def qwen2_5_vl_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {**_PATCHED, "window_size": 8, "fullatt_block_indexes": [1]}
    return hf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": _ROPE, **text}, image_token_id=image,
        vision_config=vision,
    )  # fmt: skip


def qwen3_vl_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {**_PATCHED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return hf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": _ROPE, **text},
        image_token_id=image, vision_config=vision,
    )  # fmt: skip


def qwen3_vl_moe_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {**_PATCHED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return hf.Qwen3VLMoeConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": _ROPE, **experts, **text},
        image_token_id=image, vision_config=vision,
    )  # fmt: skip


def glm4v_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {**_PATCHED, "image_size": SIDE}
    rope = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return hf.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": rope, **text}, image_token_id=image,
        vision_config=vision,
    )  # fmt: skip


def llava_next_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT, **text}, image_token_index=image,
        vision_config={"model_type": "clip_vision_model", **VISION}, vision_feature_layer=-2,
        image_grid_pinpoints=GRIDS,
    )  # fmt: skip


def internvl_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **text}, vision_config=VISION,
        image_token_id=image, image_seq_length=FEATURES, tie_word_embeddings=False,
    )  # fmt: skip


def aya_vision_config(image: int = IMAGE, **text: Any) -> Any:
    vision = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
    return hf.AyaVisionConfig(
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 8, **text},
        vision_config=vision, image_token_index=image,
    )  # fmt: skip


def ovis2_config(image: int = IMAGE, **text: Any) -> Any:
    sizes = {**TEXT, **text}
    vision = {**VISION, "vocab_size": 40, "hidden_stride": 2}
    return hf.Ovis2Config(
        text_config={"model_type": "qwen2", **sizes}, vision_config=vision, image_token_id=image,
        visual_indicator_token_ids=list(range(image + 1, image + 6)),
        vocab_size=sizes["vocab_size"], hidden_size=sizes["hidden_size"], tie_word_embeddings=False,
    )  # fmt: skip


def gemma3_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 8, **text}, vision_config=VISION,
        mm_tokens_per_image=FEATURES, image_token_id=image, tie_word_embeddings=False,
    )  # fmt: skip


def mistral3_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8, **text},
        vision_config={"model_type": "pixtral", **VISION}, image_token_index=image,
        spatial_merge_size=2, tie_word_embeddings=False,
    )  # fmt: skip


def idefics3_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.Idefics3Config(
        text_config={"model_type": "llama", **TEXT, **text}, vision_config=VISION, scale_factor=2,
        image_token_id=image,
    )  # fmt: skip


def smolvlm_config(image: int = IMAGE, **text: Any) -> Any:
    return hf.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT, **text}, vision_config=VISION, scale_factor=2,
        image_token_id=image,
    )  # fmt: skip


def _tokens(counts: list[int]) -> Tensor:
    """Return rows of which each has so many tokens of images, beginning anywhere."""
    tokens = torch.randint(3, IMAGE, (len(counts), LENGTH))
    for row, count in zip(tokens, counts, strict=True):
        start = int(torch.randint(0, LENGTH - count - 2, ()))
        row[start : start + count] = IMAGE
    return tokens


def _batch(counts: list[int], types: str | None, **images: Tensor) -> dict[str, Tensor]:
    tokens = _tokens(counts)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    marks = {} if types is None else {types: (tokens == IMAGE).long()}
    return {"input_ids": tokens, "labels": labels, **marks, **images}


def _qwen(model: Any) -> Case:
    grids = itertools.chain([(4, 8), (4, 8)], itertools.cycle([(2, 4), (4, 4), (6, 4), (2, 2)]))

    def draw() -> dict[str, Tensor]:
        sizes = list(itertools.islice(grids, ROWS))
        pixels = torch.randn(sum(h * w for h, w in sizes), 3 * 2 * PATCH**2)
        grid = torch.tensor([[1, h, w] for h, w in sizes])
        counts = [h * w // 4 for h, w in sizes]
        types = "mm_token_type_ids"
        return _batch(counts, types, pixel_values=pixels, image_grid_thw=grid)

    return Case(model.train(), draw)


def qwen2_vl() -> Case:
    """Cuts an image into patches, as many as it has room for."""
    return _qwen(hf.Qwen2VLForConditionalGeneration(qwen2_vl_config()))


def qwen2_5_vl() -> Case:
    """Its patches see each other in windows, but in one layer."""
    return _qwen(hf.Qwen2_5_VLForConditionalGeneration(qwen2_5_vl_config()))


def qwen2_5_vl_with_a_large_vocabulary(*, tied: bool = True) -> Case:
    """One weight, or two, for embedding and head, each larger than all else together."""
    config = qwen2_5_vl_config(vocab_size=4096)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    return _qwen(hf.Qwen2_5_VLForConditionalGeneration(config))


def qwen3_vl() -> Case:
    """Adds features to the hidden states of two layers too."""
    return _qwen(hf.Qwen3VLForConditionalGeneration(qwen3_vl_config()))


def qwen3_vl_moe() -> Case:
    """As Qwen3-VL, with experts in its language model."""
    return _qwen(hf.Qwen3VLMoeForConditionalGeneration(qwen3_vl_moe_config()))


def _numbers() -> Iterator[list[int]]:
    """Return how many images each row has."""
    return itertools.chain([[2, 2]], itertools.cycle([[1, 2], [1, 1]]))


def gemma3() -> Case:
    """The tokens of an image see each other, whichever comes first."""
    numbers = _numbers()

    def draw() -> dict[str, Tensor]:
        counts = next(numbers)
        pixels = torch.randn(sum(counts), 3, SIDE, SIDE)
        return _batch([FEATURES * n for n in counts], "token_type_ids", pixel_values=pixels)

    return Case(hf.Gemma3ForConditionalGeneration(gemma3_config()).train(), draw)


def mistral3() -> Case:
    """Pads images to the size of the largest, and joins patches."""
    sizes = itertools.chain([(16, 16)] * ROWS, itertools.cycle([(8, 16), (16, 8), (8, 8)]))

    def draw() -> dict[str, Tensor]:
        each = list(itertools.islice(sizes, ROWS))
        pixels = torch.zeros(ROWS, 3, max(h for h, _ in each), max(w for _, w in each))
        for row, (height, width) in zip(pixels, each, strict=True):
            row[:, :height, :width] = torch.randn(3, height, width)
        counts = [h * w // (2 * PATCH) ** 2 for h, w in each]
        return _batch(counts, None, pixel_values=pixels, image_sizes=torch.tensor(each))

    return Case(hf.Mistral3ForConditionalGeneration(mistral3_config()).train(), draw)


def _tiles(model: Any) -> Case:
    numbers = _numbers()

    def draw() -> dict[str, Tensor]:
        counts = next(numbers)
        pixels = torch.randn(ROWS, 2, 3, SIDE, SIDE)
        mask = torch.ones(ROWS, 2, SIDE, SIDE, dtype=torch.int64)
        mask[0, 0, :, SIDE // 2 :] = 0
        for row, count in enumerate(counts):
            pixels[row, count:] = 0
        tokens = [FEATURES * n for n in counts]
        return _batch(tokens, None, pixel_values=pixels, pixel_attention_mask=mask)

    return Case(model.train(), draw)


def idefics3() -> Case:
    """Leaves out images that are empty, and does not look at what is padded."""
    return _tiles(hf.Idefics3ForConditionalGeneration(idefics3_config()))


def smolvlm() -> Case:
    """As Idefics3."""
    return _tiles(hf.SmolVLMForConditionalGeneration(smolvlm_config()))


MODELS: list[Callable[[], Case]] = [
    qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, gemma3, mistral3, idefics3, smolvlm,
]  # fmt: skip

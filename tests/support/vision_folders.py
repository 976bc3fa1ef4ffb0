"""Folders of small random models that read images, each with its processor, and chats for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf

from tests.support import vision_models
from tests.support.image_models import COLOURS, byte_tokenizer, row_about, write_rows

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% if m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIDE, _PATCH = vision_models.SIDE, vision_models.PATCH


class Family(NamedTuple):
    """How a folder of one kind is made."""

    model: Any
    config: Callable[..., Any]
    image: str
    """What stands for an image in a text."""
    feature: str
    """The token that is there once for each feature."""
    images: Callable[[], Any]
    """Makes the image processor."""
    processor: Callable[..., Any] | None = None
    """Makes the processor of image processor and tokenizer; `None`: it needs more packages, and is
    made of the two."""
    extra: dict[str, str] = {}  # noqa: RUF012
    """Special tokens by the names that the processor asks for."""
    special: tuple[str, ...] = ()
    """Further special tokens."""
    settings: dict[str, Any] = {"image_seq_len": vision_models.FEATURES}  # noqa: RUF012
    """Of a processor that is made of the two; who does not ask leaves them."""


_SIZE = {"size": {"shortest_edge": 64, "longest_edge": 1024}}


def _patches() -> Any:
    return hf.Qwen2VLImageProcessorPil(**_SIZE, patch_size=_PATCH)


_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"


def _gemma(images: Any, tokens: Any) -> Any:
    return hf.Gemma3Processor(images, tokens, image_seq_length=vision_models.FEATURES)


def _idefics(images: Any, tokens: Any) -> Any:
    return hf.Idefics3Processor(images, tokens, image_seq_len=vision_models.FEATURES)


_TILES = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
_TILE_TOKENS = (
    "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip


_GLM_TOKENS = (
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>",
)  # fmt: skip
_SQUARE = {"height": SIDE, "width": SIDE}
_CROPS: dict[str, Any] = {"size": _SQUARE, "max_patches": 4}
_AYA_TOKENS = (
    "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>",
    "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)),
)  # fmt: skip
_OVIS_TOKENS = (
    "<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>",
)  # fmt: skip


def _anyres() -> Any:
    size = {"shortest_edge": SIDE}
    return hf.LlavaNextImageProcessorPil(
        size=size, crop_size=_SQUARE, image_grid_pinpoints=vision_models.GRIDS
    )


def _llava_next(images: Any, tokens: Any) -> Any:
    return hf.LlavaNextProcessor(
        images, tokens, patch_size=_PATCH, num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )  # fmt: skip


def _crops() -> Any:
    return hf.GotOcr2ImageProcessorPil(**_CROPS)


def _aya(images: Any, tokens: Any) -> Any:
    return hf.AyaVisionProcessor(
        images, tokens, patch_size=_PATCH, img_size=SIDE, downsample_factor=2
    )


def _ovis(images: Any, tokens: Any) -> Any:
    return hf.Ovis2Processor(images, tokens, image_seq_length=vision_models.FEATURES)


FAMILIES = {
    "qwen2_5_vl": Family(
        hf.Qwen2_5_VLForConditionalGeneration, vision_models.qwen2_5_vl_config, _QWEN,
        "<|image_pad|>", _patches, special=_QWEN_TOKENS,
    ),
    "qwen3_vl": Family(
        hf.Qwen3VLForConditionalGeneration, vision_models.qwen3_vl_config, _QWEN,
        "<|image_pad|>", _patches, special=_QWEN_TOKENS,
    ),
    "qwen3_vl_moe": Family(
        hf.Qwen3VLMoeForConditionalGeneration, vision_models.qwen3_vl_moe_config, _QWEN,
        "<|image_pad|>", _patches, special=_QWEN_TOKENS,
    ),
    "glm4v": Family(
        hf.Glm4vForConditionalGeneration, vision_models.glm4v_config,
        "<|begin_of_image|><|image|><|end_of_image|>", "<|image|>",
        lambda: hf.Glm4vImageProcessorPil(**_SIZE, patch_size=_PATCH),
        special=_GLM_TOKENS,
    ),
    "llava_next": Family(
        hf.LlavaNextForConditionalGeneration, vision_models.llava_next_config, "<image>", "<image>",
        _anyres, _llava_next, special=("<image>",),
    ),
    "internvl": Family(
        hf.InternVLForConditionalGeneration, vision_models.internvl_config, "<IMG_CONTEXT>",
        "<IMG_CONTEXT>", _crops, extra={
            "start_image_token": "<img>", "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
        },
        settings={"image_seq_length": vision_models.FEATURES},
    ),
    "aya_vision": Family(
        hf.AyaVisionForConditionalGeneration, vision_models.aya_vision_config, "<image>",
        "<|IMG_PATCH|>", _crops, _aya, special=_AYA_TOKENS,
    ),
    "ovis2": Family(
        hf.Ovis2ForConditionalGeneration, vision_models.ovis2_config, "<image>", "<IMG_ATOM>",
        lambda: hf.Ovis2ImageProcessorPil(**_CROPS, crop_to_patches=True), _ovis,
        special=_OVIS_TOKENS,
    ),
    "gemma3": Family(
        hf.Gemma3ForConditionalGeneration, vision_models.gemma3_config, "<start_of_image>",
        "<image_soft_token>",
        lambda: hf.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        _gemma,
        {
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
    "mistral3": Family(
        hf.Mistral3ForConditionalGeneration, vision_models.mistral3_config, "[IMG]", "[IMG]",
        lambda: hf.PixtralImageProcessorPil(
            size={"longest_edge": SIDE}, patch_size={"height": _PATCH, "width": _PATCH}
        ),
        special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        settings={"patch_size": _PATCH, "spatial_merge_size": 2},
    ),
    "idefics3": Family(
        hf.Idefics3ForConditionalGeneration, vision_models.idefics3_config, "<image>", "<image>",
        lambda: hf.Idefics3ImageProcessorPil(**_TILES), _idefics, special=_TILE_TOKENS,
    ),
    "smolvlm": Family(
        hf.SmolVLMForConditionalGeneration, vision_models.smolvlm_config, "<image>", "<image>",
        lambda: hf.SmolVLMImageProcessorPil(**_TILES), special=_TILE_TOKENS,
    ),
}  # fmt: skip


def write_vision(folder: Path, name: str) -> None:
    """Write a random model of a family with its processor."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    tokens = byte_tokenizer(family.extra, family.special)
    config = family.config(
        tokens.convert_tokens_to_ids(family.feature), vocab_size=len(tokens),
        pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id, max_position_embeddings=256,
    )  # fmt: skip
    family.model(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    images = family.images()
    if family.processor is None:
        images.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(family.settings))
    else:
        family.processor(images, tokens).save_pretrained(folder)
    template = _TEMPLATE.replace("IMAGE", family.image)
    (folder / "chat_template.jinja").write_text(template)


def write_unlike_chats(folder: Path, count: int = 12) -> Path:
    """Write pictures of unlike shapes and a file of chats about one or two each; return it."""
    from PIL import Image

    (folder / "pictures").mkdir(parents=True)
    rows = []
    for index in range(count):
        colour = list(COLOURS)[index % 3]
        sizes = [(16 + 3 * index, 30), (40 - 2 * index, 10)][: 1 + (index % 3 == 0)]
        names = [f"pictures/{index}-{number}.png" for number in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            Image.new("RGB", size, COLOURS[colour]).save(folder / name)
        rows.append(row_about(*names, answer=colour))
    return write_rows(folder / "chats.jsonl", rows)

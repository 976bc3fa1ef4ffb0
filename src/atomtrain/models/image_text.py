"""Models that read images beside text: which kinds there are, and what of them looks at images.

The *tower* makes hidden states of pixels; a projector makes them as wide as the language model's,
one *feature* for each token that stands for a part of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError


class Kind(NamedTuple):
    """What is to be known of a kind of models."""

    tower: str
    """Name of the module that looks at images."""
    types: str | None = None
    """Under which name forward takes which tokens stand for images: 1 of those, else 0."""
    alike: bool = False
    """Whether all rows must have as many images, and all of one size: the tower is exported."""
    texts: bool = False
    """Whether it may learn from texts alone too."""
    by_area: bool = False
    """Whether sizes in the image processor's settings are numbers of pixels, not of a side."""
    feature: str | None = None
    """The token of which there are as many as features; `None`: the processor says which."""


_PATCHES = Kind("model.visual", "mm_token_type_ids", by_area=True)
KINDS = {
    "llava": Kind("model.vision_tower", alike=True),
    "llava_next": Kind("model.vision_tower"),
    "internvl": Kind("model.vision_tower"),
    "aya_vision": Kind("model.vision_tower"),
    "mistral3": Kind("model.vision_tower"),
    "ovis2": Kind("model.vision_tower", feature="<IMG_ATOM>"),
    "glm4v": _PATCHES,
    "qwen2_vl": _PATCHES,
    "qwen2_5_vl": _PATCHES,
    "qwen3_vl": _PATCHES,
    "qwen3_vl_moe": _PATCHES,
    "idefics3": Kind("model.vision_model"),
    "smolvlm": Kind("model.vision_model"),
    "gemma3": Kind("model.vision_tower", "token_type_ids", texts=True),
}
"""Models that `atom train` takes, by their `model_type`."""

PROCESSOR_FILE, PREPROCESSOR_FILE = "processor_config.json", "preprocessor_config.json"
"""The second one holds the image processor, unless the first one does, as it does today."""
VIDEO_FILE = "video_preprocessor_config.json"
"""Not used here, but a model's processor is not made without it."""


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is of a model that reads images beside text."""
    return config.get("model_type") in KINDS


def needs_images(config: Mapping[str, Any]) -> bool:
    """Return whether it learns from no texts without images."""
    return reads_images(config) and not KINDS[config["model_type"]].texts


def tower_of(model: nn.Module) -> str | None:
    """Return the name of the module that looks at images, `None` of a model that reads text."""
    kind = kind_of(model)
    return None if kind is None else kind.tower


def kind_of(model: nn.Module) -> Kind | None:
    """Return what is to be known of a model that reads images, `None` of one that reads text."""
    return KINDS.get(getattr(getattr(model, "config", None), "model_type", ""))


def in_tower(model: nn.Module, name: str) -> bool:
    """Return whether a module or a parameter of this name is a part of the tower."""
    tower = tower_of(model)
    return tower is not None and f"{name}.".startswith(f"{tower}.")


def freeze_tower(model: nn.Module) -> None:
    """Have the tower stay as it is, in place; a model that reads text has none."""
    if (tower := tower_of(model)) is not None:
        model.get_submodule(tower).requires_grad_(False)


def pixels_of(outline: Any, images: int) -> Tensor:
    """Return so many images as the model takes them, `[images, C, H, W]` on the meta device.

    Raises:
        ConfigError: its configuration does not say of which size.
    """
    vision = outline.config.vision_config
    try:
        size = vision.num_channels, vision.image_size, vision.image_size
        return torch.empty(images, *size, device="meta")
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "the model's vision_config does not say num_channels and image_size as numbers; add "
            "them to its config.json"
        ) from error


def check_features(outline: Any, input_ids: Tensor, pixel_values: Tensor, what: str) -> None:
    """Refuse a processor that puts more or fewer tokens for an image than the model has features.

    Args:
        outline: The model on the meta device.
        input_ids: `[rows, T]`, of data.
        pixel_values: `[images, C, H, W]`, of the same rows.
        what: How messages call the model.

    Raises:
        ConfigError: it does, or the model does not take images of this size.
    """
    on_meta = torch.empty(pixel_values.shape, device="meta", dtype=next(outline.parameters()).dtype)
    try:
        with torch.no_grad():
            found = outline.get_image_features(pixel_values=on_meta, return_dict=True)
    except Exception as error:  # of a class of transformers
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{what} does not take images of {list(pixel_values.shape[1:])} values as its "
            f"processor makes them ({reason}); correct preprocessor_config.json"
        ) from error
    features = sum(len(image) for image in found.pooler_output)
    tokens = int((input_ids == outline.config.image_token_id).sum())
    if tokens != features:
        images = len(pixel_values)
        raise ConfigError(
            f"the processor of {what} puts {tokens / images:g} tokens for an image, and the model "
            f"makes {features / images:g} features of it; correct patch_size, "
            "vision_feature_select_strategy and num_additional_image_tokens in "
            "processor_config.json"
        )

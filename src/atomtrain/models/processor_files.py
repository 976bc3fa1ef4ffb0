"""What of a stranger's files makes a processor: sizes, choices and truths, within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atomtrain.errors import ConfigError
from atomtrain.models.image_text import PREPROCESSOR_FILE, PROCESSOR_FILE

_OF_TEXT = {
    "image_token", "patch_size", "vision_feature_select_strategy", "num_additional_image_tokens",
    "image_seq_len", "image_seq_length", "img_size", "downsample_factor", "spatial_merge_size",
    "image_break_token", "image_end_token",
}  # fmt: skip
_OF_IMAGES = {
    "crop_size", "crop_to_patches", "default_to_square", "do_center_crop", "do_convert_rgb",
    "do_image_splitting", "do_normalize", "do_pad", "do_pan_and_scan", "do_rescale", "do_resize",
    "image_grid_pinpoints", "image_mean", "image_processor_type", "image_seq_length", "image_std",
    "max_image_size", "max_patches", "max_pixels", "merge_size", "min_patches", "min_pixels",
    "pad_size", "patch_size", "resample", "rescale_factor", "size", "temporal_patch_size",
    "use_covering_area_grid",
}  # fmt: skip
_AREAS = {"max_pixels", "min_pixels", "size"}
"""Settings that are numbers of pixels where sizes are areas."""
_FORMS: dict[str, Any] = {
    "image_grid_pinpoints": list,
    "max_image_size": dict,
    "max_patches": int,
    "merge_size": int,
    "min_patches": int,
    "patch_size": int | dict,  # of height and width
    "spatial_merge_size": int,
    "temporal_patch_size": int,
}
"""Settings that must be of these types, or null."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MODEL_TOKENS = (
    "image_token", "boi_token", "eoi_token", "video_token", "start_image_token", "end_image_token",
    "context_image_token",
)  # fmt: skip
"""Tokens that only models that read images have."""
_MOST_PIXELS = 4096
"""Of a side that a setting names; also of all other numbers in settings."""
MOST_RESIZED_PIXELS = 1 << 26
"""Of a picture whose shorter side was brought to a size, before it is cropped."""
_MOST_LETTERS = 100
"""Of a text in settings."""


def kept_settings(texts: Mapping[str, str], *, by_area: bool) -> dict[str, dict[str, Any]]:
    """Return of a processor's files what decides tokens and pixels."""
    if PROCESSOR_FILE not in texts and PREPROCESSOR_FILE not in texts:
        raise ConfigError(
            f"the model has no processor ({PROCESSOR_FILE} or {PREPROCESSOR_FILE}), which makes "
            "pixels of images; copy the files that it was published with"
        )
    text = _object(texts, PROCESSOR_FILE)
    images = text.get("image_processor") or _object(texts, PREPROCESSOR_FILE)
    if not isinstance(images, dict):
        raise ConfigError(f"image_processor in {PROCESSOR_FILE} must be a JSON object; restore it")
    image_settings = {key: value for key, value in images.items() if key in _OF_IMAGES}
    _check_type(image_settings.get("image_processor_type"))
    text_settings = {key: value for key, value in text.items() if key in _OF_TEXT}
    for key, value in (*image_settings.items(), *text_settings.items()):
        _check_value(key, value, MOST_RESIZED_PIXELS if by_area and key in _AREAS else _MOST_PIXELS)
    return {
        PROCESSOR_FILE: text_settings,
        PREPROCESSOR_FILE: image_settings,
    }


def _object(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(texts.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} of the model is not JSON ({error}); restore it") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} of the model is not a JSON object; restore it")
    return found


def _check_type(name: object) -> None:
    from transformers.models.auto import image_processing_auto

    names: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    known = {
        str(each)
        for classes in names.values()
        for each in (classes.values() if isinstance(classes, Mapping) else [classes])
    }
    known |= {f"{each}Fast" for each in known}
    if name not in known:
        raise ConfigError(
            f"the model's image_processor_type is {str(name)[:60]!r}, which the installed "
            f"transformers does not have; give {PREPROCESSOR_FILE} as it was published"
        )


def _check_value(key: str, value: Any, most: int) -> None:
    """Refuse what is deep or large: a picture, or what stands for it, would be made as large."""

    def sane(each: Any) -> bool:
        if isinstance(each, str):
            return len(each) <= _MOST_LETTERS and not isinstance(value, dict)
        return each is None or (isinstance(each, int | float) and 0 <= each <= most)

    formed = value is None or isinstance(value, _FORMS.get(key, object))
    inside = list(value.values()) if isinstance(value, dict) else value
    if key == "image_grid_pinpoints" and isinstance(value, list):  # of lists
        inside = [side for pair in value for side in (pair if isinstance(pair, list) else [pair])]
    if not formed or not all(map(sane, inside if isinstance(inside, list) else [inside])):
        raise ConfigError(
            f"the model's processor says {key} {str(value)[:60]}; numbers from 0 to "
            f"{most} are taken, and words: correct {PREPROCESSOR_FILE} or "
            f"{PROCESSOR_FILE}"
        )
    divisors = inside if isinstance(inside, list) else [inside]
    if key == "image_std" and 0 in divisors:
        raise ConfigError(
            f"the model's processor divides pixels by image_std {value}; give numbers above 0 in "
            f"{PREPROCESSOR_FILE} or {PROCESSOR_FILE}"
        )


def kept_tokens(texts: Mapping[str, str], processor: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's settings, of which only names of tokens are kept."""
    stored = _object(texts, "tokenizer_config.json")
    tokens: dict[str, Any] = {}
    of_model: dict[str, str] = {}
    extra = stored.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **stored}
    for key in (*_TOKENS, *_MODEL_TOKENS):
        token = named.get(key, processor.get(key) if key == "image_token" else None)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            if len(token) > _MOST_LETTERS:  # it is repeated for each feature of an image
                raise ConfigError(
                    f"{key} of the model's tokenizer_config.json has {len(token)} letters, at most "
                    f"{_MOST_LETTERS} are taken; restore it"
                )
            (tokens if key in _TOKENS else of_model)[key] = token
    if of_model:
        tokens["extra_special_tokens"] = of_model
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}

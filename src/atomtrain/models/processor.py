"""The processor of a model that reads images: text and pictures become tokens and pixels.

It is the class that transformers has for the model's kind, made of files that may be a stranger's:
of those only sizes, choices and truths are kept (see `atomtrain.models.confined`). Pictures are
resized by Pillow, whatever else is installed, so all peers see the same pixels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from atomtrain.errors import ConfigError, DataError
from atomtrain.models.confined import confined
from atomtrain.models.image_text import PREPROCESSOR_FILE, PROCESSOR_FILE

if TYPE_CHECKING:
    from PIL.Image import Image

    from atomtrain.models.hugging_face import HuggingFaceConfig

_OF_TEXT = {
    "image_token", "patch_size", "vision_feature_select_strategy", "num_additional_image_tokens",
}  # fmt: skip
_OF_IMAGES = {
    "crop_size", "default_to_square", "do_center_crop", "do_convert_rgb", "do_normalize", "do_pad",
    "do_rescale", "do_resize", "image_mean", "image_processor_type", "image_std", "pad_size",
    "resample", "rescale_factor", "size",
}  # fmt: skip
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MOST_PIXELS = 4096
"""Of a side that a setting names; also of all other numbers in settings."""
_MOST_RESIZED_PIXELS = 1 << 26
"""Of a picture whose shorter side was brought to a size, before it is cropped."""
_MOST_CHARACTERS = 1 << 20
"""Of a row's text."""
_MOST_TOKENS = 1 << 17
"""Of a row's images."""
_MOST_LETTERS = 100
"""Of a text in settings."""


class Seen(NamedTuple):
    """A text with pictures, as the model takes it."""

    tokens: list[int]
    starts: list[int]
    """At which character of the text each token begins; -1 of one that stands for no text."""
    pixels: Tensor  # [pictures, C, H, W] float32


class Processor:
    """Text and pictures to tokens and pixels."""

    def __init__(self, sizes: HuggingFaceConfig, tokenizer: str) -> None:
        """Make the processor of a model that reads images.

        Args:
            sizes: The model.
            tokenizer: Content of its tokenizer.json.

        Raises:
            ConfigError: the model has none, or it cannot be made; or Pillow is missing.
        """
        require_pillow()
        self._made = _made(sizes, tokenizer)
        self.image_token: str = self._made.image_token
        """What stands for an image in a text."""
        self.image_number: int = self._made.image_token_id
        """The token of which there are as many as an image has features."""
        wanted = sizes.config.get("image_token_index", sizes.config.get("image_token_id"))
        if wanted is not None and wanted != self.image_number:
            raise ConfigError(
                f"the processor puts token {self.image_number} ({self.image_token!r}) for images, "
                f"and config.json says {wanted}; both must be of one model"
            )

    def read(self, text: str, pictures: Sequence[Image]) -> Seen:
        """Return a text with its pictures, in the order in which it names them.

        Raises:
            DataError: the processor cannot take them.
        """
        if len(text) > _MOST_CHARACTERS:
            raise DataError(
                f"a text of {len(text)} characters is too long beside images, at most "
                f"{_MOST_CHARACTERS} are taken; divide it"
            )
        pixels = self.pixels(pictures)
        self._check_tokens(pixels)
        begun = self._made.tokenizer.bos_token
        special = not (begun and text.startswith(begun))  # as its own apply_chat_template does
        try:
            with confined():
                found = self._made(
                    text=[text],
                    images=list(pictures),
                    add_special_tokens=special,
                    return_offsets_mapping=True,
                    return_text_replacement_offsets=True,
                )
        except Exception as error:  # whatever a class of transformers raises
            raise _refused(error) from error
        starts = [
            start if start < stop else -1 for start, stop in map(tuple, found["offset_mapping"][0])
        ]
        replaced = found["text_replacement_offsets"][0]
        back = [_original(start, replaced) for start in starts]
        return Seen(list(found["input_ids"][0]), back, pixels)

    def pixels(self, pictures: Sequence[Image]) -> Tensor:
        """Return pictures as the model takes them, `[pictures, C, H, W]` float32.

        Raises:
            DataError: the processor cannot take them.
        """
        for picture in pictures:
            self._check_side(picture.size)
        try:
            with confined():
                made = self._made.image_processor(images=list(pictures), return_tensors="pt")
                found: Tensor = made["pixel_values"]
        except Exception as error:  # whatever a class of transformers raises
            raise _refused(error) from error
        if found.ndim != 4 or len(found) != len(pictures):
            raise DataError(
                f"the processor makes {list(found.shape)} values of {len(pictures)} images, and "
                "one array of channels, height and width for each is needed; take its tiles away"
            )
        return found.float()

    def _check_side(self, size: tuple[int, int]) -> None:
        """Refuse a strip: with its shorter side resized, the other one is as much longer."""
        images = self._made.image_processor
        to_pixels = (getattr(images, "size", None) or {}).get("shortest_edge")
        if to_pixels is not None and to_pixels**2 * max(size) > _MOST_RESIZED_PIXELS * min(size):
            raise DataError(
                f"an image of {size[0]} x {size[1]} pixels is too long to have its shorter side "
                f"resized to {to_pixels}; cut it"
            )

    def _check_tokens(self, pixels: Tensor) -> None:
        patch, height, width = self._made.patch_size, *pixels.shape[-2:]
        if patch and (height // patch) * (width // patch) * len(pixels) > _MOST_TOKENS:
            raise DataError(
                f"its images of {height} x {width} pixels have more than {_MOST_TOKENS} patches of "
                f"{patch} x {patch}; give fewer, or correct patch_size in {PROCESSOR_FILE}"
            )


def require_pillow() -> None:
    """Refuse to go on without what opens pictures.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "reading images needs the package Pillow; install it with pip install "
            "'atomtrain[images]'"
        ) from None


def _original(start: int, replaced: Sequence[Mapping[str, Any]]) -> int:
    """Return the character of the text as it was before images took the place of their names."""
    shift = 0
    for each in replaced:
        first, behind = each["new_span"]
        if start < first:
            break
        if start < behind:
            return int(each["span"][0])
        shift = each["span"][1] - behind
    return start + shift if start >= 0 else start


def _made(sizes: HuggingFaceConfig, tokenizer: str) -> Any:
    from transformers.models.auto import processing_auto

    kind = sizes.config["model_type"]
    files = _kept(sizes.files)
    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    name = names[kind]
    files[PROCESSOR_FILE]["processor_class"] = name
    files["tokenizer_config.json"] = _tokens_of(sizes.files, files[PROCESSOR_FILE])
    files["config.json"] = {"model_type": kind}
    made: Any = processing_auto.processor_class_from_name(name)
    try:
        with confined(), tempfile.TemporaryDirectory(prefix="atom-processor-") as alone:
            for file, content in files.items():
                (Path(alone) / file).write_text(json.dumps(content), encoding="utf-8")
            (Path(alone) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            return made.from_pretrained(
                alone, local_files_only=True, trust_remote_code=False, backend="pil"
            )
    except Exception as error:  # whatever a class of transformers raises
        raise ConfigError(
            f"the model's processor cannot be made ({_one_line(error)}); give {PROCESSOR_FILE} and "
            f"{PREPROCESSOR_FILE} as the model was published with"
        ) from error


def _kept(texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
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
        _check_value(key, value)
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


def _check_value(key: str, value: Any) -> None:
    """Refuse what is deep or large: a picture, or what stands for it, would be made as large."""
    inside = list(value.values()) if isinstance(value, dict) else value
    for each in inside if isinstance(inside, list) else [inside]:
        if isinstance(each, str):
            sane = len(each) <= _MOST_LETTERS and not isinstance(value, dict)
        else:
            sane = each is None or (isinstance(each, int | float) and 0 <= each <= _MOST_PIXELS)
        if not sane:
            raise ConfigError(
                f"the model's processor says {key} {str(value)[:60]}; numbers from 0 to "
                f"{_MOST_PIXELS} are taken, and words: correct {PREPROCESSOR_FILE} or "
                f"{PROCESSOR_FILE}"
            )


def _tokens_of(texts: Mapping[str, str], processor: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's settings, of which only names of tokens are kept."""
    stored = _object(texts, "tokenizer_config.json")
    tokens: dict[str, Any] = {}
    for key in (*_TOKENS, "image_token"):
        token = stored.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[key] = token
    image_token = tokens.pop("image_token", processor.get("image_token"))
    if isinstance(image_token, str):
        tokens["extra_special_tokens"] = {"image_token": image_token}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}


def _refused(error: Exception) -> DataError:
    return DataError(f"the model's processor refuses it ({_one_line(error)})")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

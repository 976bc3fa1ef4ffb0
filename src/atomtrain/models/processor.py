"""The processor of a model that reads images: text and pictures become tokens and pixels.

It is the class that transformers has for the model's kind, made of files that may be a stranger's:
of those little is kept (see `processor_files` and `confined`). Pictures are resized by Pillow,
whatever else is installed, so all peers see the same pixels.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atomtrain.errors import ConfigError, DataError
from atomtrain.models.confined import confined
from atomtrain.models.hugging_face import HuggingFaceConfig, require_transformers
from atomtrain.models.image_text import KINDS, PREPROCESSOR_FILE, PROCESSOR_FILE
from atomtrain.models.processor_files import MOST_RESIZED_PIXELS, kept_settings, kept_tokens

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST_FOR_IMAGES = (5, 20)
"""As the extra `images` asks for."""
_PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"
_VIDEOS = "video_processor"
"""A processor's last part, if it has one."""
_MOST_TILES = 16
"""Into which a side of a picture is cut."""
_MOST_SIDE = 1 << 16
"""Pixels of a picture's side."""
_MOST_CHARACTERS = 1 << 20
"""Of a row's text."""
_MOST_TOKENS = 1 << 17
"""Of a row's images."""


class Seen(NamedTuple):
    """A text with pictures, as the model takes it."""

    tokens: list[int]
    starts: list[int]
    """At which character of the text each token begins; -1 of one that stands for no text."""
    images: dict[str, Tensor]
    """What forward takes beside the tokens, by its names: `pixel_values` float32, sizes, masks."""


class Processor:
    """Text and pictures to tokens and pixels."""

    def __init__(self, sizes: HuggingFaceConfig, tokenizer: str) -> None:
        """Make the processor of a model that reads images.

        Args:
            sizes: The model.
            tokenizer: Content of its tokenizer.json.

        Raises:
            ConfigError: the model has none, or it cannot be made; or Pillow is
                missing, or transformers too old.
        """
        require_pillow()
        require_transformers("images", LEAST_FOR_IMAGES, "images")
        self._made = _made(sizes, tokenizer, self._check_tokens)
        kind = KINDS[sizes.config["model_type"]]
        self.types, self.alike = kind.types, kind.alike
        self._by_area = kind.by_area
        self._as_arrays = kind.feature is not None  # it asks for them
        self.image_token: str = self._made.image_token
        """What stands for an image in a text."""
        self.image_number: int = _feature_of(self._made, kind.feature)
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
        for picture in pictures:
            self._check_side(picture.size)
        begun = self._made.tokenizer.bos_token
        special = not (begun and text.startswith(begun))  # as its own apply_chat_template does
        try:
            with confined():
                found = self._made(
                    text=[text],
                    images=list(pictures),
                    images_kwargs={"return_tensors": "np"} if self._as_arrays else {},
                    add_special_tokens=special,
                    return_offsets_mapping=True,
                    return_text_replacement_offsets=True,
                )
        except DataError:
            raise
        except Exception as error:  # whatever a class of transformers raises
            raise _refused(error) from error
        starts = [
            start if start < stop else -1
            for start, stop in np.asarray(found["offset_mapping"][0]).tolist()
        ]
        replaced = found["text_replacement_offsets"][0]
        back = [_original(start, replaced) for start in starts]
        tokens: list[int] = np.asarray(found["input_ids"][0]).tolist()
        if self.types is not None:
            types = [int(token == self.image_number) for token in tokens]
            if list(found[self.types][0]) != types:
                raise DataError(
                    "the processor marks other tokens than those of images; give images"
                )
        return Seen(tokens, back, self._images_in(found, len(pictures)))

    def images(self, pictures: Sequence[Image]) -> dict[str, Tensor]:
        """Return what the model takes of pictures, see `Seen.images`.

        Raises:
            DataError: the processor cannot take them.
        """
        return self.read(self.image_token * len(pictures), pictures).images

    def _images_in(self, found: Mapping[str, Any], pictures: int) -> dict[str, Tensor]:
        names = [name for name in self._made.image_processor.model_input_names if name in found]
        images = {name: torch.as_tensor(np.asarray(found[name])) for name in names}
        pixels = images.get("pixel_values")
        if pixels is None or (self.alike and (pixels.ndim != 4 or len(pixels) != pictures)):
            shape = None if pixels is None else list(pixels.shape)
            raise DataError(
                f"the processor makes {shape} values of {pictures} images, and one array of "
                "channels, height and width for each is needed; take its tiles away"
            )
        pixels = pixels.float()
        if not bool(pixels.isfinite().all()):
            raise DataError(
                "the processor makes pixels of an image that are not finite; correct image_mean, "
                f"image_std and rescale_factor in {PREPROCESSOR_FILE}"
            )
        counted = "image_sizes" in images  # else empty tiles are those that pad
        if pixels.ndim == 5 and not counted and not bool(pixels.flatten(2).any(-1).all()):
            raise DataError(
                "an image, or a tile of one, becomes nothing but zeros, which the model takes for "
                f"padding; correct image_mean in {PREPROCESSOR_FILE}"
            )
        return {**images, "pixel_values": pixels}

    def _check_side(self, size: tuple[int, int]) -> None:
        """Refuse a strip.

        With its shorter side resized, the other one is as much longer; and Pillow takes tens of
        bytes for each pixel of a side that it makes shorter.
        """
        images = self._made.image_processor
        to_pixels = (getattr(images, "size", None) or {}).get("shortest_edge") or 0
        if not self._by_area and to_pixels**2 * max(size) > MOST_RESIZED_PIXELS * min(size):
            raise DataError(
                f"an image of {size[0]} x {size[1]} pixels is too long to have its shorter side "
                f"resized to {to_pixels}; cut it"
            )
        if max(size) > _MOST_SIDE:
            raise DataError(
                f"an image of {size[0]} x {size[1]} pixels has a side of more than {_MOST_SIDE}; "
                "cut it, or make it smaller"
            )

    def _check_tokens(self, images: Mapping[str, Any]) -> None:
        """Refuse pictures of more patches than a text has room for, before there is such a text."""
        patch = getattr(self._made, "patch_size", None)
        if "image_grid_thw" in images:
            grids = np.asarray(images["image_grid_thw"])
            patches = int(grids.prod(-1).sum()) // self._made.image_processor.merge_size**2
            found, of = "", ""
        elif patch:
            pixels = images["pixel_values"]
            height, width = np.shape(pixels)[-2:]
            tiles = int(np.prod(np.shape(pixels)[:-3]))
            patches = (height // patch) * (width // patch) * tiles
            found, of = f" of {height} x {width} pixels", f" of {patch} x {patch}"
        else:  # as many for each image, or for each tile of it
            each = getattr(self._made, "image_seq_len", 0) or self._made.image_seq_length
            patches = int(each * np.prod(np.shape(images["pixel_values"])[:-3]))
            found, of = "", ""
        if patches > _MOST_TOKENS:
            raise DataError(
                f"its images{found} have more than {_MOST_TOKENS} patches{of}; give fewer, or "
                f"correct patch_size in {PROCESSOR_FILE}"
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


def _feature_of(made: Any, feature: str | None) -> int:
    if feature is None:
        return int(made.image_token_ids[0])
    return int(made.tokenizer.convert_tokens_to_ids(feature))


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


def _made(
    sizes: HuggingFaceConfig, tokenizer: str, check: Callable[[Mapping[str, Any]], None]
) -> Any:
    """Return the processor; `check` gets the images of a text before this is made longer."""
    from transformers.models.auto import processing_auto

    kind = sizes.config["model_type"]
    files = kept_settings(sizes.files, by_area=KINDS[kind].by_area)
    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    name = names[kind]
    files[PROCESSOR_FILE]["processor_class"] = name
    files["tokenizer_config.json"] = kept_tokens(sizes.files, files[PROCESSOR_FILE])
    files["config.json"] = {"model_type": kind}
    made = _of_images_alone(_published(name), check)
    try:
        with confined(), tempfile.TemporaryDirectory(prefix="atom-processor-") as alone:
            for file, content in files.items():
                (Path(alone) / file).write_text(json.dumps(content), encoding="utf-8")
            (Path(alone) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            found = made.from_pretrained(
                alone, local_files_only=True, trust_remote_code=False, backend="pil"
            )
    except ImportError as error:
        raise ConfigError(f"the model's processor needs more: {_one_line(error)}") from error
    except Exception as error:  # whatever a class of transformers raises
        raise ConfigError(
            f"the model's processor cannot be made ({_one_line(error)}); give {PROCESSOR_FILE} and "
            f"{PREPROCESSOR_FILE} as the model was published with"
        ) from error
    _check_sizes(found.image_processor)
    _check_joined(found)
    return found


def _published(name: str) -> Any:
    """Return a class of processors; Pixtral's is loaded without torchvision.

    Of that it needs one function, which the processor of images by Pillow has too.
    """
    from transformers.models.auto import processing_auto
    from transformers.models.pixtral import image_processing_pil_pixtral

    if name == "PixtralProcessor" and find_spec("torchvision") is None:
        sys.modules[_PIXTRAL] = image_processing_pil_pixtral
        try:
            from transformers.models.pixtral.processing_pixtral import PixtralProcessor
        finally:
            del sys.modules[_PIXTRAL]  # others shall be told what they lack
        return PixtralProcessor
    return processing_auto.processor_class_from_name(name)


def _of_images_alone(published: Any, check: Callable[[Mapping[str, Any]], None]) -> Any:
    """Return a class of processors without the part for videos, which needs more packages."""

    class OfImages(published):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            parts: list[str] = published.get_attributes()
            return [part for part in parts if part != _VIDEOS]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            found: list[Any] = super()._get_arguments_from_pretrained(*args, **kwargs)
            return found + [None] * (_VIDEOS in published.get_attributes())

        def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
            if image_idx == 0:
                check(image_inputs)
            text: str = super().replace_image_token(image_inputs, image_idx, **kwargs)
            return text

    OfImages.__name__ = published.__name__
    return OfImages


def _check_sizes(images: Any) -> None:
    """Refuse settings with which a picture becomes many times what it is."""
    size = getattr(images, "size", None) or {}
    longest = size.get("longest_edge") or 0
    tile = (getattr(images, "max_image_size", None) or {}).get("longest_edge")
    copies, patch, merged = (
        max((side or 1 for side in found.values()), default=1)
        if isinstance(found, Mapping)
        else found
        for found in (
            getattr(images, name, None) or 1
            for name in ("temporal_patch_size", "patch_size", "merge_size")
        )
    )  # a side is of merged patches, one at least
    most = max(longest, size.get("shortest_edge") or 0, (patch * merged) ** 2) * copies
    if (tile is not None and longest > _MOST_TILES * tile) or most > 2 * MOST_RESIZED_PIXELS:
        raise ConfigError(
            f"the model's processor makes images of {max(longest, most // copies)} pixels "
            f"({copies} copies, tiles of {tile}), which is too much; correct size, patch_size and "
            f"merge_size in {PREPROCESSOR_FILE}"
        )
    _check_tiles(images, size)
    if tile is not None and not images.do_resize:
        raise ConfigError(
            f"the model's processor cuts images of any size into tiles (do_resize is false); set "
            f"it to true in {PREPROCESSOR_FILE}"
        )
    if getattr(images, "do_pan_and_scan", False):
        raise ConfigError(
            f"the model's processor cuts images (do_pan_and_scan), which is not done here; set it "
            f"to false in {PREPROCESSOR_FILE}"
        )


def _check_joined(made: Any) -> None:
    """Refuse to make pictures larger, to a multiple of patches that are joined later (Pixtral)."""
    patch, joined = (
        getattr(made, name, None) or 1 for name in ("patch_size", "spatial_merge_size")
    )
    if not isinstance(patch, int) or (patch * joined) ** 2 > 2 * MOST_RESIZED_PIXELS:
        raise ConfigError(
            f"the model's processor joins {joined} x {joined} patches of {patch}, which is too "
            f"much; correct patch_size and spatial_merge_size in {PROCESSOR_FILE}"
        )


def _check_tiles(images: Any, size: Mapping[str, Any]) -> None:
    """Refuse to cut a picture into very many tiles, or into some that are large together."""
    crop = getattr(images, "crop_size", None) or {}
    side = crop.get("height") or size.get("height") or size.get("shortest_edge") or 1
    grids = [math.prod(grid) for grid in getattr(images, "image_grid_pinpoints", None) or []]
    most = max(getattr(images, "max_patches", None) or 1, -(-max(grids, default=1) // side**2))
    if most > _MOST_TILES**2 or (most > 1 and most * side**2 > MOST_RESIZED_PIXELS):
        raise ConfigError(
            f"the model's processor makes up to {most} tiles of {side} x {side} pixels of an "
            "image, which is too much; correct max_patches, image_grid_pinpoints and size in "
            f"{PREPROCESSOR_FILE}"
        )


def _refused(error: Exception) -> DataError:
    return DataError(f"the model's processor refuses it ({_one_line(error)})")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

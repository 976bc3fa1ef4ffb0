"""Micro-batches with images that a plan is made with: those of data, or a picture that is assumed.

Where a model's own code reads images their data decide what it does, so they are really made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.data.sampler import Batch, Images
from atomtrain.data.tokenizer import read_tokenizer
from atomtrain.errors import ConfigError, DataError
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.processor import Processor, Seen

_SIDES = (1024, 724, 512, 362, 256, 181, 128, 64, 32)
"""Of a square picture, in pixels, the largest first: a usual photo, and then half its area."""


class Pictured(NamedTuple):
    """Micro-batches with images."""

    batch: Callable[[int], Batch]
    """Makes one of so many sequences."""
    said: str
    """What images it has, for people."""

    def example(self, sequences: int) -> dict[str, Tensor]:
        """Return a micro-batch as the model's forward takes it, with labels."""
        batch = self.batch(sequences)
        assert batch.images is not None
        return {
            "input_ids": batch.inputs,
            "labels": batch.labels,
            **batch.images.together(),
        }


def assumed_picture(sizes: HuggingFaceConfig, folder: Path, context: int) -> Pictured:
    """Return sequences with one picture each, as large as there is room for, up to a usual photo.

    Args:
        sizes: The model.
        folder: With its tokenizer.
        context: Tokens of a sequence.

    Raises:
        ConfigError: the model has no processor, or the smallest picture has more tokens.
        DataError: it has no tokenizer.
    """
    processor = Processor(sizes, read_tokenizer(folder).to_json())
    for side in _SIDES:
        seen = _seen(processor, side)
        if seen is not None and len(seen.tokens) <= context:
            said = f"one of {side} x {side} pixels in each sequence; --data counts those of data"
            return Pictured(functools.partial(_batch, processor, seen, context), said)
    raise ConfigError(
        f"a picture of {_SIDES[-1]} x {_SIDES[-1]} pixels has more than {context} tokens; raise "
        "--context"
    )


def _seen(processor: Processor, side: int) -> Seen | None:
    """Return a picture as the model takes it, `None` if it has too many tokens for any text."""
    from PIL import Image

    try:
        return processor.read(processor.image_token, [Image.new("RGB", (side, side), "white")])
    except DataError:
        return None


def _batch(processor: Processor, seen: Seen, context: int, count: int) -> Batch:
    padding = int(processor.image_number == 0)  # any token that stands for no image
    tokens = [*seen.tokens, *[padding] * (context - len(seen.tokens))]
    inputs = torch.tensor([tokens] * count)
    rows = [dict(seen.images) for _ in range(count)]
    if processor.types is not None:
        types = (inputs == processor.image_number).long().split(1)
        rows = [{**row, processor.types: own} for row, own in zip(rows, types, strict=True)]
    return Batch(inputs, inputs, images=Images(rows))

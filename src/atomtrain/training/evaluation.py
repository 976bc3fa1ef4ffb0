"""Held-out loss of a trained model that is resident on the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atomtrain.checkpoint import open_checkpoint
from atomtrain.data import Batch
from atomtrain.data.examples import IGNORED
from atomtrain.models.hugging_face import CONFIG_FILE, read_config
from atomtrain.training.texts import read_text
from atomtrain.training.trained import open_trained

_USUAL_CONTEXT = 1024
_MOST_LOSS = 700.0


class Evaluation(NamedTuple):
    """How well a model predicts what was held out."""

    loss: float
    """Mean over targets, nats."""
    perplexity: float
    bits_per_byte: float
    """Of the text that was to be predicted."""
    targets: int
    sequences: int
    context: int


def evaluate(
    path: Path, data: str | None, context: int | None = None, sequences: int = 64
) -> Evaluation:
    """Return the held-out loss of a checkpoint's model, or of a Hugging Face folder's.

    Args:
        path: As `open_trained` takes it.
        data: As the user named it; `None` is what the checkpoint was trained on, or the
            demonstration corpus.
        context: Tokens of a sequence; `None` is the run's, or 1024 and at most the model's.
        sequences: At most so many.

    Raises:
        AtomError: model or data cannot be read.
    """
    trained = open_trained(path)
    recipe, packed = trained.recipe, False
    if recipe is not None:
        sizes, packed = recipe.sizes, recipe.packed
        context = context or recipe.context
        data = data or open_checkpoint(path).meta.get("data")
    else:
        assert (path / CONFIG_FILE).is_file()
        sizes = read_config(path)
        context = context or min(_USUAL_CONTEXT, trained.context)
    text = read_text(data, sizes, trained.tokenizer, packed=packed)
    total, targets, count = 0.0, 0, 0
    for batch in text.material.held_out(context, 1, sequences):
        loss, counted = _summed(trained.model, batch)
        total, targets, count = total + loss, targets + counted, count + len(batch.inputs)
    loss = total / max(1, targets)
    return Evaluation(
        loss,
        math.exp(min(loss, _MOST_LOSS)),
        text.material.bits_per_byte(context, loss),
        targets,
        count,
        context,
    )


def _summed(model: Any, batch: Batch) -> tuple[float, int]:
    """Return the sum of the losses of a batch's targets, and their number."""
    labels = batch.labels.flatten()
    with torch.no_grad():
        logits = model(batch.inputs).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((labels != IGNORED).sum())

"""Held-out loss of a trained model that is resident on the CPU."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atomtrain.checkpoint import open_checkpoint
from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch, joined
from atomtrain.errors import ConfigError
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.progress import each
from atomtrain.training.config.recipe import PREFERENCES
from atomtrain.training.setup.objective import MicroBatch, NextToken, OwnLoss, rows_heard
from atomtrain.training.setup.objectives import (
    Classification,
    Matching,
    PreferredAnswer,
    RewardModel,
    preference_of,
)
from atomtrain.training.setup.state import Trained, data_of, open_trained
from atomtrain.training.setup.texts import Learns, Text, has_pairs, read_text

_log = logging.getLogger("atomtrain.training")
_USUAL_CONTEXT = 1024
_MOST_LOSS = 700.0
_WHAT = "evaluating"
_AMONG = 32
"""Texts among which a query looks for its own, where there are so many."""


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


class PairEvaluation(NamedTuple):
    """How well a model prefers the better of two held-out answers."""

    loss: float
    """Mean over pairs, nats; see `atomtrain.training.setup.objectives`."""
    reward_accuracy: float
    reward_margin: float | None
    """`None` of judged answers that are all good, or none of them."""
    pairs: int
    context: int


class ClassEvaluation(NamedTuple):
    """How well a model tells of which class held-out texts are."""

    loss: float
    """Mean over texts, nats."""
    accuracy: float
    """Share of texts."""
    texts: int
    context: int


class MatchEvaluation(NamedTuple):
    """How well queries find their texts among those of a batch."""

    loss: float
    """Mean over queries, nats."""
    accuracy: float
    """Share of queries."""
    queries: int
    among: int
    """Texts of a batch."""
    context: int


def evaluate(
    path: Path, data: str | None, context: int | None = None, sequences: int = 64
) -> Evaluation | PairEvaluation | ClassEvaluation | MatchEvaluation:
    """Return the held-out loss of a checkpoint's model, or of a Hugging Face folder's.

    Pairs of answers are judged as in training, beside the model that the run began with.
    Classifiers tell classes, and models without a head give embeddings.

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
    recipe, sizes, packed = trained.recipe, trained.sizes, False
    named: tuple[str, ...] = (data,) if data else ()
    validation: str | None = None
    if recipe is not None:
        packed = recipe.packed
        context = context or recipe.context
        if not named:
            named, validation = data_of(open_checkpoint(path))
    else:
        context = context or min(_USUAL_CONTEXT, trained.context)
    labels = getattr(sizes, "labels", None)
    if labels is not None and len(labels) > 1:
        return _classified(trained, named, validation, context, sequences)
    if getattr(sizes, "embeds", False):
        return _matched(trained, named, validation, context, sequences)
    judges = labels is not None or (recipe is not None and recipe.learns == "labels")
    if judges or has_pairs(named):
        return _judged(path, trained, named, validation, context, sequences)
    text = _read(trained, named, validation, packed=packed)
    objective = NextToken() if isinstance(sizes, HuggingFaceConfig) else OwnLoss()
    total, targets, count = 0.0, 0, 0
    batches = counted_unless_large(text.material.held_out(context, 1, sequences))
    for batch in each(_WHAT, batches, "sequences"):
        loss, counted = _summed(trained.model, objective.inputs(batch), batch)
        total, targets, count = total + loss, targets + counted, count + len(batch.inputs)
    loss = total / max(1, targets)
    bits = text.material.bits_per_byte(context, loss)
    assert bits is not None
    perplexity = math.exp(min(loss, _MOST_LOSS))
    return Evaluation(loss, perplexity, bits, targets, count, context)


def counted_unless_large(batches: Iterator[Batch]) -> Iterable[Batch]:
    """Return batches as a list; but those with images, which are large, one after the other."""
    first = list(itertools.islice(batches, 1))
    if first and first[0].images is not None:
        return itertools.chain(first, batches)
    return [*first, *batches]


def _read(
    trained: Trained,
    data: Sequence[str],
    validation: str | None,
    *,
    learns: Learns = "answers",
    packed: bool = False,
) -> Text:
    """Read what a model is to be tried on, and say which rows are skipped."""
    text = read_text(
        data, trained.sizes, trained.tokenizer, packed=packed, learns=learns, validation=validation
    )
    if text.skipped is not None:
        _log.warning(text.skipped)
    return text


def _classified(
    trained: Trained, data: Sequence[str], validation: str | None, context: int, sequences: int
) -> ClassEvaluation:
    text = _read(trained, data, validation, learns="classes")
    objective, losses, found = Classification(), [], []
    with torch.no_grad(), objective.listening() as heard:
        batches = list(text.material.held_out(context, 1, sequences))
        for batch in each(_WHAT, batches, "texts"):
            [micro_batch] = objective.micro_batches(batch, 1)
            losses.append(float(objective.loss(trained.model(batch.inputs), micro_batch)))
            found.append(micro_batch)
    accuracy = objective.numbers(heard, found)["accuracy"]
    return ClassEvaluation(sum(losses) / len(losses), accuracy, len(losses), context)


def _matched(
    trained: Trained, data: Sequence[str], validation: str | None, context: int, sequences: int
) -> MatchEvaluation:
    text = _read(trained, data, validation, learns="matches")
    objective, losses, found = Matching(), [], []
    with torch.no_grad(), objective.listening() as heard:
        pairs = list(text.material.held_out(context, 2, max(1, sequences // 2)))
        among = min(_AMONG, len(pairs))
        starts = range(0, len(pairs) - among + 1, among)  # among fewer it would be easier
        batches = [joined(pairs[start : start + among]) for start in starts]
        for batch in each(_WHAT, batches, "batches"):
            [micro_batch] = objective.micro_batches(batch, len(batch.inputs))
            losses.append(float(objective.loss(trained.model(**micro_batch), micro_batch)))
            found.append(micro_batch)
    accuracy = objective.numbers(heard, found)["accuracy"]
    mean = sum(losses) / len(losses)
    return MatchEvaluation(mean, accuracy, among * len(batches), among, context)


def _judged(
    path: Path,
    trained: Trained,
    data: Sequence[str],
    validation: str | None,
    context: int,
    sequences: int,
) -> PairEvaluation:
    recipe = trained.recipe
    objective: PreferredAnswer = RewardModel()
    learns: Learns = "pairs"
    if recipe is not None and recipe.in_pairs:
        objective, learns = preference_of(recipe), recipe.learns
    elif getattr(trained.sizes, "labels", None) is None:
        raise ConfigError(
            f"{', '.join(data)} has pairs of answers, which only a run with --objective "
            f"{' or '.join((*PREFERENCES, 'reward'))} can judge; {path} is not one: name other "
            "--data"
        )
    text = _read(trained, data, validation, learns=learns)
    batches = list(text.material.held_out(context, 2, max(1, sequences // 2)))
    said = _said(objective, trained.model, batches)
    reference = None
    if recipe is not None and recipe.has_reference:
        reference = _said(objective, _began_with(path), batches)
    loss, numbers = objective.judged(said, joined(batches)._replace(reference=reference))
    return PairEvaluation(
        loss, numbers["reward_accuracy"], numbers.get("reward_margin"), len(said) // 2, context
    )


def _began_with(path: Path) -> Any:
    """Return the model that a checkpoint's run began with."""
    folder = Path(str(open_checkpoint(path).meta.get("model_folder")))
    if not folder.is_dir():
        raise ConfigError(
            f"the run of {path} began with the model in {folder}, which is not there any more; "
            "put it there again"
        )
    return open_trained(folder).model


def _said(objective: PreferredAnswer, model: Any, batches: list[Batch]) -> torch.Tensor:
    """Return `[2 * batches]`: what the objective hears of each answer."""
    with torch.no_grad(), objective.listening() as heard:
        for batch in each(_WHAT, batches, "pairs"):
            [micro_batch] = objective.micro_batches(batch, len(batch.inputs))
            objective.loss(model(batch.inputs), micro_batch)
    return rows_heard(heard)


def _summed(model: Any, inputs: MicroBatch, batch: Batch) -> tuple[float, int]:
    """Return the sum of the losses of a batch's targets, and their number."""
    labels = batch.labels.flatten()
    with torch.no_grad():
        logits = model(**inputs).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((labels != IGNORED).sum())

"""How many targets micro-batches have, by which `Trainer` weights their losses.

`transformers.Trainer` gives a model the number of a step's targets, and the model divides by it the
sum of its targets' losses. Here models return the means that they return without that number, and
the engine weights them: the same loss, but for its rounding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from atomtrain.data.examples import IGNORED

_MEANS = {"ForCausalLMLoss": 1, "ForMaskedLMLoss": 0, "ForTokenClassification": 0}
"""Losses of `transformers` that are means over targets, with the place of a row's first one."""


def first_target(model: nn.Module) -> int | None:
    """Return the place of a row's first target among its labels, if a model's loss is the mean over
    targets and its micro-batches are weighted; `None` if they count alike."""
    inside = inside_of(model)
    known = sys.modules.get("transformers.loss.loss_utils")  # there where such a model is
    kind = getattr(inside, "loss_type", None)
    if known is None or kind not in known.LOSS_MAPPING or not _takes_number(inside):
        return None
    place = _MEANS.get(known.LOSS_MAPPING[kind].__name__)
    # Who decodes what an encoder has read predicts the first label, too.
    return 0 if place and getattr(inside.config, "is_encoder_decoder", False) else place


def targets_in(batches: Sequence[Any], first: int | None) -> list[int] | None:
    """Return how many targets each micro-batch has; `None` if none has any, or they count alike.

    Args:
        batches: Mappings with `labels`, shaped (samples, places); others count alike.
        first: As of `first_target`.
    """
    if first is None or not all(isinstance(_labels_of(batch), Tensor) for batch in batches):
        return None
    counts = [int((_labels_of(batch)[..., first:] != IGNORED).sum()) for batch in batches]
    return counts if any(counts) else None


def inside_of(model: nn.Module) -> Any:
    """Return the model that `peft` has wrapped; any other one as it is."""
    inside = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def _labels_of(batch: Any) -> Any:
    return batch.get("labels") if isinstance(batch, Mapping) else None


def _takes_number(model: Any) -> bool:
    """Return whether `transformers.Trainer` gives a model the number of a step's targets."""
    said = getattr(model, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    taken = inspect.signature(model.forward).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)

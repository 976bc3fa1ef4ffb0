"""Samples of a data set become micro-batches of `Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError


def stacked(samples: list[Any]) -> Any:
    """Return a micro-batch of samples: tensors stacked, mappings and tuples entry by entry.

    Raises:
        ConfigError: an entry is no tensor and no numbers, or has not the same shape in all samples.
    """
    return _stacked(samples, "samples")


def only(sample: Any, names: frozenset[str]) -> Any:
    """Return the entries of a mapping that have one of these names; anything else as it is."""
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in names}


def tokens_in(batches: Iterable[Any]) -> int | None:
    """Return how many tokens micro-batches have, padding not counted; `None` without any.

    Args:
        batches: Mappings with `input_ids`, shaped (samples, context), and perhaps an
            `attention_mask` of that shape, in which padding is 0; others have no tokens.
    """
    tokens = 0
    for batch in batches:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return None
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            tokens += int(mask.count_nonzero())
        else:
            tokens += ids.numel()
    return tokens


def names_in_forward(model: nn.Module) -> frozenset[str]:
    """Return the names of what a model's forward takes; of a wrapped one, what its inside takes."""
    inside = getattr(model, "get_base_model", None)  # peft's own forward takes anything
    forward = inside().forward if inside is not None else model.forward
    return frozenset(inspect.signature(forward).parameters)


def _stacked(samples: list[Any], what: str) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {
            name: _stacked([sample[name] for sample in samples], f"{what}[{name!r}]")
            for name in first
        }
    if isinstance(first, tuple | list) and first and isinstance(first[0], Tensor):
        return tuple(
            _stacked([sample[i] for sample in samples], f"{what}[{i}]") for i in range(len(first))
        )
    try:
        return torch.stack([torch.as_tensor(sample) for sample in samples])
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{what} cannot become one tensor ({reason}); leave out what the model does not take, "
            "pad or cut the rest to one length, or give Trainer a data_collator"
        ) from error

"""Noise on a model's embeddings while it is trained: NEFTune (Jain et al. 2023, arXiv 2310.05914).

To the embeddings of a sequence of T tokens, D wide, numbers drawn evenly from `-m` to `m` are
added, with `m = alpha / sqrt(T D)`. They are drawn as dropout draws: from the default generator, in
training only. So they are those of the run's seed, position, step and micro-batch, whatever the
partition, and recomputing repeats them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError

_ALPHA = "neftune_noise_alpha"


class _Noisy(nn.Module):
    """Goes before a class of embeddings: `[B, T]` ids to `[B, T, D]`."""

    neftune_noise_alpha: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        embedded: Tensor = super().forward(*args, **kwargs)
        if not self.training:
            return embedded
        most = self.neftune_noise_alpha / math.sqrt(math.prod(embedded.shape[-2:]))
        return embedded + torch.zeros_like(embedded).uniform_(-most, most)


@functools.cache
def _noisy_class(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Noisy{base.__name__}", (_Noisy, base), {})


def with_noise(model: nn.Module, alpha: float) -> nn.Module:
    """Let a model's embedding of tokens add noise in training, in place; return the model.

    Args:
        model: With `get_input_embeddings`, as GPT and Hugging Face's models have it.
        alpha: Usually 5 to 15; 0 takes the noise away again.

    Raises:
        ConfigError: the model does not say which its embedding is.
    """
    find = getattr(model, "get_input_embeddings", None)
    try:
        embedding: Any = None if find is None else find()
    except NotImplementedError:  # as transformers says it of images and sounds
        embedding = None
    if isinstance(embedding, _Noisy):
        embedding.__class__ = type(embedding).__bases__[1]
        delattr(embedding, _ALPHA)
    if not alpha:
        return model
    if not isinstance(embedding, nn.Module):
        raise ConfigError(
            f"neftune_noise_alpha={alpha:g} adds noise to the embedding of tokens, and "
            f"{type(model).__name__} does not say which that is; give it get_input_embeddings(), "
            "or leave neftune_noise_alpha out"
        )
    kind: Any = type(embedding)
    embedding.__class__ = _noisy_class(kind)
    setattr(embedding, _ALPHA, float(alpha))
    return model

"""Text from a model that is resident where its parameters are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from atomtrain.models.gpt import GPT


def sample(
    model: GPT, prompt: Tensor, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    """Yield sampled tokens without end.

    Args:
        model: In evaluation mode.
        prompt: `[T]` int64, at least one token.
        temperature: 0 takes the likeliest token.
        generator: On the parameters' device.
    """
    ids = prompt[None]  # [1, T]
    while True:
        with torch.no_grad():
            last = model(ids[:, -model.config.context :]).logits[:, -1]
        if temperature == 0:
            token = last.argmax(-1, keepdim=True)
        else:
            weights = torch.softmax(last / temperature, -1)
            token = torch.multinomial(weights, 1, generator=generator)
        yield int(token)
        ids = torch.cat([ids, token], 1)

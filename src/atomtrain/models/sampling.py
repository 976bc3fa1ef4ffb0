"""Text from a model that is resident where its parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import DataError
from atomtrain.models.gpt import GPT, Past


def sample(
    model: nn.Module,
    prompt: Tensor,
    temperature: float,
    generator: torch.Generator,
    context: int,
) -> Iterator[int]:
    """Yield sampled tokens without end.

    Args:
        model: In evaluation mode; its output has `logits`.
        prompt: `[T]` int64, at least one token.
        temperature: 0 takes the likeliest token.
        generator: On the parameters' device.
        context: How many tokens the model looks back at most.

    Raises:
        DataError: what the model gives is not a number.
    """
    ids = prompt[None]  # [1, T]
    predict = _Predictor(model, context)
    while True:
        last = predict(ids)
        if not bool(last.isfinite().any()) or bool(last.isnan().any()):
            raise DataError(
                "the model's output is not a number; its weights are damaged: give another "
                "checkpoint, or a whole copy of the model"
            )
        if temperature == 0:
            token = last.argmax(-1, keepdim=True)
        else:
            weights = torch.softmax(last / temperature, -1)
            token = torch.multinomial(weights, 1, generator=generator)
        yield int(token)
        ids = torch.cat([ids, token], 1)


class _Predictor:
    """Gives the logits after growing sequences; what was computed is kept where the model can."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self._model, self._context = model, context
        self._theirs = "past_key_values" in inspect.signature(model.forward).parameters
        self._cache: Any = None
        self._past: list[Past] = []
        self._done = 0

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Return `[1, V]`, the logits after `[1, T]` ids, a token more than the time before."""
        keeps = self._theirs or isinstance(self._model, GPT)
        if not keeps or ids.shape[1] > self._context:
            # Positions shift from there on, so nothing that was kept is of use.
            last: Tensor = self._model(ids[:, -self._context :]).logits[:, -1]
            return last
        new, self._done = ids[:, self._done :], ids.shape[1]
        if isinstance(self._model, GPT):
            return self._model.continued(new, self._past)
        out = self._model(input_ids=new, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        last = out.logits[:, -1]
        return last

"""Logits after growing sequences; what was computed of earlier tokens is kept where a model can.

Prompts of unlike length are padded on the left: all end at one column, and what stands before a
prompt is masked. Positions count from each prompt's own first token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError

_CACHE_NAMES = ("cache", "past_key_values")
"""Of the argument and of the output: since `transformers` 5.24, and before."""
_CONTEXT_KEYS = ("context", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def context_of(model: nn.Module) -> int | None:
    """Return the tokens of the longest sequence that a model was made for, if it says so."""
    return _number_of(model, _CONTEXT_KEYS)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return how many tokens a model knows, if it says so."""
    return _number_of(model, ("vocabulary", "vocab_size"))


def _number_of(model: nn.Module, keys: Sequence[str]) -> int | None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    found = (getattr(config, key, None) for key in keys)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def require_language_model(model: nn.Module) -> None:
    """Refuse a model that does not take token ids.

    Raises:
        ConfigError: its forward has no `input_ids`.
    """
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{type(model).__name__} is not a language model: its forward has no input_ids; "
            "generate with a GPT or a causal language model of Hugging Face"
        )


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return prompts side by side, `[B, T]` int64, and the columns to leave out before each, `[B]`.

    The latter is `None` if they are of one length.
    """
    longest = max(len(prompt) for prompt in prompts)
    missing = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * gap + list(prompt) for gap, prompt in zip(missing, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(missing) if any(missing) else None


class Predictor:
    """Gives the logits behind the last token of sequences that grow by one token a call."""

    def __init__(self, model: nn.Module, context: int | None, device: torch.device) -> None:
        """`model` in evaluation mode looks back `context` tokens at most; ids go to `device`."""
        self._model, self._context, self._device = model, context, device
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._own = hasattr(model, "continued")
        self._cache_name = next((name for name in _CACHE_NAMES if name in self._takes), None)
        self._cache: Any = None
        self._past: list[Any] = []
        self._done = 0

    @property
    def pads(self) -> bool:
        """Whether prompts of unlike length can stand side by side."""
        return self._own or "attention_mask" in self._takes

    @torch.no_grad()
    def __call__(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return `[B, V]`, the logits after `[B, T]` ids on the host.

        `padding`: columns to leave out before each sequence, `[B]`; `None`: none.

        Raises:
            ConfigError: the model's output has no logits.
        """
        length = ids.shape[1]
        keeps = self._own or self._cache_name is not None
        if keeps and (self._context is None or length <= self._context):
            new, self._done = ids[:, self._done :], length
            return self._asked(new, length, padding, keeps=True)
        # Positions shift from there on, so nothing that was kept is of use.
        self._cache, self._past = None, []
        window = length if self._context is None else min(length, self._context)
        if padding is not None:
            padding = (padding - (length - window)).clamp(min=0)
        return self._asked(ids[:, length - window :], window, padding, keeps=False)

    def _asked(self, new: Tensor, length: int, padding: Tensor | None, *, keeps: bool) -> Tensor:
        """Return the logits behind `new`, the last of `length` columns."""
        ids = new.to(self._device)
        before = None if padding is None else padding.to(self._device)
        if self._own:
            model: Any = self._model
            found: Tensor = model.continued(ids, self._past if keeps else [], before)
            return found
        given: dict[str, Any] = {"input_ids": ids}
        if keeps and self._cache_name is not None:
            given.update({self._cache_name: self._cache, "use_cache": True})
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        if before is not None:
            mask = (torch.arange(length, device=self._device) >= before[:, None]).long()
            given["attention_mask"] = mask
            if "position_ids" in self._takes:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                given["position_ids"] = positions[:, length - ids.shape[1] :]
        out = self._model(**given)
        if getattr(out, "logits", None) is None:
            raise ConfigError(
                f"{type(self._model).__name__} is not a language model: its output has no logits; "
                "generate with a GPT or a causal language model of Hugging Face"
            )
        if keeps:
            kept = (getattr(out, name, None) for name in _CACHE_NAMES)
            self._cache = next((cache for cache in kept if cache is not None), None)
            if self._cache is None:
                self._done = 0  # it kept nothing, so the next call begins anew
        last: Tensor = out.logits[:, -1]
        return last

"""Sizes of a GPT; needs no torch, so that names and numbers can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from atomtrain.errors import ConfigError

_MOST = 1 << 31
_MOST_LAYERS = 4096
"""More would take hours to look at; the deepest models have some hundreds."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT."""

    layers: int
    """Number of blocks."""
    width: int
    """Size of the hidden state."""
    heads: int
    head_width: int
    """Size of each attention head; `heads * head_width` need not equal `width`."""
    vocabulary: int = 50257
    context: int = 2048
    """Longest sequence in tokens."""
    dropout: float = 0.0
    """Probability, after the embedding, the attention and the MLP."""
    head_pieces: int = 1
    """In how many pieces of the vocabulary the loss is computed. More need less memory and a third
    more arithmetic in the head; the result differs in its last bits."""

    def __post_init__(self) -> None:
        for name in (
            "layers", "width", "heads", "head_width", "vocabulary", "context", "head_pieces",
        ):  # fmt: skip
            number = getattr(self, name)
            if not isinstance(number, int) or not 1 <= number <= _MOST:
                raise ConfigError(f"{name} must be a whole number from 1 to {_MOST}, not {number}")
        if self.layers > _MOST_LAYERS:
            raise ConfigError(f"layers must be at most {_MOST_LAYERS}, not {self.layers}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.head_pieces > self.vocabulary:
            raise ConfigError(
                f"head_pieces must be at most the vocabulary of {self.vocabulary}, not "
                f"{self.head_pieces}"
            )

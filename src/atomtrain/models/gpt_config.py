"""Sizes of a GPT; needs no torch, so that names and numbers can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from atomtrain.errors import ConfigError


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
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.head_pieces > self.vocabulary:
            raise ConfigError(
                f"head_pieces must be at most the vocabulary of {self.vocabulary}, not "
                f"{self.head_pieces}"
            )

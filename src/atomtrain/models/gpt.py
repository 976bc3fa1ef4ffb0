"""The GPT-3 architecture: a decoder with learned positions, pre-normalisation and a tied head.

Source: Brown et al. 2020, section 2.1 (which refers to GPT-2); dense attention in every layer.

Documents that share a sequence do not see each other: *documents* are `[B, T]` integers, the same
number for all positions of one document, which lies in one piece.

Shapes: B sequences, T tokens, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis.head.lazy_logits import LazyLogits
from atomtrain.analysis.head.pieces import linear_cross_entropy
from atomtrain.analysis.layers.chain import Layer
from atomtrain.errors import ConfigError
from atomtrain.models.gpt_config import GPTConfig


def places(documents: Tensor) -> Tensor:
    """Return the place of each position within its document, `[B, T]` int64, from 0."""
    index = torch.arange(documents.shape[-1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(begins, index, 0).cummax(-1).values
    return index - starts


def own_past(documents: Tensor) -> Tensor:
    """Return what each position may see, `[B, 1, T, T]` bool: its document up to itself."""
    length = documents.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & causal


class GPTOutput(NamedTuple):
    """What `GPT.forward` returns; `loss` is the mean in nats per token, with labels only."""

    loss: Tensor | None
    logits: Tensor | None


class Past:
    """What a block keeps of the tokens that it has seen, to go on from there."""

    def __init__(self) -> None:
        self.key: Tensor | None = None  # [B, H, T, K]
        self.value: Tensor | None = None  # [B, H, T, K]
        self.seen: Tensor | None = None
        """`[B, 1, T, all]` bool, what the new tokens look at; `None`: all before and themselves."""

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        self.key, self.value = key, value
        return key, value


class Embedding(nn.Module):
    """Token and position embedding: `[B, T]` token ids to `[B, T, D]`."""

    fixed_operations = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        length = input_ids.shape[-1]
        if length > self.position.num_embeddings:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than the model's context of "
                f"{self.position.num_embeddings}; cut it, or build the model with a larger context"
            )
        if documents is None:
            positions = self.position.weight[:length]
        else:
            positions = self.position(places(documents))
        embedded: Tensor = self.dropout(self.token(input_ids) + positions)
        return embedded


class Block(nn.Module):
    """Attention and MLP, each behind a normalisation and added to the stream: `[B, T, D]`."""

    fixed_operations = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads, self.head_width = config.heads, config.head_width
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.attention_out = nn.Linear(inner, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, documents: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        if past is not None:
            return self._continued(hidden, past)
        attended = self._attention(self.attention_norm(hidden), documents)
        hidden = hidden + self.dropout(attended)
        mlp = self._mlp(hidden)
        out: Tensor = hidden + self.dropout(mlp)
        return out

    def _continued(self, hidden: Tensor, past: Past) -> Tensor:
        """Run in evaluation on the first tokens, or on a single one behind `past`."""
        query, key, value = self._projected(self.attention_norm(hidden))
        first = past.length == 0 and past.seen is None
        key, value = past.extended(key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=past.seen, is_causal=first
        )
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return hidden + self._mlp(hidden)

    def _mlp(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden)), approximate="tanh"))
        return out

    def _projected(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each `[B, H, T, K]`."""
        batch, length, _ = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, self.head_width)
        found: tuple[Tensor, ...] = qkv.permute(2, 0, 3, 1, 4).unbind()
        return found

    def _attention(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = self._projected(hidden)
        if documents is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # Made anew by each layer: it would be the largest value to hand on.
            seen = own_past(documents)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Head(nn.Module):
    """Final normalisation and tied projection: `[B, T, D]` to the loss, or to logits."""

    def __init__(self, config: GPTConfig, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.weight = weight
        self.pieces = config.head_pieces

    def in_pieces(self, pieces: int) -> Head:
        """Return the same head, on the same parameters, with its loss computed in pieces."""
        head = copy.copy(self)
        head.pieces = pieces
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[B, T, V]`."""
        logits: Tensor = F.linear(self.norm(hidden), self.weight)
        return logits

    def lazy_logits(self, hidden: Tensor) -> LazyLogits:
        """Return what stands for `[B, T, V]` until a loss takes its cross-entropy in pieces."""
        return LazyLogits(self.norm(hidden), self.weight, None, self.pieces, hidden.dtype)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if self.pieces > 1:
            rows = self.norm(hidden).flatten(0, 1)
            return linear_cross_entropy(
                rows, self.weight, None, labels.flatten(), pieces=self.pieces
            )
        # Losses are float32 whatever the model is: bfloat16 tells 5.53 from 5.56, nothing between.
        return F.cross_entropy(self.logits(hidden).flatten(0, 1).float(), labels.flatten())


class _OutputHead(nn.Module):
    """The head with everything that the model returns."""

    def __init__(self, head: Head, lazy: bool = False) -> None:
        super().__init__()
        self.head, self._lazy = head, lazy

    def with_lazy_logits(self, pieces: int) -> _OutputHead:
        """Return the same head with logits that wait for a loss."""
        return _OutputHead(self.head.in_pieces(pieces), lazy=True)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> GPTOutput:
        loss = None if labels is None else self.head(hidden, labels)
        logits: Any = self.head.lazy_logits(hidden) if self._lazy else self.head.logits(hidden)
        return GPTOutput(loss, logits)


class GPT(nn.Module):
    """A GPT language model; `chain_layers` gives it to the engine as a chain."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config, nn.Parameter(torch.empty(0)))
        self.tie()
        self.reset_parameters()

    def tie(self) -> None:
        """Make the head's weight the embedding's: one storage with two users."""
        weight = self.embedding.token.weight
        assert isinstance(weight, nn.Parameter)
        self.head.weight = weight

    def reset_parameters(self) -> None:
        """Draw weights as GPT-2 does: normal 0.02, residual projections scaled by depth."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=residual_std if residual else 0.02)
            elif "norm.weight" not in name:
                nn.init.zeros_(parameter)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens, as Hugging Face's models do."""
        return self.embedding.token

    def chain_layers(self) -> list[Layer]:
        return self.layers_given(())

    def layers_given(self, given: Sequence[str]) -> list[Layer]:
        """Return embedding, blocks and head; with `documents` if micro-batches have them."""
        documents = ("documents",) if "documents" in given else ()
        layers = [Layer("embedding", self.embedding, ("input_ids", *documents), ("hidden0",))]
        for index, block in enumerate(self.blocks):
            reads, writes = (f"hidden{index}", *documents), (f"hidden{index + 1}",)
            layers.append(Layer(f"blocks.{index}", block, reads, writes))
        last = f"hidden{len(self.blocks)}"
        return [*layers, Layer("head", self.head, (last, "labels"), ("loss",))]

    def output_layers(self, given: Sequence[str]) -> list[Layer]:
        """Return the layers up to `GPTOutput`, for a loss of the caller's own."""
        *body, head = self.layers_given(given)
        reads = (head.reads[0], *(name for name in ("labels",) if name in given))
        return [*body, Layer("head", _OutputHead(self.head), reads, ("output",))]

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> GPTOutput:
        """Return the loss if labels are given, else the logits.

        Args:
            input_ids: `[B, T]` int64, `T` at most the context.
            labels: `[B, T]` int64, the next token at each position.
            documents: `[B, T]` integers, the document of each position,
                where those of a sequence must not see each other; `None`: they do.
        """
        hidden = self.embedding(input_ids, documents)
        for block in self.blocks:
            hidden = block(hidden, documents)
        if labels is not None:
            return GPTOutput(self.head(hidden, labels), None)
        return GPTOutput(None, self.head.logits(hidden))

    def continued(
        self, input_ids: Tensor, past: list[Past], padding: Tensor | None = None
    ) -> Tensor:
        """Return `[B, V]`, the logits behind the last token; to generate, in evaluation mode.

        Args:
            input_ids: `[B, T]` int64, the first tokens; behind `past` a single one.
            past: What the blocks have kept so far, brought up to date; empty: nothing.
            padding: `[B]`, columns to leave out before each sequence; `None`: none.
        """
        if not past:
            past.extend(Past() for _ in self.blocks)
        length, seen = past[0].length, None
        stop = length + input_ids.shape[1]
        if padding is None:
            positions = self.embedding.position.weight[length:stop]
        else:
            columns = torch.arange(stop, device=input_ids.device)
            rows = columns[length:]
            mine = (columns >= padding[:, None, None]) & (columns <= rows[:, None])
            # What is left out sees itself: of nothing, attention is not a number.
            seen = (mine | (columns == rows[:, None]))[:, None]
            positions = self.embedding.position((rows - padding[:, None]).clamp(min=0))
        hidden = self.embedding.token(input_ids) + positions
        for block, kept in zip(self.blocks, past, strict=True):
            kept.seen = seen
            hidden = block(hidden, None, kept)
        return self.head.logits(hidden[:, -1])

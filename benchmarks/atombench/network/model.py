"""The model that every method of `atom bench network` trains: its data, its FLOPs, its speed.

`Speeds` is how fast the peers compute it, as they measured it of themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Layer
from atomtrain.errors import ConfigError
from atomtrain.models import GPT, GPTConfig

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Sizes of model and step; alike for all methods."""

    layers: int = 6
    """Blocks of the GPT."""
    width: int = 192
    """A multiple of 64."""
    vocabulary: int = 1024
    sequence_tokens: int = 64
    sequences_per_peer: int = 64
    """Sequences that each peer adds to a step; a pipeline's step has those of all its peers."""
    seed: int = 0
    learning_rate: float = 1e-4
    text: str = ""
    """Path of a file whose bytes are the tokens; empty: random tokens, from which nothing can be
    learnt."""

    def __post_init__(self) -> None:
        """Raises ConfigError if the vocabulary cannot hold bytes."""
        if self.text and self.vocabulary < 256:
            raise ConfigError(f"bytes of text need a vocabulary of 256, not {self.vocabulary}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSetup:
        """Return what `to_json` gave."""
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one peer's share of a step."""
        return self.sequences_per_peer * self.sequence_tokens

    @property
    def micro_batches_tried(self) -> tuple[int, ...]:
        """Sequences in a micro-batch of the pipeline: about 64 to 512 tokens."""
        return tuple(max(1, tokens // self.sequence_tokens) for tokens in (64, 128, 256, 512))

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and AdamW's two moments in float32."""
        return 16 * self.parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, without any recomputing.

        6 for each parameter of a matrix product and 12 * layers * width * context for attention:
        Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.
        """
        multiplied = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.sequence_tokens

    @property
    def boundary_bits_per_flop(self) -> float:
        """Bits of 16-bit activations of one token at one cut, one way, for each of its FLOPs."""
        return 16.0 * self.width / self.flops_per_token

    def model(self) -> GPT:
        """Return a new model, always with the same weights; the head is not tied.

        A tied weight would have two homes in a pipeline, and its gradient one more exchange in
        every step; without it, all methods train the same model and none pays for that.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = GPT(
                GPTConfig(
                    layers=self.layers,
                    width=self.width,
                    heads=max(1, self.width // 64),
                    head_width=self.width // max(1, self.width // 64),
                    vocabulary=self.vocabulary,
                    context=self.sequence_tokens,
                )
            )
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    def micro_batches(self, step: int, sequences: int, micro_batch: int) -> list[Batch]:
        """Return a step's micro-batches of `micro_batch` sequences: the same wherever asked."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shape = (sequences, self.sequence_tokens + 1)
        if self.text:
            text = _bytes_of(self.text)
            last = len(text) - self.sequence_tokens
            starts = torch.randint(last, (sequences, 1), generator=generator)
            tokens = text[starts + torch.arange(self.sequence_tokens + 1)].long()
        else:
            tokens = torch.randint(self.vocabulary, shape, generator=generator)
        return [
            {"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}
            for part in tokens.split(micro_batch)
        ]


@functools.cache
def _bytes_of(path: str) -> Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def fused_adamw(
    parameters: Iterable[nn.Parameter], learning_rate: float = 1e-4
) -> torch.optim.Optimizer:
    """Return the optimizer of all methods."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, weight_decay=0.1, fused=True)


def run_layers(layers: Iterable[Layer], values: dict[str, Any]) -> Any:
    """Run layers one after the other on named values; return what the last one writes."""
    written: Any = None
    for layer in layers:
        written = layer.module(*(values[name] for name in layer.reads))
        values[layer.writes[0]] = written
    return written


class Speeds(NamedTuple):
    """What the peers measured of themselves, all computing at once; the slowest counts."""

    sizes: Mapping[int, Mapping[str, Any]]
    """As `GlooPeer.speeds` returns them, by sequences in a micro-batch."""
    update_parameters_per_s: float

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> Speeds:
        """Put the peers' answers together."""
        sizes = {
            int(size): merged([reply["sizes"][size] for reply in replies], max)
            for size in replies[0]["sizes"]
        }
        return cls(sizes, min(reply["update_parameters_per_s"] for reply in replies))

    def tokens_per_s(self, setup: ModelSetup) -> float:
        """Return one peer's rate of forward and backward over the whole model, at its best."""
        return max(self._rates(setup).values())

    def best_size(self, setup: ModelSetup) -> int:
        """Return the sequences in a micro-batch at which that rate is reached."""
        rates = self._rates(setup)
        return max(rates, key=lambda size: rates[size])

    def _rates(self, setup: ModelSetup) -> dict[int, float]:
        rates = {}
        for size, kinds in self.sizes.items():
            layers = [*layer_kinds(setup)]
            took_s = sum(kinds[k]["forward_s"] + kinds[k]["backward_s"] for k in layers)
            rates[size] = size * setup.sequence_tokens / took_s
        return rates


def layer_kinds(setup: ModelSetup) -> list[str]:
    """Return the kinds of all layers, in order: `embedding`, `block`, `head`."""
    return ["embedding", *["block"] * setup.layers, "head"]


def merged(values: Sequence[Any], choose: Callable[[Sequence[Any]], Any]) -> Any:
    """Return what `choose` (`min`, `max`) takes of each number in equal trees of mappings."""
    if isinstance(values[0], Mapping):
        return {key: merged([value[key] for value in values], choose) for key in values[0]}
    return choose(values)

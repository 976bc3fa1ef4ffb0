"""What all contenders of the benchmark `offloaders` train: one model, one stream of batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atombench.checks import require_positive
from atomtrain.models import GPT, GPTConfig

MicroBatches = list[dict[str, Tensor]]
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
_HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class OffloadCase:
    """Inputs of the benchmark."""

    layers: int = 8
    """Blocks of the GPT."""
    width: int = 512
    """A multiple of 64."""
    vocabulary: int = 4096
    sequence_tokens: int = 256
    sequences: int = 8
    """Sequences of a step, of all its micro-batches."""
    rounds: int = 9
    """Rounds in which each contender has its turn; at least 1."""
    turn_steps: int = 2
    """Counted steps of a turn; at least 1."""
    search_turns: int = 4
    """Turns of one counted step by which a contender's setting is chosen; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches."""
        return self.sequences * self.sequence_tokens


CASE = OffloadCase()
CUDA_CASE = OffloadCase(
    layers=24, width=2048, vocabulary=32000, sequence_tokens=1024, sequences=16, rounds=5
)
QUICK = OffloadCase(
    layers=3, width=128, vocabulary=512, sequence_tokens=64, sequences=4, rounds=2, search_turns=1
)


def model_of(case: OffloadCase) -> GPT:
    """Return the model, with the same weights in every process.

    The head is not tied to the embedding, since offloaders treat shared weights differently.
    """
    torch.manual_seed(case.seed)
    model = GPT(
        GPTConfig(
            layers=case.layers,
            width=case.width,
            heads=max(1, case.width // _HEAD_WIDTH),
            head_width=min(case.width, _HEAD_WIDTH),
            vocabulary=case.vocabulary,
            context=case.sequence_tokens,
        )
    )
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def step_data(case: OffloadCase, step: int, micro_batches: int) -> MicroBatches:
    """Return a step's tokens in so many micro-batches; on the CPU."""
    generator = torch.Generator().manual_seed(case.seed + 1 + step)
    shape = (case.sequences, case.sequence_tokens + 1)
    tokens = torch.randint(case.vocabulary, shape, generator=generator)
    return [
        {"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}
        for part in tokens.chunk(micro_batches)
    ]

"""What each part of the first hour is told: where it runs, and how much it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atombench.common import Result, keep_partial
from atombench.engine.large import LargeSetup
from atombench.engine.optimizer import OptimizerSetup
from atombench.offloaders.contenders import CUDA_CASE, OffloadCase
from atomtrain.models.gpt_config import GPTConfig

NEEDED = {
    "pytest": "the tests of the GPU",
    "transformers": "the Llama",
    "deepspeed": "its row beside other offloaders",
    "hivemind": "everything of the swarm",
    "blake3": "checkpoints and the swarm",
    "cryptography": "the swarm",
    "msgspec": "the swarm",
}
"""Packages that may be missing, and what goes with them."""
_MUON = ("muon", "torch-adamw-foreach")
"""Take seconds on few threads, and no GPU's host would choose them."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured, part by part."""

    product: int
    """Rows and columns of the matrices that are multiplied in bfloat16."""
    pinned_bytes: tuple[int, ...]
    model: GPTConfig
    """Whose memory is predicted and measured; the Llama has its sizes."""
    model_sequences: int
    model_memory: str
    optimizer: OptimizerSetup
    threads: tuple[int, ...]
    timeline: LargeSetup
    large: LargeSetup
    offloaders: OffloadCase
    offloaders_memory: str
    """The cap of all but the resident contender."""


def _gpt(layers: int, width: int, vocabulary: int, context: int) -> GPTConfig:
    heads = max(2, width // 64)
    return GPTConfig(
        layers=layers,
        width=width,
        heads=heads,
        head_width=width // heads,
        vocabulary=vocabulary,
        context=context,
    )


_SPLIT = "adamw-bfloat16-split"
SIZES = {
    "full": Size(
        product=8192,
        pinned_bytes=(10**9, 8 * 10**9, 16 * 10**9),
        model=_gpt(16, 1024, 8192, 1024),
        model_sequences=4,
        model_memory="1GiB",
        optimizer=OptimizerSetup(rounds=5, but=_MUON),
        threads=(4, 8, 16),
        timeline=LargeSetup(
            model="gpt3-xl", optimizer=_SPLIT, device_memory="8GiB", micro_batches=8, steps=1
        ),
        large=LargeSetup(optimizer=_SPLIT, steps=2),
        offloaders=CUDA_CASE,
        offloaders_memory="24GiB",
    ),
    "small": Size(
        product=64,
        pinned_bytes=(10**6, 10**8),
        model=_gpt(3, 32, 64, 16),
        model_sequences=2,
        model_memory="4MiB",
        optimizer=OptimizerSetup(matrices=1, rows=64, columns=64, rounds=1, but=_MUON),
        threads=(1, 2),
        timeline=LargeSetup(
            model="tiny", optimizer=_SPLIT, device_memory="16MiB", context_tokens=32,
            sequences=2, micro_batches=2, steps=1,
        ),
        large=LargeSetup(
            model="tiny", optimizer=_SPLIT, device_memory="16MiB", context_tokens=32,
            sequences=2, micro_batches=2, steps=1,
        ),
        offloaders=OffloadCase(
            layers=2, width=64, vocabulary=64, sequence_tokens=16, sequences=4
        ),
        offloaders_memory="64MiB",
    ),
}  # fmt: skip
"""By name. `full` is for a GPU of 80 GB beside 128 GiB of host memory; processors compute in
bfloat16 slowly, so `small` is very small."""


class PartOrder(NamedTuple):
    """Where a part runs, how much it does, and where what it finds is kept."""

    device: str
    size: Size
    out: Path

    def keep(self, result: Result) -> None:
        """Keep what has been found so far."""
        keep_partial(result, self.out)

"""What a user can say to `atom train`; everything has a working default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from atomtrain.errors import ConfigError
from atomtrain.units import parse_bytes

NAME_MAX = 64


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one peer (or of several on this machine).

    `None` means: as the checkpoint or the swarm says, else the recipe's default.
    """

    model: str | None = None
    """Model by name: demo, tiny, gpt3-small, gpt3-medium, gpt3-large, gpt3-xl, gpt3-2.7b, gpt3-6.7b,
    gpt3-13b, gpt3-175b. Default: demo."""
    data: str | None = None
    """Text to train on: a file, a folder or a pattern such as 'books/*.txt'. Default: the demo
    corpus (pip install 'atomtrain[demo]')."""
    run: str | None = None
    """Start a run of this name that other peers can join (or resume it, with --resume)."""
    join: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Join the run of a peer at this address; may be given several times."""
    peers: int | None = None
    """Peers to start on this machine. Default: 2 for the demo, else 1."""
    resume: bool = False
    """Continue from the newest checkpoint of --run."""
    steps: int | None = None
    """Optimizer steps of each peer."""
    device: str = "auto"
    """auto, cuda, cuda:NUMBER, emulated or emulated:LINK such as emulated:4GiB/s."""
    device_memory: str | None = None
    """Device budget, such as 256MiB. Default: 64MiB for demo and tiny, else 90% of what is free."""
    sequences: int | None = None
    """Sequences of one step."""
    micro_batch: int | None = None
    """Sequences of one micro-batch; divides --sequences. Default: the largest that fits well."""
    context: int | None = None
    """Tokens of a sequence."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW."""
    dropout: float | None = None
    """Dropout probability."""
    vocabulary: int | None = None
    """Tokens of the tokenizer that is trained on the text. Default: the model's, at most 8192."""
    seed: int | None = None
    """Seed of weights, sample order and dropout."""
    local_steps: int | None = None
    """Steps in which every part of the model is averaged with the other peers once."""
    evaluate_every: int | None = None
    """Steps between evaluations on held-out text."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    directory: Path = Path("runs")
    """Folder of runs; this peer writes to DIRECTORY/RUN/NAME."""
    name: str | None = None
    """Name of this peer. Default: peer-0, or a new name for a peer that joins."""
    host: str = "0.0.0.0"
    """IPv4 address to listen on for other peers."""
    port: int = 0
    """TCP port to listen on; 0 is any free one."""
    announce: str | None = None
    """Address under which others reach this machine, if it is not found by itself."""
    prompt: str = "In the beginning"
    """Start of the sentences that are generated at the end."""
    threads: int | None = None
    """CPU threads of each peer. Default: all cores, divided among the local peers."""
    plain: bool = False
    """Plain lines instead of the live display."""

    def __post_init__(self) -> None:
        for field in (
            "peers", "steps", "sequences", "micro_batch", "context", "vocabulary",
            "local_steps", "evaluate_every", "checkpoint_every", "threads",
        ):  # fmt: skip
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(field)} must be at least 1, not {value}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 10:
            raise ConfigError(f"--learning-rate must be above 0, not {self.learning_rate}")
        if self.device_memory is not None:
            parse_bytes(self.device_memory, "--device-memory")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be 0 to 65535, not {self.port}")
        for field in ("run", "name"):
            value = getattr(self, field)
            if value is not None:
                _check_name(_flag(field), value)
        if self.resume and self.run is None:
            raise ConfigError("--resume needs the name of the run: --run NAME --resume")

    @property
    def is_demo(self) -> bool:
        """Whether the user named nothing: then the demonstration with two peers runs."""
        return (
            self.model is None
            and self.data is None
            and self.run is None
            and not self.join
            and not self.resume
        )

    @property
    def n_peers(self) -> int:
        """Local peers to start."""
        return self.peers if self.peers is not None else (2 if self.is_demo else 1)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _check_name(flag: str, name: str) -> None:
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if not (0 < len(name) <= NAME_MAX and plain.isalnum() and plain.isascii()):
        raise ConfigError(
            f"{flag} {name!r} is no name; use 1 to {NAME_MAX} letters, digits, '-', '_' or '.'"
        )

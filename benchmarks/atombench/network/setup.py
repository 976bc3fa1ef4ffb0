"""Inputs of `atom bench network`: sizes, times, and the links to be measured.

People write links as `100Mbit/s,50ms,0.5%`, or `rtx-3090,100Mbit/s,30ms,gpt3-xl`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from atombench.links.shaping import Link
from atombench.network.model import ModelSetup
from atomtrain.errors import ConfigError, nearest
from atomtrain.models import PRESETS, preset
from atomtrain.planning.catalogue import GPUS, MATMUL_SHARE, gpu, machine_for
from atomtrain.units import parse_rate

UNSHAPED_BITS_PER_S = 1e10
"""What an unshaped link is called in the result; memory is at least about as fast."""
ALONE_LINKS = (Link(bits_per_s=1e8), Link(bits_per_s=1e7))
"""Where the swarm is compared with as many peers alone, and with nothing else."""
_HOST_BYTES = 128 << 30


class StandsFor(NamedTuple):
    """A GPU on a link, for which a slower link stands beside a slower processor."""

    gpu: str
    """Name in the catalogue."""
    bits_per_s: float
    """The GPU's link."""
    model: str | None = None
    """Preset whose activations for each FLOP count; `None`: bits per FLOP alone."""
    round_trip_s: float = 0.0
    """Added as it is there. A small processor has the longer steps to hide it behind: that is in
    the pipeline's favour."""
    loss_share: float = 0.0
    """Of packets, as it is there."""


class WantedLink(NamedTuple):
    """One row to be measured."""

    link: Link
    stands_for: StandsFor | None


@dataclass(frozen=True, kw_only=True)
class NetworkSetup:
    """Inputs of the benchmark."""

    peers: int = 2
    """At least 2; with more peers than cores they share them, which slows all methods alike."""
    model: ModelSetup = field(default_factory=ModelSetup)
    gpu: str = "rtx-3090"
    """GPU whose link to the host, for each FLOP, the emulated device has."""
    spare_share: float = 0.35
    """Device budget of every peer, ATOM's as well as a pipeline's, beyond an even part of the
    model's parameters, gradients and moments, as a share of these; above 0."""
    micro_batches: tuple[int, ...] = (4, 8, 16)
    """Sequences in ATOM's micro-batch: all are tried, the fastest that fits the budget counts."""
    local_steps: int = 12
    """ATOM: local steps in which every fragment is averaged once."""
    wire: str = "int8"
    """ATOM: how changes travel."""
    upload_share: float = 0.85
    """ATOM's upload limit as a share of a shaped link's rate: what it sends is never in the way of
    its own signs of life, as `atom train --upload-limit` does for a household."""
    links: tuple[Link, ...] = (
        Link(bits_per_s=None),
        Link(bits_per_s=1e9),
        Link(bits_per_s=1e8),
        Link(bits_per_s=1e7),
        Link(bits_per_s=1e8, round_trip_s=0.05),
        Link(bits_per_s=1e7, round_trip_s=0.1),
        Link(bits_per_s=1e8, round_trip_s=0.03, loss_share=0.01),
    )
    """Links that stand for themselves."""
    baselines: bool = True
    """Whether the pipeline and data parallelism are measured as well."""
    stand_ins: tuple[StandsFor, ...] = (
        StandsFor("rtx-3090", 1e9),
        StandsFor("rtx-3090", 1e8, None, 0.03),
        StandsFor("rtx-3090", 1e8, "gpt3-xl"),
        StandsFor("rtx-3090", 1e7, "gpt3-xl"),
    )
    """Links that stand for a GPU's."""
    trials: int = 7
    """Pipelines measured on each link before the best one is taken."""
    trial_s: float = 4.0
    """Aimed length of a trial."""
    window_s: float = 12.0
    """Least length of a measurement."""
    alone_s: float = 8.0
    """Least length of the one in which ATOM's peers train each for itself."""
    turns: int = 1
    """Measurements of ATOM as a swarm on each link, each between two of its peers alone."""
    settle_s: float = 6.0
    """ATOM trains so long before it is measured."""
    longest_window_s: float = 240.0
    """A measurement of ATOM is made as long as a round takes, up to this."""
    longest_step_s: float = 100.0
    """Steps of the baselines that would take longer are shortened (pipeline) or left out. Shorter
    steps are in nobody's favour but ATOM's: gradients that several pipelines average weigh more."""
    case_s: float = 240.0
    """No method is begun for a link after this."""
    total_s: float = 1800.0
    """No further link is begun after this."""

    def __post_init__(self) -> None:
        if self.peers < 2:
            raise ConfigError(f"a network needs at least 2 peers, not {self.peers}")
        if self.turns < 1 or (self.turns > 1 and not self.alone_s):
            raise ConfigError(
                f"turns must be at least 1, and more than 1 take alone_s, not {self.turns} and "
                f"{self.alone_s:g} s"
            )
        if self.spare_share <= 0:
            raise ConfigError(f"spare_share must be above 0, not {self.spare_share}")
        sequences = self.model.sequences_per_peer
        if not self.micro_batches or any(sequences % size for size in self.micro_batches):
            raise ConfigError(
                f"micro_batches ({self.micro_batches}) must each divide sequences_per_peer "
                f"({sequences})"
            )

    @property
    def budget_bytes(self) -> int:
        """Device memory of each peer, for whatever method has a budget."""
        return int((1 / self.peers + self.spare_share) * self.model.state_bytes)

    @property
    def step_sequences(self) -> int:
        """Sequences of all peers in a step."""
        return self.peers * self.model.sequences_per_peer

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(self)
        values["model"]["text"] = Path(self.model.text).name  # in a folder that is gone
        values["stand_ins"] = [each._asdict() for each in self.stand_ins]
        values["links"] = [list(astuple(link)) for link in self.links]
        return values


QUICK = NetworkSetup(
    model=ModelSetup(
        layers=4, width=128, vocabulary=256, sequence_tokens=16, sequences_per_peer=128
    ),
    spare_share=0.6,
    micro_batches=(8,),
    local_steps=8,
    links=(Link(bits_per_s=None), Link(bits_per_s=1e6)),
    stand_ins=(),
    trials=2,
    trial_s=0.5,
    window_s=2.0,
    settle_s=0.5,
    alone_s=1.0,
    longest_window_s=5.0,
    longest_step_s=4.0,
    case_s=15.0,
    total_s=50.0,
)


def gpu_flops_per_s(name: str) -> float:
    """Return what a GPU really reaches with 16-bit values, or 32-bit ones if it has no other."""
    card = gpu(name)
    dtype = "fp16" if "fp16" in card.flops_per_s else "fp32"
    return MATMUL_SHARE[dtype] * card.peak_flops_per_s(dtype)


def device_link_bytes_per_s(setup: NetworkSetup, peer_flops_per_s: float) -> float:
    """Return the rate that gives the emulated device the GPU's bytes for each FLOP."""
    machine = machine_for(setup.gpu, _HOST_BYTES)
    return machine.load_bytes_per_s * peer_flops_per_s / gpu_flops_per_s(setup.gpu)


def stand_in(model: ModelSetup, wanted: StandsFor, peer_flops_per_s: float) -> Link:
    """Return the link that is to a peer of `peer_flops_per_s` what the GPU's is to the GPU."""
    bits_per_s = wanted.bits_per_s * peer_flops_per_s / gpu_flops_per_s(wanted.gpu)
    if wanted.model is not None:
        sizes = preset(wanted.model)
        large = ModelSetup(
            layers=sizes.layers,
            width=sizes.width,
            vocabulary=sizes.vocabulary,
            sequence_tokens=sizes.context,
        )
        bits_per_s *= model.boundary_bits_per_flop / large.boundary_bits_per_flop
    return Link(
        bits_per_s=bits_per_s, round_trip_s=wanted.round_trip_s, loss_share=wanted.loss_share
    )


def wanted_links(setup: NetworkSetup, peer_flops_per_s: float) -> list[WantedLink]:
    """Return all links to be measured, the plain ones first."""
    return [
        *(WantedLink(link, None) for link in setup.links),
        *(
            WantedLink(stand_in(setup.model, each, peer_flops_per_s), each)
            for each in setup.stand_ins
        ),
    ]


UNSHAPED = "unshaped"
_TIME = re.compile(r"([0-9.]+)(ms|s)")
_SHARE = re.compile(r"([0-9.]+)%")
_RATE = re.compile(r"[0-9.]+[a-z]*/s", re.IGNORECASE)
_FORM = (
    "RATE[,ROUND TRIP][,LOSS], such as 100Mbit/s,50ms,0.5%; add a GPU, and perhaps a model, "
    "for a link slowed until it stands for that GPU's, such as rtx-3090,100Mbit/s,30ms,gpt3-xl"
)


def parse_links(texts: Sequence[str]) -> tuple[tuple[Link, ...], tuple[StandsFor, ...]]:
    """Return the links of `--link`: those that are themselves, and those that stand for a GPU's.

    Raises:
        ConfigError: a part that is none of rate, round trip, loss, GPU and model, or is there
            twice; a link without a rate; a model without a GPU.
    """
    found = [_parse(text) for text in texts]
    plain = tuple(link for link in found if isinstance(link, Link))
    return plain, tuple(link for link in found if isinstance(link, StandsFor))


def _parse(text: str) -> Link | StandsFor:
    known: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        kind = _kind(part, text)
        if kind in known:
            two = f"{known[kind]}, {part}"
            raise ConfigError(f"--link {text!r} has two of a kind: {two}; write {_FORM}")
        known[kind] = part
    if "rate" not in known:
        raise ConfigError(f"--link {text!r} has no rate; write {_FORM}")
    if "model" in known and "GPU" not in known:
        raise ConfigError(f"--link {text!r} has a model but no GPU; write {_FORM}")
    rate = None if known["rate"] == UNSHAPED else 8 * parse_rate(known["rate"], "--link")
    round_trip_s = _seconds(known["time"], text) if "time" in known else 0.0
    loss_share = _number(known["loss"][:-1], text) / 100 if "loss" in known else 0.0
    link = Link(bits_per_s=rate, round_trip_s=round_trip_s, loss_share=loss_share)
    if "GPU" not in known:
        return link
    if rate is None:
        raise ConfigError(f"--link {text!r}: a GPU's link needs a rate; write {_FORM}")
    return StandsFor(known["GPU"], rate, known.get("model"), round_trip_s, loss_share)


def _kind(part: str, text: str) -> str:
    if part == UNSHAPED or _RATE.fullmatch(part):
        return "rate"
    if _TIME.fullmatch(part):
        return "time"
    if _SHARE.fullmatch(part):
        return "loss"
    if part in GPUS:
        return "GPU"
    if part in PRESETS:
        return "model"
    hint = nearest(part, [*GPUS, *PRESETS, UNSHAPED])
    raise ConfigError(f"--link {text!r}: {part!r} is nothing that a link has.{hint} Write {_FORM}")


def _seconds(part: str, text: str) -> float:
    match = _TIME.fullmatch(part)
    assert match is not None
    return _number(match[1], text) / (1000 if match[2] == "ms" else 1)


def _number(digits: str, text: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ConfigError(f"--link {text!r}: {digits!r} is not a number; write {_FORM}") from None

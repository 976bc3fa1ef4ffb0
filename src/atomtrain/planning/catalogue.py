"""Machines that nobody has measured: data-sheet figures and the shares of them that are reached.

The figures and their sources are in `hardware.json`; `docs/hardware.md` prints them. A data sheet
states what a processor could do; a plan needs what it does. The shares between the two are the
named constants below.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from atomtrain.analysis.costs.costs import ChainCosts, LayerCost
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.errors import ConfigError, nearest
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.updating import ADAMW_BYTES
from atomtrain.units import format_bytes

T = TypeVar("T")

MATMUL_SHARE = {"fp32": 0.7, "tf32": 0.55, "fp16": 0.55, "bf16": 0.55}
"""Share of the peak FLOP/s that a layer reaches. Power limits hold vector units below the peak at
boost clock: cuBLAS reaches 60% of an RTX A6000's (Boehm, "How to Optimize a CUDA Matmul Kernel",
2022), more on cards that are cooled better. Tensor cores: Megatron-LM reaches 44 to 57% of an
A100's peak in whole training steps (arXiv 2104.04473, table 1; 2205.05198)."""
MEMORY_SHARE = 0.75
"""Share of the device's memory bandwidth that element-wise kernels reach. CUDA's bandwidthTest
copies at 1157 of 1555 GB/s on an A100 and at 240 of 320 GB/s on a T4."""
PCIE_SHARE = 0.8
"""Share of the link's bandwidth after encoding that one pinned copy reaches; the rest is packet
headers and flow control. Measured: 12.3 GB/s of 15.8 (A100 on PCIe 3 x16, CUDA's bandwidthTest),
25.1 of 31.5 (A100 on PCIe 4 x16, NVIDIA/nvbandwidth issues 11 and 42), 52.8 of 63.0 (H100 on
PCIe 5 x16, NVIDIA/nvbandwidth issue 24)."""
BOTH_WAYS_SHARE = 0.75
"""What each direction keeps while both are busy. NVIDIA/nvbandwidth issues 11 and 53: 25 GB/s each
way alone, 24 and 12 together on A100 hosts, that is 36 of 50."""
PAGEABLE_SHARE = 0.4
"""What copies from memory that is not pinned keep of the pinned rate: the driver stages them
through a pinned buffer of its own (Harris, "How to Optimize Data Transfers in CUDA C/C++", NVIDIA,
2012, measures 2.3 of 5.8 GB/s)."""
HOST_MEMORY_SHARE = 0.8
"""Share of the host memory's bandwidth that streaming loops reach with all cores. STREAM on one
socket: 189 of 205 GB/s (DDR4-3200, 8 channels), 378 of 461 GB/s (DDR5-4800, 12 channels; both
Micron and AMD, 2022); desktops do a little worse."""
DEVICE_MEMORY_SHARE = 0.9
"""Share of the device's memory that is the default budget, as in `open_device`: the CUDA context,
libraries and a desktop take the rest."""
UPDATE_BYTES_PER_PARAMETER = ADAMW_BYTES
"""Traffic of a fused AdamW in float32: reads parameter, gradient and two moments, writes all but
the gradient."""
_PCIE_TRANSFERS_PER_S = {3: 8e9, 4: 16e9, 5: 32e9}
"""PCI-SIG base specifications 3.0 (2010), 4.0 (2017), 5.0 (2019): bits a second and lane."""
_PCIE_ENCODING = 128 / 130


class Source(NamedTuple):
    title: str
    year: int
    url: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    """As `--gpu` takes it."""
    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Peak of dense matrix products by `fp32`, `tf32`, `fp16`, `bf16` (the last three on tensor
    cores, accumulating in float32). What a GPU has no units for is missing."""
    pcie_generation: int
    pcie_lanes: int
    host: str
    """Typical host memory beside it, by name in `HOSTS`."""
    sources: tuple[Source, ...]
    reported_as: tuple[str, ...] = ()
    """What drivers call it."""
    note: str = ""

    @property
    def native_precision(self) -> str:
        """The precision with the highest peak: `bf16`, else `fp16`, where it is above `fp32`."""
        single = self.flops_per_s["fp32"]
        faster = (name for name in ("bf16", "fp16") if self.flops_per_s.get(name, 0.0) > single)
        return next(faster, "fp32")

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak for a data type.

        Raises:
            ConfigError: the GPU has no units for it.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"{self.title} has no units for {dtype!r}; it has {', '.join(self.flops_per_s)}"
            )
        return self.flops_per_s[dtype]


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    memory_bytes_per_s: float
    """Peak of all channels."""
    most_memory_bytes: int
    """What such a board holds, usually."""
    source: Source


def _named(entries: Mapping[str, T], what: str, many: str, name: str, otherwise: str = "") -> T:
    """Return an entry of the catalogue, whatever the case of its name; `otherwise` says what else
    the user can do."""
    if name.lower() not in entries:
        raise ConfigError(
            f"there is no {what} {name!r} in the catalogue.{nearest(name.lower(), entries)} "
            f"{many}: {', '.join(entries)}{otherwise}"
        )
    return entries[name.lower()]


def gpu(name: str) -> Gpu:
    """Return a GPU by name.

    Raises:
        ConfigError: it is not in the catalogue; offers the nearest name.
    """
    return _named(
        GPUS, "GPU", "GPUs", name, "; or describe the machine in a file (docs/hardware.md)"
    )


def gpu_reported_as(name: str) -> Gpu | None:
    """Return the GPU that the driver calls so, or `None` if it is not in the catalogue."""
    short = name.removeprefix("NVIDIA ").removeprefix("AMD ")
    return next((card for card in GPUS.values() if short in card.reported_as), None)


def host(name: str) -> Host:
    """Return host memory by name.

    Raises:
        ConfigError: it is not in the catalogue; offers the nearest name.
    """
    return _named(HOSTS, "host memory", "Host memories", name)


def host_for(card: Gpu, host_memory_bytes: int) -> Host:
    """Return the GPU's typical host, or the least one beyond it that holds so much memory."""
    typical = HOSTS[card.host]
    if host_memory_bytes <= typical.most_memory_bytes:
        return typical
    larger = sorted(HOSTS.values(), key=lambda h: (h.most_memory_bytes, h.memory_bytes_per_s))
    return next((h for h in larger if h.most_memory_bytes >= host_memory_bytes), larger[-1])


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Return what one pinned copy in one direction reaches.

    Raises:
        ConfigError: a generation that is not in the catalogue, or no number of lanes.
    """
    if generation not in _PCIE_TRANSFERS_PER_S:
        raise ConfigError(
            f"PCIe generation {generation} is not in the catalogue; "
            f"it has {', '.join(map(str, _PCIE_TRANSFERS_PER_S))}"
        )
    if lanes not in (1, 2, 4, 8, 16):
        raise ConfigError(f"PCIe has 1, 2, 4, 8 or 16 lanes, not {lanes}")
    return PCIE_SHARE * _PCIE_ENCODING * _PCIE_TRANSFERS_PER_S[generation] / 8 * lanes


def machine_for(
    card: Gpu | str,
    host_memory_bytes: int,
    *,
    device_memory_bytes: int | None = None,
) -> Machine:
    """Return a machine that holds the GPU, from data sheets.

    Args:
        card: A GPU or its name.
        host_memory_bytes: Host memory for the model.
        device_memory_bytes: Budget; `None` is `DEVICE_MEMORY_SHARE` of the GPU's memory.

    Raises:
        ConfigError: an unknown name, or a budget that is more than the GPU has.
        PlanError: a size that is not positive.
    """
    card = gpu(card) if isinstance(card, str) else card
    there = host_for(card, host_memory_bytes)
    host_bytes_per_s = HOST_MEMORY_SHARE * there.memory_bytes_per_s
    generation, lanes = card.pcie_generation, card.pcie_lanes
    link_bytes_per_s = min(pcie_bytes_per_s(generation, lanes), host_bytes_per_s)
    if device_memory_bytes is None:
        device_memory_bytes = int(DEVICE_MEMORY_SHARE * card.memory_bytes)
    if device_memory_bytes > card.memory_bytes:
        raise ConfigError(
            f"--device-memory {format_bytes(device_memory_bytes)} is more than {card.title} has, "
            f"{format_bytes(card.memory_bytes)}; leave it out, or choose another --gpu"
        )
    return Machine(
        name=f"{card.title}, PCIe {generation} x{lanes}, {there.name}",
        load_bytes_per_s=link_bytes_per_s,
        unload_bytes_per_s=link_bytes_per_s,
        update_parameters_per_s=host_bytes_per_s / UPDATE_BYTES_PER_PARAMETER,
        device_update_parameters_per_s=(
            MEMORY_SHARE * card.memory_bytes_per_s / UPDATE_BYTES_PER_PARAMETER
        ),
        device_memory_bytes=device_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        both_ways_share=BOTH_WAYS_SHARE,
        load_pageable_bytes_per_s=PAGEABLE_SHARE * link_bytes_per_s,
        unload_pageable_bytes_per_s=PAGEABLE_SHARE * link_bytes_per_s,
        host_copy_bytes_per_s=host_bytes_per_s / 2,
    )


def estimate_times(costs: ChainCosts, card: Gpu | str, dtype: str = "fp32") -> dict[str, LayerTime]:
    """Return the seconds of each kind of layer by the roofline (Williams et al., CACM 2009).

    A layer takes as long as its arithmetic or its memory traffic, whichever is longer. Traffic:
    parameters are read once a pass, and each tensor that forward keeps for backward is written
    once and read once; backward reads them again, and writes and reads as many gradients.

    Args:
        costs: Of the chain, for one micro-batch.
        card: A GPU or its name.
        dtype: Of the matrix products: `fp32`, `tf32`, `fp16` or `bf16`.

    Raises:
        ConfigError: an unknown GPU, or a type that it has no units for.
    """
    card = gpu(card) if isinstance(card, str) else card
    # First, so that an unknown type is named as such.
    peak_flops_per_s = card.peak_flops_per_s(dtype)
    flops_per_s = MATMUL_SHARE[dtype] * peak_flops_per_s
    bytes_per_s = MEMORY_SHARE * card.memory_bytes_per_s
    return {cost.kind: _layer_time(cost, flops_per_s, bytes_per_s) for cost in costs.layers}


def _layer_time(cost: LayerCost, flops_per_s: float, bytes_per_s: float) -> LayerTime:
    # A layer that only gathers reads a few rows of its table, but its gradient is dense.
    read_bytes = cost.parameter_bytes if cost.forward_flops else 0
    forward_bytes = read_bytes + 2 * cost.kept_bytes
    gradient_bytes = read_bytes + cost.parameter_bytes + 3 * cost.kept_bytes
    forward_s = max(cost.forward_flops / flops_per_s, forward_bytes / bytes_per_s)
    gradient_s = max(cost.backward_flops / flops_per_s, gradient_bytes / bytes_per_s)
    return LayerTime(forward_s, forward_s + gradient_s)


@functools.cache
def _data() -> Any:
    path = Path(__file__).with_name("hardware.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _source(name: str) -> Source:
    return Source(**_data()["sources"][name])


def _gpu(name: str, entry: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        title=entry["title"],
        memory_bytes=int(entry["memory_gib"]) << 30,
        memory_bytes_per_s=1e9 * entry["memory_gb_per_s"],
        flops_per_s={dtype: 1e12 * value for dtype, value in entry["tflops"].items()},
        pcie_generation=entry["pcie"][0],
        pcie_lanes=entry["pcie"][1],
        host=entry["host"],
        sources=tuple(_source(source) for source in entry["sources"]),
        reported_as=tuple(entry["reported_as"]),
        note=entry.get("note", ""),
    )


def _host(name: str, entry: Mapping[str, Any]) -> Host:
    return Host(
        name=name,
        # A channel is 64 bits wide.
        memory_bytes_per_s=8e6 * entry["megatransfers_per_s"] * entry["channels"],
        most_memory_bytes=int(entry["most_memory_gib"]) << 30,
        source=_source(entry["source"]),
    )


GPUS: Mapping[str, Gpu] = {name: _gpu(name, entry) for name, entry in _data()["gpus"].items()}
"""The catalogue by the names that `--gpu` takes."""
HOSTS: Mapping[str, Host] = {name: _host(name, entry) for name, entry in _data()["hosts"].items()}
"""Typical host memories, by kind, rate and channels."""


ASSUMED_DISK = "nvme-pcie3"
"""Where nobody measured a disk."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Data-sheet figures of one disk."""

    name: str
    """As `atom plan --disk` takes it."""
    title: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    source: Source

    @property
    def both_ways_share(self) -> float:
        """What reads and writes keep of their rates, if the disk does one of both at a time."""
        return self.read_bytes_per_s / (self.read_bytes_per_s + self.write_bytes_per_s)

    def of(self, machine: Machine) -> Machine:
        return dataclasses.replace(
            machine,
            name=f"{machine.name}, {self.title}",
            storage_read_bytes_per_s=self.read_bytes_per_s,
            storage_write_bytes_per_s=self.write_bytes_per_s,
            storage_both_ways_share=self.both_ways_share,
        )


def disk(name: str) -> Disk:
    """Return a disk by name.

    Raises:
        ConfigError: it is not in the catalogue; offers the nearest name.
    """
    return _named(DISKS, "disk", "Disks", name)


def _disk(name: str, entry: Mapping[str, Any]) -> Disk:
    return Disk(
        name=name,
        title=entry["title"],
        read_bytes_per_s=1e6 * entry["read_mb_per_s"],
        write_bytes_per_s=1e6 * entry["write_mb_per_s"],
        source=_source(entry["source"]),
    )


DISKS: Mapping[str, Disk] = {name: _disk(name, entry) for name, entry in _data()["disks"].items()}
"""The catalogue by the names that `--disk` takes."""

"""ATOM and the best pipeline, simulated: models x links x peers; and swarms of up to 10,000.

`docs/simulation.md` and `docs/scale.md` show the tables. Nothing is measured but the time that the
simulation itself takes, and what encoding costs on this machine: step times come from the planner
and data sheets, and `docs/network.md` says what both sides are granted. `network` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.network.pipeline import decode, encode
from atomresearch.simulate import prospect_of
from atomresearch.simulate_fleet import fleet_rows
from atomresearch.simulate_options import SimulateOptions
from atomresearch.simulation.compare import ACTIVATION_WIRES, ELEMENTS_PER_S, compare
from atomresearch.simulation.site import site_of
from atomtrain.errors import PlanError
from atomtrain.models.gpt_config import GPT3
from atomtrain.planning.search.batch_search import Prospect
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.codecs.slices import PIECE_ELEMENTS


class NamedLink(NamedTuple):
    """A rate that a peer's link really carries, each way."""

    name: str
    bits_per_s: float


LINKS = (
    NamedLink("10 Gbit/s, of which activations reached 610 Mbit/s", 610e6),
    NamedLink("1 Gbit/s", 1e9),
    NamedLink("300 Mbit/s", 300e6),
    NamedLink("100 Mbit/s", 100e6),
    NamedLink("30 Mbit/s", 30e6),
)
"""The first is what the ATOM paper (arXiv 2403.10504) reports of its 10 Gbit/s network."""
PEERS = (4, 8, 16, 64)
_GPU = "rtx-3090"
_HOST = {"gpt3-13b": "256GiB", "gpt3-175b": "4TiB"}
"""Hosts with more memory than usual, where the model needs it."""
_ROUND_TRIP_S = 0.03
_FLEET: dict[str, Any] = {"model": "gpt3-xl", "peers": 10_000, "wire": "int4", "group": 16}
_FLEET_BITS_PER_S = 1e8
_FLEET_ROUNDS = 1000
_SCALE_ROUNDS = 600
_UNSTEADY_MODELS = ("gpt3-xl", "gpt3-6.7b", "gpt3-13b")
_UNSTEADY_PEERS = (8, 16, 64)
_UNSTEADY_BITS_PER_S = (1e9, 1e8)
_UNSTEADY_ROUNDS = 200_000
"""Of all peers together: few peers leave too seldom for a mean of few rounds."""
_SCALE = ((10, 0), (100, 0), (100, 16), (1000, 0), (1000, 16), (10_000, 0), (10_000, 16))
"""Peers, and members of a group (0: one group of all)."""


def run(options: BenchmarkOptions) -> Result:
    """Simulate every combination; `rows` holds them, `fleet` one run of a very large swarm.

    `scale` holds swarms of growing size, `unsteady` ATOM beside pipelines where peers differ, come
    and go, `encoding` what the simulation takes encoding to cost
    beside what it costs on this machine. `took_s` is processor time, on one core.
    """
    models = GPT3[:2] if options.quick else GPT3
    rows: list[Result] = []
    for model in models:
        started_s = time.monotonic()
        rows += _rows(model)
        progress(f"{model}: {time.monotonic() - started_s:.1f} s")
    fleet = SimulateOptions(**_FLEET, rounds=100 if options.quick else _FLEET_ROUNDS)
    found = prospect_of(fleet)
    return {
        "rows": rows,
        "fleet": _fleet(fleet, found),
        "scale": _scale(found, options.quick),
        "unsteady": unsteady(_UNSTEADY_MODELS[:1] if options.quick else _UNSTEADY_MODELS),
        "encoding": measured_encoding(),
        "gpu": _GPU,
        "round_trip_s": _ROUND_TRIP_S,
        **description(),
    }


def _rows(model: str) -> list[Result]:
    settings = SimulateOptions(
        model=model, gpu=_GPU, round_trip=_ROUND_TRIP_S, host_memory=_HOST.get(model)
    )
    try:
        found = prospect_of(settings)
    except PlanError as error:
        return [{"model": model, "left_out": str(error)}]
    rows = []
    for peers in PEERS:
        site = site_of(found, peers, settings.local_steps, settings.wire)
        for link in LINKS:
            result = compare(site, link.bits_per_s, _ROUND_TRIP_S)
            pipeline = result.pipeline
            rows.append(
                {
                    "model": model,
                    "parameters": found.analysis.parameters,
                    "peers": peers,
                    "link": link.name,
                    "link_bits_per_s": link.bits_per_s,
                    "atom_tokens_per_s": result.atom.tokens_per_s,
                    "averaged_every_s": result.atom.averaged_every_s,
                    "averaged_every_tokens": result.atom.averaged_every_tokens,
                    "pipeline_tokens_per_s": pipeline and pipeline.tokens_per_s,
                    "pipeline_stages": pipeline and pipeline.stages,
                    "pipeline_wire": pipeline and pipeline.wire,
                    "ratio": result.ratio,
                }
            )
    return rows


def unsteady(models: Sequence[str]) -> list[Result]:
    """Return ATOM and the best pipelines of the same peers that differ, come and go."""
    rows = []
    for model in models:
        shared: dict[str, Any] = {**_FLEET, "model": model, "host_memory": _HOST.get(model)}
        found = prospect_of(SimulateOptions(**shared))
        for peers in _UNSTEADY_PEERS:
            rounds = _UNSTEADY_ROUNDS // peers
            settings = SimulateOptions(**{**shared, "peers": peers, "rounds": rounds})
            rows += [
                {"model": model, "peers": peers, **row}
                for row in fleet_rows(settings, found, _UNSTEADY_BITS_PER_S)
            ]
        progress(f"{model}: unsteady peers")
    return rows


def _fleet(settings: SimulateOptions, found: Prospect) -> Result:
    started_s = time.process_time()
    (row,) = fleet_rows(settings, found, [_FLEET_BITS_PER_S])
    took_s = time.process_time() - started_s
    names = ("model", "peers", "wire", "group", "stay", "away", "spread")
    return {**row, **{name: getattr(settings, name) for name in names}, "took_s": took_s}


def _scale(found: Prospect, quick: bool) -> list[Result]:
    rows = []
    for peers, group in _SCALE[:3] if quick else _SCALE:
        varied = {**_FLEET, "peers": peers, "group": group, "rounds": _SCALE_ROUNDS}
        rows.append(_fleet(SimulateOptions(**varied), found))
        progress(f"{peers} peers, groups of {group or 'all'}: {rows[-1]['took_s']:.1f} s")
    return rows


_ROWS, _WIDTH = 2048, 2048
"""A micro-batch of gpt3-xl: larger than the processor's cache, as on a GPU."""
_MEMBERS = 16
_CONTRIBUTIONS = 4
"""In the mean that is decoded: sparse formats decode one of more a little slower."""
_REPEATS = 5


def measured_encoding() -> dict[str, Any]:
    """Return what is `used` and what was `measured`, of activations and of a swarm's formats."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copies = {wire.name: _copies(wire.name) for wire in ACTIVATION_WIRES}
        rates = {name: _elements_per_s(name) for name in ELEMENTS_PER_S}
    finally:
        torch.set_num_threads(threads)
    return {
        "activation_copies": {
            "used": {wire.name: wire.copies for wire in ACTIVATION_WIRES},
            "measured": copies,
        },
        "elements_per_s": {"used": dict(ELEMENTS_PER_S), "measured": rates},
    }


def _copies(wire: str) -> float:
    """Return encoding and decoding activations as a multiple of copying them."""
    values = torch.randn(_ROWS, _WIDTH)
    into = torch.empty_like(values)
    coded_s = _fastest_s(lambda: decode(encode(values, wire), wire, values.shape))
    return coded_s / _fastest_s(lambda: into.copy_(values))


def _elements_per_s(name: str) -> float:
    """Return how many elements of a fragment a member of a round gets through."""
    codec = codec_named(name)
    mean_codec = codec.for_mean(_MEMBERS, 0)
    values, out = torch.randn(PIECE_ELEMENTS), torch.empty(PIECE_ELEMENTS)
    total = torch.zeros(PIECE_ELEMENTS)
    for _ in range(_CONTRIBUTIONS):
        codec.decode(codec.encode(torch.randn(PIECE_ELEMENTS)), out)
        total.add_(out)
    part = total[: PIECE_ELEMENTS // _MEMBERS].clone()
    mean = mean_codec.encode(total)

    def work() -> None:
        codec.decode(codec.encode(values), out)
        total.add_(out)
        mean_codec.encode(part)
        mean_codec.decode(mean, out)

    return PIECE_ELEMENTS / _fastest_s(work)


def _fastest_s(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_REPEATS):
        started_s = time.thread_time()  # others may want the core, too
        work()
        times_s.append(time.thread_time() - started_s)
    return min(times_s)

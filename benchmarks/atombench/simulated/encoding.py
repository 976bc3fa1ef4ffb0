"""What encoding costs on this machine, beside what the simulations take it to cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from atombench.pipeline.pipeline import decode, encode
from atomresearch.simulation.encoding import ACTIVATION_WIRES, ELEMENTS_PER_S
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.codecs.slices import PIECE_ELEMENTS

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

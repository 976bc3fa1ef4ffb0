"""Hashes of pieces and of pairs: compiled and by the library, the same bytes."""

from __future__ import annotations

import ctypes
from unittest.mock import patch

import pytest
import torch
from blake3 import blake3

from atomtrain.native import build, library
from atomtrain.swarm.codecs.hashes import HASH_BYTES, pair_hashes, piece_hashes

CORES = {
    "none": None,
    "this processor's": library.core(),
    "any processor's": ctypes.CDLL(str(build.library_path("DEFAULT"))),
}


def hashed(data: bytes) -> bytes:
    return bytes(blake3(data).digest())[:HASH_BYTES]


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "core", lambda: CORES[request.param])


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("elements", [8, 16, 64, 256, 512, 1024, 4096, 32768])
def test_pieces_are_hashed_as_the_library_does(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    for whole, more in ((0, 0), (0, 1), (1, 0), (2, elements - 1), (16, 0), (17, 3), (35, 1)):
        values = torch.randn(whole * elements + more, generator=generator)
        data, step = values.numpy().tobytes(), 4 * elements
        pieces = [data[start : start + step] for start in range(0, len(data), step)]
        assert piece_hashes(values, elements) == b"".join(map(hashed, pieces))


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("pairs", [0, 1, 15, 16, 17, 100])
def test_pairs_are_hashed_as_the_library_does(pairs: int) -> None:
    below = torch.arange(2 * HASH_BYTES * pairs).mul(37).to(torch.uint8).numpy().tobytes()
    step = 2 * HASH_BYTES
    each = [below[start : start + step] for start in range(0, len(below), step)]
    assert pair_hashes(below) == b"".join(hashed(b"n" + pair) for pair in each)


def test_most_are_hashed_by_the_compiled_core() -> None:
    with patch("atomtrain.swarm.codecs.hashes.hash_of") as one_by_one:
        piece_hashes(torch.zeros(64 * 64), 64)
        pair_hashes(bytes(64 * HASH_BYTES))
    assert not one_by_one.called

"""ATOM beside a pipeline, both simulated, of peers that average as those of a run."""

from __future__ import annotations

import math

import pytest

from atomresearch.simulation.compare import compare
from atomresearch.simulation.site import fragments_of
from atomtrain.errors import ConfigError
from atomtrain.training.setup.peering import joined
from tests.support.pipeline_works import site


def test_a_pipeline_on_a_fast_link_loses_only_its_bubble() -> None:
    result = compare(site(4), 1e12, 0.0)
    assert result.pipeline is not None
    # Two stages of 12 s a micro-batch, 16 of them: 17 times 12 s.
    assert result.pipeline.stages == 2
    assert result.pipeline.tokens_per_s == pytest.approx(2 * 1600 / (17 * 12.0), rel=1e-6)
    assert result.ratio == result.atom.tokens_per_s / result.pipeline.tokens_per_s


def test_a_slow_link_bounds_the_pipeline_and_not_atom() -> None:
    fast, slow = compare(site(4), 1e12, 0.0), compare(site(4), 1e3, 0.0)
    assert slow.atom.tokens_per_s == fast.atom.tokens_per_s
    assert slow.pipeline is not None
    assert fast.pipeline is not None
    # A token is 104 bytes each way, on two pipelines.
    assert slow.pipeline.tokens_per_s <= 2 * 0.955 * 1e3 / (8 * 104)
    assert slow.pipeline.tokens_per_s < fast.pipeline.tokens_per_s
    assert slow.atom.averaged_every_s > fast.atom.averaged_every_s


def test_what_encoding_takes_decides_how_activations_travel() -> None:
    # 10,000 values of a micro-batch take longer to encode with 8 bits than to compute.
    fast, slow = (compare(site(4, memory_bytes_per_s=1e5), rate, 0.0) for rate in (1e9, 1e3))
    free = compare(site(4), 1e3, 0.0)
    assert fast.pipeline is not None
    assert slow.pipeline is not None
    assert free.pipeline is not None
    assert (fast.pipeline.wire, slow.pipeline.wire) == ("bfloat16", "int8")
    assert slow.pipeline.tokens_per_s <= free.pipeline.tokens_per_s


def test_little_memory_makes_stages_recompute_and_then_more_of_them() -> None:
    roomy = compare(site(4), 1e12, 0.0).pipeline
    # The state of four layers and the activations of four, but not of eight.
    tight = compare(site(4, device_memory_bytes=4 * 16_000 + 300_000), 1e12, 0.0).pipeline
    assert roomy is not None
    assert tight is not None
    assert not roomy.recompute
    assert tight.recompute or tight.stages > roomy.stages
    assert tight.device_bytes <= 4 * 16_000 + 300_000


def test_what_fits_nowhere_is_said() -> None:
    result = compare(site(4, device_memory_bytes=16_000), 1e9, 0.0)
    assert result.pipeline is None
    assert result.ratio is None
    assert result.atom.tokens_per_s > 0


def test_a_longer_way_never_helps_the_pipeline() -> None:
    rates = []
    for way_s in (0.0, 0.1, 1.0):
        found = compare(site(4), 1e6, way_s).pipeline
        assert found is not None
        rates.append(found.tokens_per_s)
    assert rates == sorted(rates, reverse=True)
    assert math.isfinite(rates[0])


def test_one_peer_is_no_network() -> None:
    with pytest.raises(ConfigError, match="at least 2 peers"):
        site(1)


_PIECE = 16 << 20
"""Elements of the engine's largest fragment, of 64 MiB."""


@pytest.mark.parametrize("local_steps", [1, 4, 30, 91, 1000])
@pytest.mark.parametrize("pieces", [4, 30, 91, 2000])
def test_fragments_are_joined_as_a_run_joins_them(pieces: int, local_steps: int) -> None:
    assert fragments_of(pieces * _PIECE, local_steps) == len(joined([_PIECE] * pieces, local_steps))


def test_a_small_model_has_a_few_fragments() -> None:
    assert fragments_of(1000, local_steps=30) == 4

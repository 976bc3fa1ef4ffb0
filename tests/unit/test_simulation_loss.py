"""What a connection carries where packets get lost."""

from __future__ import annotations

import math

import pytest

from atomtrain.simulation.loss import connection_bits_per_s


def test_without_loss_or_way_the_link_s_rate_counts() -> None:
    assert connection_bits_per_s(1e8, 0.1, 0.0) == 1e8
    assert connection_bits_per_s(1e8, 0.0, 0.01) == 0.99e8
    assert connection_bits_per_s(math.inf, 0.1, 0.01) < math.inf


def test_loss_on_a_long_way_leaves_little() -> None:
    # 12 packets of 1448 bytes in each round trip.
    lossy = connection_bits_per_s(1e8, 0.1, 0.01)
    assert lossy == pytest.approx(math.sqrt(150) * 1448 * 8 / 0.1)
    # Where windows are large, CUBIC's are larger than Reno's.
    long = connection_bits_per_s(1e10, 0.1, 1e-6)
    assert long > math.sqrt(1.5e6) * 1448 * 8 / 0.1


@pytest.mark.parametrize("way_s", [0.01, 0.1])
def test_more_loss_never_carries_more(way_s: float) -> None:
    rates = [connection_bits_per_s(1e9, way_s, share) for share in (0, 1e-5, 1e-4, 1e-3, 1e-2)]
    assert rates == sorted(rates, reverse=True)

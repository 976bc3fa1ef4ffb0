"""Where two rates of tokens cross."""

from __future__ import annotations

import pytest

from atombench.pages.break_even import break_even_bits_per_s


def rows(*points: tuple[float, float]) -> list[dict[str, float]]:
    return [{"link_bits_per_s": rate, "ratio": ratio} for rate, ratio in points]


def test_between_two_links_it_lies_where_powers_cross() -> None:
    # The ratio falls as 1 / rate: 2 at 50, 1 at 100.
    assert break_even_bits_per_s(rows((200.0, 0.5), (50.0, 2.0))) == pytest.approx(100.0)


def test_a_pipeline_may_win_everywhere_or_nowhere() -> None:
    assert break_even_bits_per_s(rows((10.0, 0.9), (100.0, 0.8))) == 0.0
    assert break_even_bits_per_s(rows((10.0, 3.0), (100.0, 1.0))) is None
    assert break_even_bits_per_s([]) is None


def test_of_several_crossings_the_last_counts() -> None:
    points = rows((1.0, 4.0), (10.0, 0.9), (100.0, 1.1), (1000.0, 0.9))
    found = break_even_bits_per_s(points)
    assert found is not None
    assert 100 < found < 1000

"""Ways to average that `atom bench means` compares: what each counts of contributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atombench.liars import means


def _contributions() -> list[Tensor]:
    """Return five that are alike, the second nearest to all, and two that are the first's
    opposite."""
    torch.manual_seed(0)
    true = torch.randn(64)
    honest = [true + off * torch.randn(64) for off in (0.3, 0.01, 0.3, 0.3, 0.3)]
    return [*honest, -honest[0], -9 * honest[0]]


def test_krum_takes_the_contribution_that_is_nearest_to_the_others() -> None:
    assert means._krum(_contributions(), [1] * 7) == (0, 1, 0, 0, 0, 0, 0)


def test_several_krum_leaves_out_a_third() -> None:
    shares = means._several_krum(_contributions(), [1] * 7)
    assert shares == pytest.approx([0.2] * 5 + [0, 0])
    weighed = means._several_krum(_contributions(), [1, 2, 1, 1, 1, 1, 1_000_000])
    assert weighed[5:] == (0, 0)
    assert weighed[1] == pytest.approx(1.25 * weighed[0]), "no weight is above 1.25 medians"


def test_the_geometric_median_minimises_the_sum_of_distances() -> None:
    values, weights = _contributions(), [1] * 7
    shares = means._geometric_median(values, weights)
    assert sum(shares) == pytest.approx(1.0)

    def distance(centre: Tensor) -> float:
        return sum(float((value - centre).norm()) for value in values)

    median = sum(share * value for share, value in zip(shares, values, strict=True))
    assert isinstance(median, Tensor)
    for value in (*values, torch.stack(values).mean(0)):
        assert distance(median) < distance(value) * 1.001
    for step in torch.randn(20, 64):
        assert distance(median) < distance(median + 0.05 * step)


def test_a_running_mean_is_of_each_fragment() -> None:
    knows = means._running_mean()
    one, other = torch.ones(3), torch.full((3,), 5.0)
    assert knows(0, one)[0].tolist() == [1, 1, 1]
    assert knows(1, other)[0].tolist() == [5, 5, 5]
    assert knows(0, other)[0].tolist() == [3, 3, 3]
    assert knows(0, one)[0].tolist() == [2, 2, 2]

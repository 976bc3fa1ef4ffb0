"""Fake tensors of which the data are known: numbers, shapes and what is written in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from atomtrain.analysis.layers.known_data import known_data


def sizes_of(grid: Tensor, features: Tensor) -> list[int]:
    """Divide features into as many as the grid says, as models do."""
    return [len(part) for part in features.split(grid.prod(-1).tolist())]


def test_what_data_decide_is_known_where_they_are() -> None:
    data = torch.tensor([[1, 2, 2], [1, 1, 3]])
    with FakeTensorMode():
        grid, features = torch.empty(2, 3, dtype=torch.int64), torch.empty(7, 5)
        with known_data([(grid, data)]):
            assert sizes_of(grid, features) == [4, 3]
        with pytest.raises(DataDependentOutputException):
            sizes_of(grid, features)


def test_writing_in_place_and_numbers_in_code_are_followed() -> None:
    data = torch.tensor([4, 5, 6])
    with FakeTensorMode():
        given, weights = torch.empty(3, dtype=torch.int64), torch.empty(3)
        with known_data([(given, data)]):
            made = torch.zeros(2, 3, dtype=torch.int64)
            made[1] = given + torch.tensor([1, 0, 0])
            made[0, 1] += 7
            assert made.tolist() == [[0, 7, 0], [5, 5, 6]]
            assert torch.tensor([made[0, 1], 2]).tolist() == [7, 2]
            unknown = given * weights
            with pytest.raises(DataDependentOutputException):
                unknown.tolist()


def test_what_is_overwritten_by_something_unknown_is_unknown() -> None:
    data = torch.ones(2)
    with FakeTensorMode():
        given, weights = torch.empty(2), torch.empty(2)
        with known_data([(given, data)]):
            assert given.tolist() == [1, 1]
            given.add_(weights)
            with pytest.raises(DataDependentOutputException):
                given.tolist()


def test_what_shares_memory_with_something_overwritten_is_unknown_too() -> None:
    data = torch.ones(2)
    with FakeTensorMode():
        given, weights = torch.empty(2), torch.empty(1)
        with known_data([(given, data)]):
            first, other = given[:1], given + 1
            first.add_(weights)
            assert other.tolist() == [2, 2]
            with pytest.raises(DataDependentOutputException):
                given.tolist()


def test_the_data_themselves_are_not_written_over() -> None:
    data = torch.ones(2)
    with FakeTensorMode():
        given = torch.empty(2)
        with known_data([(given, data)]):
            given.add_(1)
            assert given.tolist() == [2, 2]
    assert data.tolist() == [1, 1]

"""Batches to evaluate on: counted, but never all at once where they have images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atomtrain.data.sampler import Batch, Images
from atomtrain.training.tools.evaluation import counted_unless_large


@pytest.mark.parametrize("images", [None, Images([{"pixel_values": torch.zeros(1, 3)}])])
def test_images_are_read_when_their_batch_is_due(images: Images | None) -> None:
    read: list[int] = []

    def batches() -> Iterator[Batch]:
        for number in range(4):
            read.append(number)
            yield Batch(torch.zeros(1, 2), torch.zeros(1, 2), images=images)

    found = counted_unless_large(batches())
    assert read == ([0, 1, 2, 3] if images is None else [0])
    assert len(list(found)) == 4
    assert list(counted_unless_large(iter(()))) == []

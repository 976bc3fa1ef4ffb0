"""Fragments: runs of whole layers of the host's parameters, as the swarm averages them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.state.precision import Masters
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.layout import Layout

_LARGEST_BYTES = 64 << 20
_LEAST_FRAGMENTS = 4
_FLOAT32_BYTES = 4


def fragment_ranges(layout: Layout) -> list[tuple[int, int]]:
    """Divide an arena into byte ranges of whole layers, in order and without gaps."""
    most_bytes = min(_LARGEST_BYTES, -(-layout.total_bytes // _LEAST_FRAGMENTS))
    ends = [stop for _, stop in layout.layers] + [s.stop_bytes for s in layout.shared]
    ranges: list[tuple[int, int]] = []
    start = last = 0
    for end in ends:
        if end - start > most_bytes and last > start:
            ranges.append((start, last))
            start = last
        last = end
    return [*ranges, (start, last)] if last > start else ranges


def element_bytes(chain: Chain) -> int:
    """Return the bytes of a trainable parameter in the arena: 4 of float32, 2 of 16-bit types.

    Raises:
        ConfigError: the parameters are not all of one of them.
    """
    types = {parameter.dtype for parameter in chain.parameters if parameter.requires_grad}
    if types == {torch.float32}:
        return _FLOAT32_BYTES
    if types in ({torch.bfloat16}, {torch.float16}):
        return _FLOAT32_BYTES // 2
    raise ConfigError(
        f"the model mixes {', '.join(sorted(map(str, types)))}; fragments are of models whose "
        "trainable parameters are all of one type of 32 or 16 bits: convert it with model.float()"
    )


class Fragment:
    """Access to the trainable parameters of a range, as float32."""

    def __init__(
        self, chain: Chain, layout: Layout, arena: Tensor, start_bytes: int, stop_bytes: int
    ) -> None:
        self._each_bytes = element_bytes(chain)
        # Where nothing is frozen, gradients and parameters lie alike.
        places = layout.gradients
        as_is = places is layout and self._each_bytes == _FLOAT32_BYTES
        self._view = arena[start_bytes:stop_bytes].view(torch.float32) if as_is else None
        self._elements = (stop_bytes - start_bytes) // self._each_bytes
        self._places: list[tuple[nn.Parameter, int]] = [
            (parameter, (places.offsets[id(parameter)] - start_bytes) // self._each_bytes)
            for parameter in chain.parameters
            if start_bytes <= places.offsets.get(id(parameter), -1) < stop_bytes
            and parameter.numel()
        ]

    @property
    def places(self) -> list[tuple[nn.Parameter, int]]:
        """Every parameter with its first element in the range."""
        return list(self._places)

    @contextmanager
    def view(self, masters: Masters) -> Iterator[Tensor]:
        """Give the parameters in one buffer: the arena itself, or masters that go back at the end.

        Going back is exact: what nobody changed keeps its bits. After an error nothing goes back.

        Yields:
            1-D float32.
        """
        if self._view is not None:
            yield self._view
            return
        buffer = torch.zeros(self._elements)
        for parameter, index in self._places:
            self._part(buffer, parameter, index).copy_(masters.read(parameter))
        yield buffer
        for parameter, index in self._places:
            masters.write(parameter, self._part(buffer, parameter, index))

    def _part(self, buffer: Tensor, parameter: nn.Parameter, index: int) -> Tensor:
        return buffer[index : index + parameter.numel()].view(parameter.shape)

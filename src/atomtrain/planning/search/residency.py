"""Which blocks may be resident in the plans of a space, where they are updated, when they come.

`space.py` says which sets there are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.plan import Request

_MOST_CANDIDATES = 3
_AWKWARD_SHARE = 32
"""Blocks below this part of the largest one change nothing by where they are."""
_SHARES = 8
"""Into how many steps the number of other blocks on the device is divided."""


class Residency(NamedTuple):
    """Which blocks are resident."""

    blocks: tuple[int, ...]
    on_device: tuple[int, ...]
    """Those whose optimizer runs on the device."""
    early: tuple[int, ...] = ()
    """Those that come in pieces ahead of their first user."""


class Residencies:
    """The sets of resident blocks that a request allows."""

    def __init__(
        self,
        costs: ChainCosts,
        layout: Layout,
        memory: MemoryModel,
        request: Request,
        host_used: Collection[int],
    ) -> None:
        """`host_used` are blocks of which layers on the host use a part: not for the device."""
        self._costs, self._layout, self._memory = costs, layout, memory
        self._request, self._host_used = request, host_used
        self._layers = len(costs.layers)

    def all(self) -> list[Residency]:
        """Return the sets, which of their blocks are updated on the device, and which come
        early."""
        some = self._updated_here_or_there()
        early = (one._replace(early=self._early(one)) for one in some)
        return [*some, *(one for one in early if one.early)]

    def _early(self, residency: Residency) -> tuple[int, ...]:
        """Return the blocks that may come ahead of their first user."""
        if self._request.clips or not self._request.early:
            return ()
        layout = self._layout
        # With no more to load than most visits have it is covered as they are.
        usual_bytes = sorted(map(layout.block_bytes, range(self._layers)))[self._layers // 2]
        return tuple(
            block
            for block in residency.blocks
            if block not in residency.on_device
            and layout.block_bytes(block) > usual_bytes
            and layout.users(block)[:1] > (0,)
        )

    def _updated_here_or_there(self) -> list[Residency]:
        """Return the sets of resident blocks, and which of them are updated on the device."""
        request, fixed = self._request, self._request.device_blocks
        if request.resident is not None:
            return self._updated_anywhere(tuple(sorted(request.resident)))
        candidates = self._awkward()
        found = []
        for chosen in _subsets(candidates):
            blocks = sorted({*chosen, *(fixed or ())})
            found += self._updated_anywhere(tuple(blocks))
        if fixed is None and self._memory.updates_on_device:
            found += self._spread(candidates)
        return list(dict.fromkeys(found))

    def _awkward(self) -> list[int]:
        """Return the largest shared weights and layers that are the only ones of their kind."""
        kinds = Counter(cost.kind for cost in self._costs.layers)
        single = [i for i, cost in enumerate(self._costs.layers) if kinds[cost.kind] == 1]
        blocks = [*single, *range(self._layers, self._layout.blocks)]
        sizes = [self._layout.block_bytes(block) for block in range(self._layout.blocks)]
        least_bytes = max(1, max(sizes) // _AWKWARD_SHARE)
        blocks = [block for block in blocks if sizes[block] >= least_bytes]
        blocks.sort(key=lambda block: (-self._layout.block_bytes(block), block))
        return sorted(blocks[:_MOST_CANDIDATES])

    def _updated_anywhere(self, blocks: tuple[int, ...]) -> list[Residency]:
        """Return every choice of who of the resident blocks is updated on the device."""
        fixed = self._request.device_blocks
        if fixed is not None:
            return [Residency(blocks, tuple(sorted(fixed)))]
        if not self._memory.updates_on_device:
            return [Residency(blocks, ())]
        able = [block for block in blocks if block not in self._host_used]
        some = _subsets(able) if len(able) <= _MOST_CANDIDATES else [(), tuple(able)]
        return [Residency(blocks, there) for there in some]

    def _spread(self, candidates: Collection[int]) -> list[Residency]:
        """Return those with more blocks on the device than the awkward ones."""
        able = [b for b in range(self._layout.blocks) if b not in self._host_used]
        others = [b for b in able if b not in candidates and self._layout.block_bytes(b)]
        counts = sorted({-(-len(others) * share // _SHARES) for share in range(1, _SHARES + 1)})
        found = []
        for count, chosen in itertools.product(counts, _subsets([*candidates])):
            if not count or not set(chosen) <= set(able):
                continue
            spread = [others[(2 * i + 1) * len(others) // (2 * count)] for i in range(count)]
            blocks = tuple(sorted((*chosen, *spread)))
            found.append(Residency(blocks, blocks))
        return found


def _subsets(blocks: list[int]) -> list[tuple[int, ...]]:
    return [
        chosen
        for count in range(len(blocks) + 1)
        for chosen in itertools.combinations(blocks, count)
    ]

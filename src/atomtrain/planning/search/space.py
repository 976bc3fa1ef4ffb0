"""The space of plans that the search covers, cut into families that differ in one way only.

A plan of the space has

- any forward and any backward partition, everything below the turn recomputed; or the same
  partition for both, and for each segment its own choice: the segments next to the turn are kept
  (what is kept last is held for the shortest time), any others are recomputed, or offloaded if
  they fill the window of transfers; slots and gradient buffers take the largest segment of both;
- one or two slots, one or two gradient buffers (or as many as were asked for), never more than
  there are segments to fill them;
- values at the cuts on the device or on the host;
- as resident blocks any of the shared weights and of the layers that are the only ones of their
  kind (embedding, head), among the three largest of these that have at least a 32nd of the largest
  block's bytes, each updated on the host or on the device;
- or some of the first kind and an eighth, two eighths, ..., all of the other blocks, evenly spread
  over the chain, all of them updated on the device.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.planning.cost.costing import Costing, Place
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.plan.shape import Activation, Boundary, Phase, Shape

_MOST_CANDIDATES = 3
_AWKWARD_SHARE = 32
"""Blocks below this part of the largest one change nothing by where they are."""
_SHARES = 8
"""Into how many steps the number of other blocks on the device is divided."""


class Residency(NamedTuple):
    blocks: tuple[int, ...]
    on_device: tuple[int, ...]
    """Those whose optimizer runs on the device."""


class Residencies:
    """The sets of resident blocks that a request allows."""

    def __init__(
        self,
        costs: ChainCosts,
        memory: MemoryModel,
        request: Request,
        host_used: Collection[int],
    ) -> None:
        """`host_used` are blocks of which layers on the host use a part: not for the device."""
        self._costs, self._layout, self._memory = costs, memory.layout, memory
        self._request, self._host_used = request, host_used
        self._layers = len(costs.layers)

    def all(self) -> list[Residency]:
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
        fixed = self._request.device_blocks
        if fixed is not None:
            return [Residency(blocks, tuple(sorted(fixed)))]
        if not self._memory.updates_on_device:
            return [Residency(blocks, ())]
        able = [block for block in blocks if block not in self._host_used]
        some = _subsets(able) if len(able) <= _MOST_CANDIDATES else [(), tuple(able)]
        return [Residency(blocks, there) for there in some]

    def _spread(self, candidates: Collection[int]) -> list[Residency]:
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


Mask = NDArray[np.bool_]
Bytes = NDArray[np.float64]

_COMPARED = 3
"""With how many larger slot sizes one is compared; more would find few others to leave out."""
_BELOW = Phase.FORWARD, Phase.BACKWARD
_BOUNDARIES: tuple[Boundary, ...] = ("device", "host")


class Family(NamedTuple):
    """Plans that differ in their partitions and in what they keep or offload."""

    resident: tuple[int, ...]
    slots: int
    gradient_buffers: int
    boundary: Boundary
    whole: bool
    """Only the plan of a single segment; it fills one slot and one gradient buffer."""
    on_device: tuple[int, ...] = ()
    """Resident blocks that are updated on the device."""
    lean: bool = False
    """No family: as fast as this one, with the memory of the leanest of its group."""

    @property
    def place(self) -> Place:
        return Place(frozenset(self.resident), self.boundary, frozenset(self.on_device))


class Work(NamedTuple):
    """Bytes that visits need beside slots and buffers; `[start, stop]`."""

    forward: Bytes
    backward: Bytes
    turn: Bytes
    """`[start]`."""
    keep: Bytes
    """The most that the two visits to a segment need if its graphs are kept; infinite where they
    must not be."""
    offload: Bytes
    """The same if what is saved goes to the host, without the window."""
    kept: Bytes
    """What keeping a segment's graphs adds to the visits between."""


class Allowed(NamedTuple):
    forward: Mask
    """`[start, stop]`."""
    backward: Mask
    turn: Mask
    """`[start]`."""

    def within(self, other: Allowed) -> bool:
        """Return whether everything that is allowed here is allowed there too."""
        return all(bool(np.all(there | ~here)) for here, there in zip(self, other, strict=True))


class Space:
    def __init__(
        self,
        costs: ChainCosts,
        memory: MemoryModel,
        costing: Costing,
        request: Request,
        host_used: Collection[int] = (),
    ) -> None:
        """`host_used` are blocks of which layers on the host use a part: not for the device."""
        self.layers = len(costs.layers)
        self.memory, self.costing, self.request = memory, costing, request
        self._residencies = Residencies(costs, memory, request, host_used)
        self._sizes: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        self._fixed: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._work: dict[tuple[Boundary, bool], Work] = {}
        self._least_work: dict[bool, Work] = {}

    @cached_property
    def families(self) -> list[Family]:
        request = self.request
        slots = (request.slots,) if request.slots else (2, 1)
        buffers = (request.gradient_buffers,) if request.gradient_buffers else (2, 1)
        several = self.layers > 1 and request.segments != 1
        families = []
        kinds = itertools.product(self._boundaries, self.residencies)
        for boundary, (resident, there) in kinds:
            if several:
                families += [
                    Family(resident, k, g, boundary, False, there)
                    for k, g in itertools.product(slots, buffers)
                ]
            if request.segments in (None, 1):
                families.append(Family(resident, 1, 1, boundary, True, there))
        return families

    def has(self, shape: Shape) -> bool:
        """Return whether a shape is in the space, if memory were endless."""
        request, waiting = self.request, shape.waiting
        able = {"keep", "offload"} if request.offload else {"keep"}
        if (
            shape.backward_bounds[-1] != self.layers
            or request.segments not in (None, shape.segments)
            or not set(waiting.values()) <= (able if self.mixes else set())
            or not all(np.isfinite(self.memory.saved_table[layers]) for layers in waiting)
        ):
            return False
        most = len(shape.forward_bounds), shape.segments
        return any(
            family.resident == shape.resident_blocks
            and family.on_device == shape.device_blocks
            and family.boundary == shape.boundary
            and family.whole == (shape.segments == 1)
            and min(family.slots, most[0]) == shape.slots
            and min(family.gradient_buffers, most[1]) == shape.gradient_buffers
            for family in self.families
        )

    @property
    def groups(self) -> list[tuple[Family, ...]]:
        """The families, together those that differ only in gradient buffers and in where values
        wait. The first of a group is the fastest with any partition."""
        groups: dict[Family, list[Family]] = {}
        for family in self.families:
            key = family._replace(gradient_buffers=0, boundary="device")
            groups.setdefault(key, []).append(family)
        return [tuple(group) for group in groups.values()]

    @cached_property
    def _boundaries(self) -> tuple[Boundary, ...]:
        """Where values may wait: not on the host if no visit needs less device memory for it, as
        with one micro-batch. It never takes less time."""
        if self.request.boundary:
            return (self.request.boundary,)
        fastest, *others = _BOUNDARIES
        return (fastest, *(other for other in others if self._leaner(other, fastest)))

    def _leaner(self, one: Boundary, other: Boundary) -> bool:
        works = [[self._work_of(at, there) for at in (one, other)] for there in (False, True)]
        return any(bool((a < b).any()) for pair in works for a, b in zip(*pair, strict=True))

    @property
    def recomputes(self) -> bool:
        """Whether plans in which everything is recomputed are asked for."""
        return self.request.activations in (None, "recompute")

    @property
    def mixes(self) -> bool:
        """Whether plans in which something is kept or offloaded are asked for."""
        return self.request.activations != "recompute"

    @cached_property
    def residencies(self) -> list[Residency]:
        """The sets of resident blocks, and which of them are updated on the device."""
        return self._residencies.all()

    def slot_sizes(self, family: Family) -> list[int]:
        """Return the slot sizes that plans of a family can have, in increasing order."""
        key = family.resident, family.whole
        if key not in self._sizes:
            sizes = self.costing.segment_bytes(frozenset(family.resident))
            if family.whole:
                self._sizes[key] = [int(sizes[0, -1])]
            else:
                start, stop = np.triu_indices(self.layers + 1, 1)
                single = max(int(sizes[i, i + 1]) for i in range(self.layers))
                self._sizes[key] = [int(n) for n in np.unique(sizes[start, stop]) if n >= single]
        return self._sizes[key]

    def slot_sizes_within(self, family: Family, device_bytes: int) -> list[int]:
        """Return the slot sizes with which less is held than a limit, in increasing order."""
        sizes = self.slot_sizes(family)
        # A larger slot holds more.
        count = bisect.bisect_left(sizes, device_bytes, key=lambda n: self.held_bytes(family, n))
        return sizes[:count]

    def least_held(self, family: Family) -> int:
        return self.held_bytes(family, self.slot_sizes(family)[0])

    def held_bytes(self, family: Family, slot_bytes: int) -> int:
        key = family.resident, family.on_device
        if key not in self._fixed:
            self._fixed[key] = self.memory.fixed_bytes(*key)
        traffic = self.costing.traffic
        gradient_bytes = traffic.most_gradient_bytes(frozenset(family.resident), slot_bytes)
        count = family.gradient_buffers
        if family.lean:
            count = min(count, self.request.gradient_buffers or 1)
        return family.slots * slot_bytes + count * gradient_bytes + self._fixed[key]

    def fits(self, family: Family, device_bytes: int) -> bool:
        """Return whether a plan of a family might fit a limit."""
        if self.least_held(family) >= device_bytes:
            return False
        sizes = self.slot_sizes_within(family, device_bytes)
        return bool(self.allowed_of(family, sizes, device_bytes).turn.any())

    def allowed_of(self, family: Family, slot_sizes: Sequence[int], device_bytes: int) -> Allowed:
        """Return a superset of what is allowed with any of these sizes, in increasing order."""
        left = device_bytes - self.held_bytes(family, slot_sizes[0])
        return self._within(family, slot_sizes[-1], left)

    def allowed(self, family: Family, slot_bytes: int, device_bytes: int) -> Allowed:
        """Return the segments with which a plan stays within a limit of device memory."""
        return self.allowed_of(family, [slot_bytes], device_bytes)

    def _within(self, family: Family, slot_bytes: int, left: int) -> Allowed:
        sizes = self.costing.segment_bytes(frozenset(family.resident))
        fitting = sizes <= slot_bytes
        work = self.work(family)
        forward = fitting & (work.forward <= left)
        backward = fitting & (work.backward <= left)
        turn = fitting[:, -1] & (work.turn <= left)
        if family.whole:
            turn[1:] = False
        else:
            turn[0] = False
        return Allowed(forward, backward, turn)

    def different(self, family: Family, device_bytes: int) -> Iterator[tuple[int, Allowed]]:
        """Yield slot sizes, largest first, but not those of which a larger one allows all too."""
        seen: list[Allowed] = []
        for slot_bytes in reversed(self.slot_sizes_within(family, device_bytes)):
            allowed = self.allowed(family, slot_bytes, device_bytes)
            if not allowed.turn.any() or any(allowed.within(other) for other in seen[-_COMPARED:]):
                continue
            seen.append(allowed)
            yield slot_bytes, allowed

    def work(self, family: Family) -> Work:
        there = bool(family.on_device)
        if not family.lean:
            return self._work_of(family.boundary, there)
        if there not in self._least_work:
            works = [self._work_of(boundary, there) for boundary in self._boundaries]
            self._least_work[there] = Work(*map(np.minimum.reduce, zip(*works, strict=True)))
        return self._least_work[there]

    def _work_of(self, boundary: Boundary, there: bool) -> Work:
        key = boundary, there and self.memory.device_scratch_bytes > 0
        if key not in self._work:
            self._work[key] = self._work_tables(*key)
        return self._work[key]

    def _work_tables(self, boundary: Boundary, there: bool) -> Work:
        memory = self.memory

        def both(activation: Activation) -> Bytes:
            tables = (memory.work_table(p, boundary, activation, there) for p in _BELOW)
            return np.maximum(*tables)

        kept = memory.saved_table
        sent = memory.sent_table
        fills = np.isfinite(sent) & (sent >= memory.saved.window_bytes)
        turn = memory.work_table(Phase.TURN, boundary, on_device=there)
        forward, backward = (memory.work_table(p, boundary, on_device=there) for p in _BELOW)
        keep = np.where(np.isfinite(kept), both("keep"), np.inf)
        offload = np.where(fills, both("offload"), np.inf)
        return Work(forward, backward, turn[:, -1], keep, offload, kept)

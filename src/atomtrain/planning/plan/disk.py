"""What of the host's state lies on disk, and what that takes of disk and memory.

Kinds of state go to disk in this order, each with those before it:

| kind | what | read a step | written a step |
|---|---|---|---|
| `moments` | the optimizer's state without masters | once | once |
| `masters` | exact values of bfloat16 parameters | once | once |
| `parameters` | what the device gets | for each load, and for the update | once |

Gradients stay in memory. They are dead once they are applied, so a disk would only carry them from
backward to the update of the same step: twice their bytes, and with clipping nothing less.

A block's state passes through a *staging slot*: read, updated in place, written. Blocks of common
size take turns in a few slots; the few larger ones (embedding, head) share one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import ConfigError, nearest
from atomtrain.planning.plan.layout import Layout

PAGE_BYTES = 4096
"""Direct I/O wants offsets, sizes and addresses that are multiples of it."""
LOAD_PIECE_BYTES = 16 << 20
"""Parameters are read for the device in pieces of this size, or of the largest block."""
LOAD_PIECES = 4
SLOTS = 3
"""One block is read, one is updated, one is written."""
_COMMON_SHARE = 0.75
"""Of the blocks; those larger than them use the slot for large ones."""

Kind = Literal["moments", "masters", "parameters"]
KINDS: tuple[Kind, ...] = ("moments", "masters", "parameters")
OnDisk = tuple[Kind, ...]
"""The first few of `KINDS`."""


class StateBytes(NamedTuple):
    """Bytes of each tensor of one parameter's optimizer state."""

    moments: tuple[int, ...]
    masters: tuple[int, ...] = ()


States = Mapping[int, StateBytes]
"""By the parameter's `id`."""


@dataclass(frozen=True, kw_only=True)
class DiskRequest:
    states: States
    on_disk: OnDisk | None = None
    """Exactly this, or `None` for as little as host memory demands."""


def on_disk_up_to(kind: str) -> OnDisk:
    """Return the kinds up to one of them; `nothing` gives none.

    Raises:
        ConfigError: there is no such kind.
    """
    names = ("nothing", *KINDS)
    if kind not in names:
        raise ConfigError(
            f"there is no kind of state {kind!r}.{nearest(kind, names)} Kinds: {', '.join(names)}"
        )
    return KINDS[: names.index(kind)]


def choices(request: DiskRequest | None) -> list[OnDisk]:
    """Return what may be on disk, least first."""
    if request is None:
        return [()]
    if request.on_disk is not None:
        return [request.on_disk]
    found: list[OnDisk] = [KINDS[:count] for count in range(len(KINDS) + 1)]
    if not any(state.masters for state in request.states.values()):
        found.remove(("moments", "masters"))  # the same as the moments alone
    return found


def paged(n_bytes: int) -> int:
    """Return a size rounded up to whole pages, bytes."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


def two_moments(chain: Chain) -> States:
    """Return the state of an optimizer that does not tell: two moments in the parameters' type."""
    return {
        id(p): StateBytes((p.numel() * p.element_size(),) * 2)
        for p in chain.parameters
        if p.requires_grad
    }


def tensors_on_disk(state: StateBytes, on_disk: OnDisk) -> tuple[int, ...]:
    """Return the bytes of each tensor of a parameter's state that is on disk."""
    moments = state.moments if "moments" in on_disk else ()
    return (*moments, *(state.masters if "masters" in on_disk else ()))


class BlockBytes(NamedTuple):
    """What is on disk of one block."""

    state: int
    """Whole pages for each tensor."""
    parameters: int


@dataclass(frozen=True)
class DiskUse:
    """What a choice means for a model."""

    on_disk: OnDisk
    blocks: tuple[BlockBytes, ...]
    saved_bytes: int
    """Host memory that state and parameters on disk do not take."""
    saved_state_bytes: int
    """State's part of it."""
    readers: int
    """How many devices load parameters from there, each through pieces of its own."""

    @property
    def slots(self) -> list[int]:
        """Bytes of each staging slot."""
        return staging_slots([sum(block) for block in self.blocks])

    @property
    def staging_bytes(self) -> int:
        """Host memory for what is on its way: staging slots, a state that is made, loads."""
        if not self.on_disk:
            return 0
        loads = self.readers * LOAD_PIECES * self.load_piece_bytes
        # An optimizer makes a block's first state in memory of its own.
        made = max((block.state for block in self.blocks), default=0)
        return sum(self.slots) + made + loads

    @property
    def load_piece_bytes(self) -> int:
        """Of each piece of the parameters that is read for the device; 0 if they are in memory."""
        return min(LOAD_PIECE_BYTES, max((b.parameters for b in self.blocks), default=0))

    @property
    def file_bytes(self) -> int:
        """What the disk must hold, and what is written a step."""
        return sum(sum(block) for block in self.blocks)


def disk_use(
    chain: Chain, layout: Layout, states: States, on_disk: OnDisk, devices: int = 1
) -> DiskUse:
    """Return what a choice means for a model that so many devices train."""
    state = [0] * layout.blocks
    saved = 0
    for parameter in chain.parameters:
        tensors = tensors_on_disk(states.get(id(parameter), StateBytes(())), on_disk)
        state[layout.block_of[id(parameter)]] += sum(map(paged, tensors))
        saved += sum(tensors)
    saved_state = saved
    whole = "parameters" in on_disk
    # A block need not begin at a page.
    sizes = [layout.block_bytes(block) for block in range(layout.blocks)]
    parameters = [paged(size) + PAGE_BYTES if whole and size else 0 for size in sizes]
    saved += layout.total_bytes if whole else 0
    blocks = tuple(BlockBytes(*both) for both in zip(state, parameters, strict=True))
    return DiskUse(on_disk, blocks, saved, saved_state, devices)


def staging_slots(records: Sequence[int]) -> list[int]:
    """Return the bytes of each staging slot for records of these sizes, the largest slot last."""
    sizes = sorted(size for size in records if size)
    if not sizes:
        return []
    common = sizes[math.ceil(_COMMON_SHARE * len(sizes)) - 1]
    large = [size for size in sizes if size > common]
    slots = [common] * min(SLOTS, len(sizes) - len(large))
    return slots + large[-1:]

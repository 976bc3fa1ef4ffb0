"""What becomes of each tensor that a layer saves: found out once, and the same ever after.

Most layers are a fixed list of operations (`Layer.fixed`), so autograd saves the same tensors in
the same order whenever the layer runs. The first time every operation is watched, to see what
backward can make again (`analysis/costs/rematerialization.py`). A script of that tells the next
times by the number of the saved tensor alone, and nothing is watched any more: on a GPU the thread
that hands over operations would else be what limits small layers. Layers that may do otherwise each
time are always watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.costs.rematerialization import (
    RematerializedOperation,
    RematerializedStorage,
    Step,
)
from atomtrain.analysis.costs.storages import View, seen_as, view_at
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.engine.execution.offload import (
    AnyStorage,
    Away,
    Parcel,
    SentStorage,
    arguments_of,
    needed_for,
)
from atomtrain.engine.execution.remaking import Argument, InSlot, Plan, planned

Key = tuple[int, bool, tuple[torch.Size, ...]]
"""Number of a layer in the chain, whether the model is in its other mode, shapes of its inputs."""


def key_of(number: int, layer: Layer, values: Sequence[Any]) -> Key | None:
    """Return for what runs of a layer on such values a script holds; `None` if for none."""
    if not layer.fixed:
        return None
    shapes = tuple([value.shape for value in values if isinstance(value, Tensor)])
    return number, in_other_mode(layer.module), shapes


def in_other_mode(module: nn.Module) -> bool:
    """Return whether the model is in another mode than that in which it is trained."""
    return module.mode.is_other if isinstance(module, GraphLayer) else not module.training


class ScriptError(RuntimeError):
    """A layer saved something else than the time before; no user's mistake leads to this."""


class _Entry(NamedTuple):
    """What becomes of one saved tensor."""

    at: int
    """Its number among those that the layer saves."""
    size: torch.Size
    keep: Callable[[Tensor], Tensor] | None = None
    """Where it stays on the device: what is kept of it."""
    place: int = -1
    """Where it lies in the segment's slot: the number of that place."""
    number: int = -1
    """Else the number of its storage among those of the layer."""
    view: View = View(torch.uint8, 0, torch.Size(), ())
    sends: bool = False
    """Whether its storage is sent, and was not met before."""


class Script:
    """What becomes of each tensor that one layer saves, in order."""

    def __init__(self) -> None:
        """Know of none yet."""
        self.entries: list[_Entry] = []
        self.uses: list[int] = []
        """Of each storage, the saved tensors in it, and what is made of it."""
        self.arguments: list[tuple[int, ...]] = []
        """The storages that each is made of; none where it is sent."""
        self.order: list[int] = []
        """The storages that are sent, in the order in which backward needs them, last one first."""
        self._made: dict[int, tuple[RematerializedOperation, int]] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._in_slot: dict[View, int] = {}
        self._places: dict[int, tuple[Tensor, list[Tensor]]] = {}
        # Only to learn:
        self._storages: list[AnyStorage] = []
        self._operations: dict[RematerializedOperation, RematerializedOperation] = {}

    def learn(self, tensor: Tensor, packed: Any, *, changing: bool) -> None:
        """Take note of what became of the next tensor that was saved; `changing` is copied."""
        at, size = len(self.entries), tensor.shape
        if isinstance(packed, Tensor):
            self.entries.append(_Entry(at, size, keep=_copied if changing else _alias))
        elif isinstance(packed, View):
            self.entries.append(_Entry(at, size, place=self._place(packed)))
        else:
            known, number = len(self._storages), self._number(packed.storage)
            sends = number == known and isinstance(packed.storage, SentStorage)
            self.entries.append(_Entry(at, size, None, -1, number, packed.view, sends))
            self.uses[number] += 1
            self.order += [self._number(one) for one in needed_for(packed.storage)]

    def learnt(self) -> None:
        """Let go of what was only needed to learn."""
        self.order = list(dict.fromkeys(reversed(self.order)))[::-1]
        self._storages.clear()
        self._operations.clear()

    def places(self, slot: Tensor) -> list[Tensor]:
        """Return the saved parameters in a slot, by the numbers of their places."""
        known = self._places.get(id(slot))
        if known is None:
            storage = slot.untyped_storage()
            known = slot, [view_at(storage, view) for view in self._in_slot]
            self._places[id(slot)] = known
        return known[1]

    def plan(self, number: int, there: int) -> Plan:
        """Return how a storage is made where others, a bit each, have been made already."""
        plan = self._plans.get((number, there))
        if plan is None:
            plan = self._plans[number, there] = planned(self._made, number, there)
        return plan

    def _place(self, view: View) -> int:
        return self._in_slot.setdefault(view, len(self._in_slot))

    def _number(self, storage: AnyStorage) -> int:
        for number, known in enumerate(self._storages):
            if known is storage:
                return number
        arguments: tuple[int, ...] = ()
        if isinstance(storage, RematerializedStorage):
            arguments = tuple(self._number(one) for one in arguments_of(storage))
            for argument in arguments:
                self.uses[argument] += 1
        number = len(self._storages)
        self._storages.append(storage)
        self.uses.append(0)
        self.arguments.append(arguments)
        if isinstance(storage, RematerializedStorage):
            self._made[number] = self._operation(storage.operation), storage.index
        return number

    def _operation(self, operation: RematerializedOperation) -> RematerializedOperation:
        if operation not in self._operations:
            self._operations[operation] = operation.on(self._argument)
        return self._operations[operation]

    def _argument(self, packed: Any) -> Any:
        if isinstance(packed, Away):
            return Argument(self._number(packed.storage), packed.view)
        if isinstance(packed, View):
            return InSlot(self._place(packed))
        if isinstance(packed, Step):
            return packed._replace(operation=self._operation(packed.operation))
        return packed


class Performance:
    """One run of a layer by its script, and what its backward makes of that."""

    def __init__(self, script: Script, parcel: Parcel | None) -> None:
        """Begin with the first saved tensor; without a `parcel` all are kept."""
        self._script, self._parcel = script, parcel
        self._next = iter(script.entries)
        storages = len(script.uses)
        self._sent: list[SentStorage | None] = [None] * storages
        self._used = bytearray(len(script.entries))
        # Of those that are made again:
        self._made: list[Tensor | None] = [None] * storages
        self._left = script.uses.copy()
        self._there = 0
        self._places: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        """Return what stands for the next tensor that is saved.

        Raises:
            ScriptError: it is not the one that the script has.
        """
        entry = next(self._next, None)
        if entry is None or tensor.shape != entry.size:
            raise ScriptError(f"a layer saved a tensor {list(tensor.shape)} that its script lacks")
        if entry.keep is not None:
            return entry.keep(tensor)
        if entry.sends:
            assert self._parcel is not None
            storage = self._parcel.send(tensor)
            storage.users += self._left[entry.number]
            self._sent[entry.number] = storage
        return entry

    def end(self) -> None:
        """Say that the layer has run.

        Raises:
            ScriptError: it saved less than its script has.
        """
        missing = next(self._next, None)
        if missing is not None:
            saved, of = missing.at, len(self._script.entries)
            raise ScriptError(f"a layer saved {saved} of {of} tensors")
        if self._parcel is not None:
            found = [self._sent[number] for number in self._script.order]
            self._parcel.note([one for one in found if one is not None])

    def come_back(self, slot: Tensor) -> None:
        """Say where the segment's parameters are in backward."""
        self._places = self._script.places(slot)

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor."""
        if isinstance(packed, Tensor):
            return packed
        entry: _Entry = packed
        if entry.place >= 0:
            return self._places[entry.place]
        tensor = self.storage_as(entry.number, entry.view)
        if not self._used[entry.at]:
            self._used[entry.at] = 1
            self._let_go(entry.number)
        return tensor

    def place(self, number: int) -> Tensor:
        """Return a parameter in the slot."""
        return self._places[number]

    def storage_as(self, number: int, view: View) -> Tensor:
        """Return a view of a storage, which comes or is made if it is not there."""
        sent = self._sent[number]
        if sent is not None:
            assert self._parcel is not None
            return seen_as(self._parcel.offload.use(sent), view)
        made = self._made[number]
        return seen_as(self._make(number) if made is None else made, view)

    def _make(self, number: int) -> Tensor:
        result: Tensor | None = None
        for one, made in self._script.plan(number, self._there).run(self):
            if self._left[one]:
                self._made[one] = made
                self._there |= 1 << one
            if one == number:
                result = made
        assert result is not None
        return result

    def _let_go(self, number: int) -> None:
        """Take note of a use; free on the device what has no more."""
        sent = self._sent[number]
        if sent is not None:
            assert self._parcel is not None
            sent.users -= 1
            self._parcel.offload.used(sent)
            return
        self._left[number] -= 1
        if not self._left[number]:
            self._made[number] = None
            self._there &= ~(1 << number)
            for argument in self._script.arguments[number]:
                self._let_go(argument)


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias without history: a graph must not hold its own outputs."""
    return tensor.data


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()

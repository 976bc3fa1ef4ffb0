"""What becomes of each tensor that a layer saves: found out once, and the same ever after.

Most layers are a fixed list of operations (`Layer.fixed`), so autograd saves the same tensors in
the same order whenever the layer runs. The first time every operation is watched, to see what
backward can make again (`analysis/costs/rematerialization.py`). A script of that tells the next
times by the number of the saved tensor alone, and nothing is watched any more. It serves where
there is not a program (`programs.py`). Layers that may do otherwise each time are always watched.
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
from atomtrain.analysis.costs.storages import View
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

Key = tuple[int, bool, tuple[tuple[torch.Size, tuple[int, ...], int | torch.SymInt], ...]]
"""Number of a layer in the chain, whether the model is in its other mode, shapes of its inputs, and
how they lie in memory, as then does what is saved."""


def key_of(number: int, layer: Layer, values: Sequence[Any]) -> Key | None:
    """Return for what runs of a layer on such values a script holds; `None` if for none.

    Under autocast the same layer saves tensors of other types.
    """
    if not layer.fixed or torch._C._is_any_autocast_enabled():
        return None
    lie = tuple([
        (value.shape, value.stride(), value.storage_offset())
        for value in values if isinstance(value, Tensor)
    ])  # fmt: skip
    return number, in_other_mode(layer.module), lie


def in_other_mode(module: nn.Module) -> bool:
    """Return whether the model is in another mode than that in which it is trained."""
    return module.mode.is_other if isinstance(module, GraphLayer) else not module.training


class ScriptError(RuntimeError):
    """A layer saved something else than the time before; no user's mistake leads to this."""


class _Argument(NamedTuple):
    """Stands, among the arguments of an operation in a script, for one of the layer's storages."""

    number: int
    view: View


class _Made(NamedTuple):
    """How a storage is made again."""

    operation: RematerializedOperation
    """With an `_Argument` for each saved tensor."""
    position: int
    arguments: tuple[int, ...]
    needed: tuple[int, ...]
    """Sent storages in the order in which backward needs them, the last one first."""


class _Entry(NamedTuple):
    """What becomes of one saved tensor."""

    size: torch.Size
    stands: Any = None
    """What stands for it always, where it lies in the segment's slot."""
    keep: Callable[[Tensor], Tensor] | None = None
    """Where it stays on the device: what is kept of it."""
    number: int = -1
    """Else the number of its storage among those of the layer."""
    view: View | None = None
    made: _Made | None = None
    """`None` where the storage is sent."""


class Script:
    """What becomes of each tensor that one layer saves, in order."""

    def __init__(self) -> None:
        """Know of none yet."""
        self.entries: list[_Entry] = []
        self._storages: list[AnyStorage] = []
        self._operations: dict[RematerializedOperation, RematerializedOperation] = {}

    def learn(self, tensor: Tensor, packed: Any, *, changing: bool) -> None:
        """Take note of what became of the next tensor that was saved; `changing` is copied."""
        size = tensor.shape
        if isinstance(packed, Tensor):
            self.entries.append(_Entry(size, keep=_copied if changing else _alias))
        elif isinstance(packed, Away):
            number = self._number(packed.storage)
            made = self._made(packed.storage)
            self.entries.append(_Entry(size, number=number, view=packed.view, made=made))
        else:
            self.entries.append(_Entry(size, stands=packed))

    def learnt(self) -> None:
        """Let go of what was only needed to learn."""
        self._storages.clear()
        self._operations.clear()

    def _number(self, storage: AnyStorage) -> int:
        for number, known in enumerate(self._storages):
            if known is storage:
                return number
        self._storages.append(storage)
        return len(self._storages) - 1

    def _made(self, storage: AnyStorage) -> _Made | None:
        if isinstance(storage, SentStorage):
            return None
        return _Made(
            self._operation(storage.operation),
            storage.index,
            tuple(self._number(one) for one in arguments_of(storage)),
            tuple(self._number(one) for one in needed_for(storage)),
        )

    def _operation(self, operation: RematerializedOperation) -> RematerializedOperation:
        if operation not in self._operations:
            self._operations[operation] = operation.on(self._argument)
        return self._operations[operation]

    def _argument(self, packed: Any) -> Any:
        if isinstance(packed, Away):
            return _Argument(self._number(packed.storage), packed.view)
        if isinstance(packed, Step):
            return packed._replace(operation=self._operation(packed.operation))
        return packed


class Performance:
    """One run of a layer by its script."""

    def __init__(self, script: Script, parcel: Parcel) -> None:
        """Begin with the first saved tensor."""
        self._entries, self._parcel = script.entries, parcel
        self._next = 0
        self._storages: dict[int, AnyStorage] = {}
        self._operations: dict[RematerializedOperation, RematerializedOperation] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return what stands for the next tensor that is saved.

        Raises:
            ScriptError: it is not the one that the script has.
        """
        if self._next == len(self._entries) or tensor.shape != self._entries[self._next].size:
            raise ScriptError(f"a layer saved a tensor {list(tensor.shape)} that its script lacks")
        entry = self._entries[self._next]
        self._next += 1
        if entry.stands is not None:
            return entry.stands
        if entry.keep is not None:
            return entry.keep(tensor)
        storage = self._storages.get(entry.number)
        if storage is None:
            made = entry.made
            storage = self._parcel.send(tensor) if made is None else self._remade(made)
            self._storages[entry.number] = storage
        storage.users += 1
        if isinstance(storage, SentStorage):
            self._parcel.note((storage,))
        elif entry.made is not None:
            self._parcel.note(self._sent(entry.made.needed))
        assert entry.view is not None
        return Away(self._parcel, storage, entry.view)

    def end(self) -> None:
        """Say that the layer has run.

        Raises:
            ScriptError: it saved less than its script has.
        """
        if self._next != len(self._entries):
            raise ScriptError(f"a layer saved {self._next} of {len(self._entries)} tensors")

    def _remade(self, made: _Made) -> RematerializedStorage:
        storage = RematerializedStorage(self._operation(made.operation), made.position)
        for number in made.arguments:
            self._storages[number].users += 1
        return storage

    def _sent(self, numbers: Sequence[int]) -> list[SentStorage]:
        found = [self._storages[number] for number in numbers]
        return [one for one in found if isinstance(one, SentStorage)]

    def _operation(self, template: RematerializedOperation) -> RematerializedOperation:
        if template not in self._operations:
            self._operations[template] = template.on(self._argument)
        return self._operations[template]

    def _argument(self, packed: Any) -> Any:
        if isinstance(packed, _Argument):
            storage = self._storages[packed.number]
            return Away(self._parcel, storage, packed.view, argument=True)
        if isinstance(packed, Step):
            return packed._replace(operation=self._operation(packed.operation))
        return packed


def _alias(tensor: Tensor) -> Tensor:
    """Return an alias without history: a graph must not hold its own outputs."""
    return tensor.data


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()

"""Optimizer state on disk: brought in before a block's update, taken out after it.

Each tensor has a place of whole pages in the file; those of a block lie one behind the other, so a
block is one read and one write. Hand-overs, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| staging slot | read stream | update stream | the write's event, awaited by the slot's next read |
| places of a block | write stream | read stream | the same, awaited by the block's next read |

Blocks are read in the order in which they will be updated, as soon as a slot is free. A write that
fails loses nothing: what it should have written stays in memory, and the step is completed. Then
no further one begins, but a checkpoint can be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.streams import Event, Inject, Job, Stream, finished
from atomtrain.engine.state.disk_parameters import (
    DiskTraffic,
    Key,
    Place,
    Placement,
    runs_of,
    starts_of,
    tensor_at,
)
from atomtrain.engine.state.precision import KeepsMasters, Workers
from atomtrain.engine.state.store import HostStore, view_of
from atomtrain.errors import DiskError
from atomtrain.planning.plan.disk import PAGE_BYTES, paged, tensors_on_disk


class _Slot:
    """Memory through which blocks pass, one at a time."""

    def __init__(self, n_bytes: int, home: deque[_Slot]) -> None:
        self.memory = aligned_empty(n_bytes)
        self.home = home
        """Where it waits for its next block."""
        self.free = finished()
        home.append(self)

    def require(self, n_bytes: int) -> None:
        """Make the slot large enough; what it holds is lost."""
        if self.memory.numel() < n_bytes:
            self.memory = aligned_empty(n_bytes)


class DiskState:
    """Keeps what a plan puts on disk of the optimizer's state there. One thread drives it."""

    def __init__(
        self,
        placement: Placement,
        blocks: Sequence[Sequence[nn.Parameter]],
        worker_of: Workers,
        store: HostStore,
        inject: Inject | None = None,
    ) -> None:
        """Take space for all state, whether or not there is any yet.

        Raises:
            DiskError: the disk is full.
        """
        self._file, use, states = placement
        self.use = use
        self._on_disk, self._blocks, self._worker_of = use.on_disk, blocks, worker_of
        self._arena, self._layout = store.arena, store.layout
        self._homes: dict[int, Tensor] = {}
        self.reading, self.writing = Stream("read", inject), Stream("write", inject)
        self._places: list[dict[Key, Place]] = [{} for _ in blocks]
        self._vacant: dict[int, list[tuple[int, int]]] = {}
        self._block_of: dict[int, int] = {}
        for block, members in enumerate(blocks):
            for parameter in members:
                if worker_of(parameter) is not None:
                    self._block_of[id(parameter)] = block
                    self._vacant[id(parameter)] = [
                        (self._file.allocate(n_bytes), paged(n_bytes))
                        for n_bytes in tensors_on_disk(states[id(parameter)], use.on_disk)
                    ]
        sizes = use.slots or [0]
        self._common_bytes = sizes[0]
        self._common: deque[_Slot] = deque()
        self._large: deque[_Slot] = deque()
        for size in sizes:
            _Slot(size, self._large if size > self._common_bytes else self._common)
        self._sizes = [sum(block) for block in use.blocks]
        self._order: deque[int] = deque()
        self._under_way: dict[int, tuple[_Slot, Event]] = {}
        self._written = [finished() for _ in blocks]
        self._stranded: dict[int, Tensor] = {}
        self._failure: DiskError | None = None

    @property
    def traffic(self) -> DiskTraffic:
        """What went to and from the disk so far."""
        file = self._file
        return DiskTraffic(file.read_bytes, file.written_bytes, file.direct)

    def has(self, block: int) -> bool:
        """Return whether the block is updated, and so has state."""
        return any(id(parameter) in self._block_of for parameter in self._blocks[block])

    def begin(self, order: Iterable[int]) -> None:
        """Start a step whose blocks are updated in this order; the first ones are read at once."""
        self._order = deque(block for block in order if self.has(block))
        self._under_way.clear()
        if self._arena is not None:
            self._arena.forget()
        self._read_ahead()

    def submit(
        self,
        stream: Stream,
        block: int,
        job: Job,
        after: Sequence[Event],
        label: str | None,
        changes: Callable[[], bool],
    ) -> Event:
        """Queue a block's update, which finds its state in memory.

        The event that is returned is done when the block may be loaded.

        Args:
            stream: Runs the update.
            block: The next one of the order that `begin` was told.
            job: The update.
            after: What it waits for, beside the state.
            label: Names it in traces.
            changes: Says, after the update, whether it changed anything.
        """
        slot, arrived = self._under_way.pop(block)

        def update() -> None:
            self._bring_in(block, slot)
            job()
            self._take_out(block, slot)

        updated = stream.submit(update, [*after, arrived], label)

        def write() -> None:
            if changes():
                self._write(block, slot)

        self._written[block] = slot.free = self.writing.submit(write, [updated], label)
        slot.home.append(slot)
        self._read_ahead()
        return updated if self._arena is None else self._written[block]

    def wait(self, block: int | None = None) -> None:
        """Block until everything (or one block) is on disk, or in memory if that failed."""
        for event in self._written if block is None else [self._written[block]]:
            event.wait()

    def require(self) -> None:
        """Raise the error of an earlier write, if one failed."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def present(
        self, parameter: nn.Parameter, keys: Collection[str] | None, write: bool
    ) -> Iterator[None]:
        """Have a parameter's state in its optimizer, as copies; call when nothing is under way.

        Args:
            parameter: Whose state.
            keys: Only these of its state; `None` is all, and `write` then replaces all.
            write: Whether what is there at the end goes to disk.

        Raises:
            DiskError: the disk failed, or did so earlier and `write` is wanted.
        """
        block = self._block_of.get(id(parameter))
        worker = self._worker_of(parameter)
        if block is None or worker is None:
            yield
            return
        places = self._places[block]
        wanted = [k for k in places if k[0] == id(parameter) and (keys is None or k[1] in keys)]
        for key in wanted:
            worker.state[parameter][key[1]] = self._copy_of(block, key)
        try:
            yield
            if write:
                self.require()
                found = self._in_memory(parameter)
                for key in wanted:
                    if keys is None and key[1] not in found:
                        self._vacate(places, key)
                for name, value in found.items():
                    place = self._place(places, (id(parameter), name), value)
                    memory = aligned_empty(place.n_bytes)
                    tensor_at(memory, 0, place).copy_(value)
                    self._file.write(place.offset, memory)
        finally:
            for name in self._in_memory(parameter):
                del worker.state[parameter][name]

    def close(self) -> None:
        """End the threads, and give the disk back."""
        self.reading.close()
        self.writing.close()
        self._file.close()

    def _read_ahead(self) -> None:
        """Queue the reads for which there are slots, in order."""
        while self._order:
            block = self._order[0]
            waiting = self._large if self._sizes[block] > self._common_bytes else self._common
            if not waiting:
                return
            slot = waiting.popleft()
            self._order.popleft()
            arrived = self.reading.submit(
                self._read_job(block, slot), [slot.free, self._written[block]], f"block {block}"
            )
            self._under_way[block] = slot, arrived

    def _read_job(self, block: int, slot: _Slot) -> Job:
        def read() -> None:
            runs = runs_of(self._places[block])
            slot.require(self._record_bytes(block))
            stranded = self._stranded.get(block)
            if stranded is not None:
                n_bytes = self._record_bytes(block)
                slot.memory[:n_bytes].copy_(stranded[:n_bytes])
                return
            memory = slot.memory[self._base(block) :]
            for run in runs:
                self._file.read(run.offset, memory[run.start : run.stop])
            if self._arena is not None:
                self._arena.read(*self._layout.block_range(block), slot.memory)

        return read

    def _write(self, block: int, slot: _Slot) -> None:
        memory = slot.memory[self._base(block) :]
        runs = runs_of(self._places[block])
        try:
            for run in runs:
                self._file.write(run.offset, memory[run.start : run.stop])
            if self._arena is not None:
                self._arena.write(*self._layout.block_range(block), slot.memory)
        except DiskError as error:
            self._failure = self._failure or error
            if self._arena is not None:
                self._arena.keep(*self._layout.block_range(block), slot.memory)
            # Nothing is lost: this block stays in memory, and the slot gets other memory.
            self._stranded[block] = slot.memory
            slot.memory = aligned_empty(slot.memory.numel())
        else:
            self._stranded.pop(block, None)

    def _bring_in(self, block: int, slot: _Slot) -> None:
        members = {id(parameter): parameter for parameter in self._blocks[block]}
        for key, view in self._views(block, slot.memory).items():
            worker = self._worker_of(members[key[0]])
            assert worker is not None
            worker.state[members[key[0]]][key[1]] = view
        if self._arena is not None:
            start, _ = self._layout.block_range(block)
            values = slot.memory[start % PAGE_BYTES : self._base(block)]
            for parameter in self._blocks[block]:
                self._homes[id(parameter)] = parameter.data
                at = self._layout.offsets[id(parameter)] - start
                parameter.data = view_of(values, at, parameter)

    def _take_out(self, block: int, slot: _Slot) -> None:
        """Have all of the block's state in the slot, and in the optimizer no more."""
        places = dict(self._places[block])
        values: dict[Key, Tensor] = {}
        for parameter in self._blocks[block]:
            if id(parameter) in self._homes:
                parameter.data = self._homes.pop(id(parameter))
            worker = self._worker_of(parameter)
            for name, value in self._in_memory(parameter).items():
                values[id(parameter), name] = value
                assert worker is not None
                del worker.state[parameter][name]
        for key, value in values.items():
            self._place(places, key, value)
        for key in [key for key in places if key not in values]:
            self._vacate(places, key)
        if places != self._places[block]:  # a first update makes state where there was none
            values = {key: value.clone() for key, value in values.items()}
            self._places[block] = places
            parameters = slot.memory[: self._base(block)]
            slot.require(self._record_bytes(block))
            slot.memory[: self._base(block)].copy_(parameters)
        for key, view in self._views(block, slot.memory).items():
            if view.data_ptr() != values[key].data_ptr():
                view.copy_(values[key])

    def _base(self, block: int) -> int:
        """Return where a block's state begins in a slot: behind its parameters."""
        return self.use.blocks[block].parameters

    def _record_bytes(self, block: int) -> int:
        """Return what a block takes of a slot."""
        runs = runs_of(self._places[block])
        return self._base(block) + (runs[-1].stop if runs else 0)

    def _in_memory(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what the optimizer holds of a parameter's state that belongs on disk."""
        worker = self._worker_of(parameter)
        if worker is None:
            return {}
        masters = worker.master_keys() if isinstance(worker, KeepsMasters) else frozenset()
        return {
            name: value
            for name, value in worker.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
            and value.dim()
            and value.numel()
            and ("masters" if name in masters else "moments") in self._on_disk
        }

    def _place(self, places: dict[Key, Place], key: Key, value: Tensor) -> Place:
        """Return a tensor's place in the file, a new one if there is none of its size."""
        place, n_bytes = places.get(key), paged(value.nbytes)
        if place is not None and paged(place.n_bytes) != n_bytes:
            self._vacate(places, key)
            place = None
        if place is None:
            vacant = self._vacant[key[0]]
            fitting = next((item for item in vacant if item[1] == n_bytes), None)
            if fitting is not None:
                vacant.remove(fitting)
            offset = self._file.allocate(n_bytes) if fitting is None else fitting[0]
        else:
            offset = place.offset
        places[key] = Place(offset, value.dtype, value.shape)
        return places[key]

    def _vacate(self, places: dict[Key, Place], key: Key) -> None:
        place = places.pop(key)
        self._vacant[key[0]].append((place.offset, paged(place.n_bytes)))

    def _views(self, block: int, memory: Tensor) -> dict[Key, Tensor]:
        places = self._places[block]
        starts, base = starts_of(places), self._base(block)
        return {key: tensor_at(memory, base + starts[key], place) for key, place in places.items()}

    def _copy_of(self, block: int, key: Key) -> Tensor:
        """Return one tensor of a block's state in memory of its own."""
        places = self._places[block]
        stranded = self._stranded.get(block)
        if stranded is not None:
            return self._views(block, stranded)[key].clone()
        place = places[key]
        memory = aligned_empty(place.n_bytes)
        self._file.read(place.offset, memory)
        return tensor_at(memory, 0, place)

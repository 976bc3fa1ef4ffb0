"""Counts the bytes of every storage that operations allocate, temporaries too.

One class serves two purposes: on fake tensors it predicts the memory that a layer needs, on the
emulated device it accounts and enforces the budget. Both see the same operations, so prediction
and measurement agree.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KEPT_LAYOUTS = 1024
"""A step asks for the same few again and again, for each value of each micro-batch."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range of memory, in whatever order of dimensions."""
    return _is_dense(tensor.shape, tensor.stride())


@functools.lru_cache(_KEPT_LAYOUTS)
def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether the strides are those of a new tensor, also of dimensions of one element."""
    return tensor.stride() == contiguous_strides(tensor.shape)


@functools.lru_cache(_KEPT_LAYOUTS)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


ALIGNED_BYTES = 64
"""PyTorch begins what it allocates on the processor at a multiple of it."""


def span_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, 1-D: it has gaps where the
    tensor is a part of a larger one, and fewer elements than the tensor where that is expanded."""
    return tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def span_bytes(tensor: torch.Tensor) -> int:
    """Return how much memory lies between a tensor's first element and its last."""
    return _span(tensor) * tensor.element_size()


def _span(tensor: torch.Tensor) -> int:
    return _span_of(tensor.shape, tensor.stride())


@functools.lru_cache(_KEPT_LAYOUTS)
def _span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    steps = zip(shape, strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def placed_bytes(tensor: torch.Tensor) -> int:
    """Return how much memory `placed` wants."""
    return _lead_bytes(tensor) + span_bytes(tensor)


def placed(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape, the strides and the alignment of another one: kernels add in
    another order where one of them differs.

    Args:
        memory: uint8, 1-D, aligned, of `placed_bytes`.
        like: On any device.
    """
    span = memory[_lead_bytes(like) :].view(like.dtype)
    return span.as_strided(like.shape, like.stride(), span.storage_offset())


def _lead_bytes(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % ALIGNED_BYTES if tensor.is_floating_point() else 0


class View(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def view_of(tensor: torch.Tensor) -> View:
    """Return where a tensor lies in its storage."""
    return View(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def view_at(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """Return a tensor in a storage, without history; any thread may ask for it."""
    dtype, offset, size, stride = view
    with uncounted():
        return _nothing(dtype, storage.device).new().set_(storage, offset, size, stride)


def seen_as(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Return a tensor in the storage of another one, or that one if it lies there."""
    dtype, offset, size, stride = view
    if tensor.dtype is not dtype:
        return view_at(tensor.untyped_storage(), view)
    if tensor.shape == size and tensor.stride() == stride and tensor.storage_offset() == offset:
        return tensor
    return tensor.as_strided(size, stride, offset)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor: another one is made of it in a third of the time."""
    return torch.empty(0, dtype=dtype, device=device)


T = TypeVar("T")


class LiveStorages(Generic[T]):
    """Something for each storage, found by any tensor in it as long as the storage lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        known = self._known.get(tensor.untyped_storage()._cdata)
        # The address may serve a new storage by now. Why a weak reference tells: see `adopt`.
        return None if known is None or known[0]() is None else known[1]

    def put(self, tensor: torch.Tensor, thing: T) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weakref.ref(storage), thing

    def drop(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)


def uncounted() -> AbstractContextManager[None]:
    """Let operations on this thread pass by the tracker, and by what calling it costs.

    For those that allocate nothing, or whose result is adopted by hand.
    """
    guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


_INSIDE: dict[str, Callable[..., int]] = {}


def takes_inside(operation: Any, count: Callable[..., int]) -> None:
    """Have a tracker count what an operation of one's own takes inside itself.

    Args:
        operation: Such as `torch.ops.mine.multiply.default`.
        count: Returns the bytes that it takes at most at a time, those of its result included,
            given its arguments.
    """
    _INSIDE[str(operation)] = count


OverBudget = Callable[[int, int, str], None]


class _Counted(weakref.ref[torch.UntypedStorage]):
    """A counted storage; cheaper than a closure, and there is one for every allocation."""

    __slots__ = ("key", "n_bytes")
    key: int
    n_bytes: int


class StorageTracker(TorchDispatchMode):
    """While active, counts each new storage until it is freed.

    A storage is counted when an operation first returns it and released when its last tensor dies
    (autograd's saved tensors included). Memory that a kernel allocates and frees inside itself is
    not seen, unless `takes_inside` was told of it. Active on the entering thread only.
    """

    def __init__(self, on_growth: OverBudget | None = None) -> None:
        """`on_growth(live_bytes, new_bytes, operation)` runs after each growth and may raise."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._on_growth = on_growth
        self._known: dict[int, _Counted] = {}
        self._on_death: Any = self._release
        self._seen: dict[int, tuple[bool, str, Callable[..., int] | None, Any]] = {}
        self._ignoring = False
        # Storages may die on other threads (a copy thread holds the last reference), and on this
        # one in the middle of `adopt`, hence re-entrant.
        self._lock = threading.RLock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under it, and the wrapper would cost as much as the counting.
        return False

    @property
    def counts(self) -> bool:
        return not self._ignoring

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def adopt(self, tensor: torch.Tensor, operation: str = "adopt") -> None:
        """Count the tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        n_bytes = storage.nbytes()
        if n_bytes == 0:
            return
        # torch keeps one Python object for a storage as long as the storage lives, so the weak
        # reference dies with the memory and not before.
        counted = _Counted(storage, self._on_death)
        counted.key, counted.n_bytes = key, n_bytes
        with self._lock:
            self._known[key] = counted
            self.live_bytes += n_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._on_growth is not None:
            self._on_growth(self.live_bytes, n_bytes, operation)

    def expect(self, n_bytes: int, operation: str) -> None:
        """Count, for this moment alone, what an operation will take inside."""
        with self._lock:
            live_bytes = self.live_bytes + n_bytes
            self.peak_bytes = max(self.peak_bytes, live_bytes)
        if self._on_growth is not None:
            self._on_growth(live_bytes, n_bytes, operation)

    def _release(self, dead: _Counted) -> None:
        with self._lock:
            self.live_bytes -= dead.n_bytes
            if self._known.get(dead.key) is dead:  # the address may already serve a new storage
                del self._known[dead.key]

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not count what is allocated meanwhile on this thread (host memory)."""
        before, self._ignoring = self._ignoring, True
        try:
            yield
        finally:
            self._ignoring = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._ignoring:
            return func(*args, **kwargs) if kwargs else func(*args)
        # This runs for every operation, and hashing or naming one takes microseconds: hence its id
        # as the key (the entry keeps it alive) and its name made once.
        seen = self._seen.get(id(func))
        if seen is None:
            name = str(func)
            seen = self._seen[id(func)] = (_may_allocate(func), name, _INSIDE.get(name), func)
        allocates, name, inside, _ = seen
        if inside is not None:
            self.expect(inside(*args, **(kwargs or {})), name)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if allocates:
            if isinstance(result, torch.Tensor):
                self.adopt(result, name)
            elif isinstance(result, tuple | list):
                for item in result:
                    if isinstance(item, torch.Tensor):
                        self.adopt(item, name)
        return result


def _may_allocate(func: Any) -> bool:
    return any(result.alias_info is None for result in func._schema.returns)

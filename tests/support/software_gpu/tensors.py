"""Tensors that say they are on a GPU.

Shape, strides and storage are those of a tensor on `meta`, so views are made at once and share
storages as real ones do. What computes is queued on the current stream of the calling thread, with
the processor's memory behind the tensors and without the tensors themselves: they may die before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tests.support.software_gpu.memory import range_of, raw_of
from tests.support.software_gpu.order import NotEmulatedError, Task, on_processor

if TYPE_CHECKING:
    from tests.support.software_gpu.runtime import SoftwareGpus

aten = torch.ops.aten


class GpuTensor(Tensor):
    """A tensor on a GPU in software."""

    gpus: ClassVar[SoftwareGpus | None] = None
    """Whose tensors these are."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> GpuTensor:
        """Return a tensor with the storage of one on `meta`."""
        self = torch.Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._gpu = device
        return self

    def __init__(self, meta: Tensor, device: torch.device) -> None:
        """Nothing more."""

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype}, {self._gpu})"

    @property
    def device(self) -> torch.device:
        return self._gpu

    @property
    def is_cuda(self) -> bool:
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return inside(args[0]._gpu)
        assert GpuTensor.gpus is not None
        with on_processor():
            return run(GpuTensor.gpus, func, args, kwargs or {})


def inside(device: torch.device) -> torch.device:
    """Return what torch's own code, but not Python's, takes a GPU for.

    Autograd asks a driver for the streams of an accelerator, and there is none. Of a device of type
    `lazy` it asks nothing.
    """
    return torch.device("lazy", device.index)


def allocate(gpus: SoftwareGpus, meta: Tensor, device: torch.device) -> GpuTensor:
    """Return a new tensor like one on `meta` that nobody else has."""
    gpus.blocks.adopt(meta, device, gpus.queue_of(device))
    return GpuTensor(meta, device)


def meta_of(tensor: Tensor) -> Tensor:
    """Return a tensor on `meta` with the same storage."""
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    return meta.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def each(thing: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument, or a list of some, with every tensor and device changed."""
    if isinstance(thing, list | tuple):
        return type(thing)(each(item, change) for item in thing)
    return change(thing) if isinstance(thing, Tensor | torch.device) else thing


def flat(thing: Any) -> Iterator[Any]:
    """Yield what is in lists of lists."""
    if isinstance(thing, list | tuple):
        for item in thing:
            yield from flat(item)
    else:
        yield thing


def run(gpus: SoftwareGpus, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation: make its results now, and queue what fills them."""
    gpus.blocks.collect()
    special = gpus.special.get(func)
    if special is not None:
        return special(gpus, *args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise NotEmulatedError(f"{func} changes a tensor's shape in place")
    device = _device_of(func, args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    written = [a for a in _arguments(func, args, kwargs, writes=True) if isinstance(a, Tensor)]
    read = [a for a in _arguments(func, args, kwargs, writes=False) if isinstance(a, Tensor)]
    for place, tensor in enumerate(written):
        if not isinstance(tensor, GpuTensor):
            raise NotEmulatedError(f"{func} writes to its argument {place}, not on a GPU")
    results, fresh = _results(gpus, func, args, kwargs, device)
    _outputs_grow(gpus, func, args, kwargs, device)
    if not fresh and not written:
        return results  # views
    filled = [(raw_of(gpus.blocks.of(t).data, t), at) for at, t in fresh]
    seed = gpus.seed(device) if torch.Tag.nondeterministic_seeded in func.tags else None

    def raw(thing: Any) -> Any:
        if isinstance(thing, torch.device):
            return torch.device("cpu")
        if isinstance(thing, GpuTensor):
            return raw_of(gpus.blocks.of(thing).data, thing)
        if thing.dim():
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, found cpu and {device}"
            )
        return thing.clone()  # a number, read now

    raw_args = each(args, raw)
    raw_kwargs = {name: each(value, raw) for name, value in kwargs.items()}

    kernel = gpus.on_processor.get(func, func)

    def compute() -> None:
        with _seeded(seed):
            found = kernel(*raw_args, **raw_kwargs)
            of = found if isinstance(found, list | tuple) else [found]
            for target, at in filled:
                target.copy_(of[at])

    task = gpus.scheduler.submit(gpus.queue_of(device), compute)
    note(gpus, task, str(func), read=read, written=[*written, *(t for _, t in fresh)])
    return results


def note(
    gpus: SoftwareGpus, task: Task, what: str, *, read: Sequence[Tensor], written: Sequence[Tensor]
) -> None:
    """Take note of the memory that a piece of work uses."""
    for tensors, writes in ((read, False), (written, True)):
        for tensor in tensors:
            if isinstance(tensor, GpuTensor) and tensor.numel():
                accesses = gpus.blocks.of(tensor).accesses
                accesses.note(task, range_of(tensor), what, writes=writes)


def _device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    found = {a._gpu for a in flat([*args, *kwargs.values()]) if isinstance(a, GpuTensor)}
    if len(found) != 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {found}")
    (device,) = found
    wanted = kwargs.get("device")
    if wanted is not None and wanted not in (device, inside(device)):
        raise NotEmulatedError(f"{func} from {device} to {wanted}")
    return device


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@functools.cache
def _places(func: Any, writes: bool) -> list[tuple[int, str]]:
    """Return place and name of the arguments that are written to, or of the others."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if _is_written(argument) == writes
    ]


def _arguments(func: Any, args: Any, kwargs: dict[str, Any], *, writes: bool) -> list[Any]:
    found: list[Any] = []
    for place, name in _places(func, writes):
        found += flat([args[place] if place < len(args) else kwargs.get(name)])
    return found


def _results(
    gpus: SoftwareGpus, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> tuple[Any, list[tuple[int, GpuTensor]]]:
    """Return what an operation returns, and which of it is new memory, each with its place."""
    returns = func._schema.returns
    if not returns:
        return None, []
    changed = iter(_arguments(func, args, kwargs, writes=True))
    if all(map(_is_written, returns)):
        objects = tuple(changed)
        return (objects[0] if len(returns) == 1 else objects), []

    many, found = _shapes(gpus, func, args, kwargs)
    fresh: list[tuple[int, GpuTensor]] = []
    out: list[Any] = []
    for at, (meta, of) in enumerate(_with_schema(found, returns)):
        if _is_written(of):
            out.append(next(changed))
        elif meta is None:
            out.append(None)
        elif gpus.blocks.knows(meta):
            out.append(GpuTensor(meta, device))
        else:
            out.append(allocate(gpus, meta, device))
            fresh.append((at, out[-1]))
    return (tuple(out) if many else out[0]), fresh


_known_shapes: dict[Any, tuple[bool, list[tuple[Any, ...]]]] = {}
"""What operations return that make new tensors only. torch often finds it out in Python."""


def _shapes(
    gpus: SoftwareGpus, func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[bool, list[Tensor | None]]:
    """Return whether an operation returns several tensors, and each on `meta`."""
    key = func, _key(args), _key(tuple(kwargs.items()))
    if key in _known_shapes:
        many, shapes = _known_shapes[key]
        return many, [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype in shapes
        ]

    def to_meta(thing: Any) -> Any:
        if isinstance(thing, torch.device):
            return torch.device("meta")
        return meta_of(thing) if isinstance(thing, GpuTensor) else thing.to("meta")

    try:
        result = func(
            *each(args, to_meta), **{name: each(value, to_meta) for name, value in kwargs.items()}
        )
    except NotImplementedError as error:
        raise NotEmulatedError(f"{func}: {error}") from error
    many = isinstance(result, list | tuple)
    found = list(result) if many else [result]
    for one in found:
        if one is not None and not isinstance(one, Tensor):
            raise NotEmulatedError(f"{func} returns {one!r}, no tensor")
    if all(one is not None and not gpus.blocks.knows(one) for one in found):
        _known_shapes[key] = many, [(one.size(), one.stride(), one.dtype) for one in found]
    return many, found


def _key(thing: Any) -> Any:
    """Return what of an argument decides about the shapes of results."""
    if isinstance(thing, Tensor):
        return thing.size(), thing.stride(), thing.dtype
    if isinstance(thing, list | tuple):
        return tuple(map(_key, thing))
    return type(thing), thing


def _with_schema(found: Sequence[Any], returns: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair results with what the schema says of them; a list of tensors is one there."""
    if len(found) != len(returns):
        return [(one, returns[0]) for one in found]
    return list(zip(found, returns, strict=True))


def _outputs_grow(
    gpus: SoftwareGpus, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> None:
    """Give memory to outputs that came without: `out` of operations that allocate it."""
    if "out" not in kwargs or kwargs["out"].numel():
        return
    out = kwargs["out"]
    meta = torch.empty(0, dtype=out.dtype, device="meta")
    like = {name: value for name, value in kwargs.items() if name != "out"}
    func(*each(args, lambda a: meta_of(a) if isinstance(a, GpuTensor) else a), **like, out=meta)
    out.data = allocate(gpus, torch.empty_like(meta), device)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw what an operation draws from a seed, and leave the processor's generator alone."""
    if seed is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)

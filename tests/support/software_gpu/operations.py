"""Operations that are not simply queued: those that make tensors, wait, copy, or change a place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.software_gpu.copies import copy
from tests.support.software_gpu.memory import raw_of
from tests.support.software_gpu.order import NotEmulatedError, on_processor
from tests.support.software_gpu.tensors import GpuTensor, allocate, note, run

if TYPE_CHECKING:
    from tests.support.software_gpu.runtime import SoftwareGpus

aten = torch.ops.aten


def _known(gpus: SoftwareGpus, *tensors: Any) -> list[Tensor]:
    """Wait for the stream, as what asks for numbers does; return tensors of the processor."""
    (device,) = {tensor._gpu for tensor in tensors}
    queue = gpus.queue_of(device)
    task = gpus.scheduler.submit(queue, None)
    note(gpus, task, "a read by the host", read=tensors, written=[])
    gpus.scheduler.finish(task)
    return [raw_of(gpus.blocks.of(tensor).data, tensor) for tensor in tensors]


def _item(gpus: SoftwareGpus, tensor: Tensor) -> Any:
    return aten._local_scalar_dense(*_known(gpus, tensor))


def _equal(gpus: SoftwareGpus, tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(*_known(gpus, tensor, other))


def _to_copy(
    gpus: SoftwareGpus,
    tensor: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Convert, or move: the two ends differ in where the result is made."""
    device = tensor.device if device is None else torch.device(device)
    dtype = dtype or tensor.dtype
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    like = aten._to_copy(meta, dtype=dtype, memory_format=memory_format)
    if device.type == "cpu":
        if non_blocking:
            raise NotEmulatedError("a result on the host that PyTorch would pin, and fill later")
        result = torch.empty_strided(like.size(), like.stride(), dtype=dtype)
    else:
        index = gpus.current.device if device.index is None else device.index
        result = allocate(gpus, like, torch.device("cuda", index))
    return copy(gpus, result, tensor, non_blocking)


def _set_storage(
    gpus: SoftwareGpus,
    tensor: Any,
    storage: Any,
    offset: int = 0,
    size: Any = None,
    stride: Any = (),
) -> Tensor:
    """Let a tensor be a view of a storage."""
    if size is None:
        size, stride = [storage.nbytes() // tensor.element_size()], [1]
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    meta.set_(storage, offset, size, stride)
    if not gpus.blocks.knows(meta):
        raise RuntimeError("set_: the storage is not on the GPU")
    tensor.data = GpuTensor(meta, tensor._gpu)
    return tensor


def _refused(gpus: SoftwareGpus, *args: Any, **kwargs: Any) -> Any:
    raise NotEmulatedError("an operation whose result has a size that depends on numbers")


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: copy,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.set_.source_Storage: _set_storage,
    aten.set_.source_Storage_storage_offset: _set_storage,
    aten.nonzero.default: _refused,
    aten.masked_select.default: _refused,
}


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, *more: Any
) -> Any:
    func = aten.native_layer_norm_backward
    return func(gradient, x, shape, mean.to(x.dtype), rstd.to(x.dtype), *more)


ON_PROCESSOR: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
"""What the processor computes where its types differ: of 16 bits a GPU keeps mean and deviation in
float32, the processor in 16 bits."""


@contextlib.contextmanager
def factories(gpus: SoftwareGpus) -> Iterator[None]:
    """Let operations that have no tensor to go by, but a device, make tensors of the GPU."""

    def made(func: Any) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            index = kwargs["device"].index
            index = gpus.current.device if index is None else index
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            with on_processor():
                return allocate(gpus, func(*args, **kwargs), torch.device("cuda", index))

        return make

    def unwatched(func: Any) -> Callable[..., Any]:
        """What comes here although a tensor is the GPU's: nobody may watch operations now."""

        def do(*args: Any, **kwargs: Any) -> Any:
            with on_processor():
                return run(gpus, func, args, kwargs)

        return do

    library = torch.library.Library("aten", "IMPL")
    try:
        for key in ("CUDA", "Lazy"):
            for func in (aten.empty.memory_format, aten.empty_strided.default):
                library.impl(func, made(func), key)
            for func in (
                aten.set_.source_Storage,
                aten.set_.source_Storage_storage_offset,
                aten.copy_.default,  # by torch.tensor
            ):
                library.impl(func, unwatched(func), key)
        yield
    finally:
        library._destroy()

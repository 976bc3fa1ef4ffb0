"""Tensors without data of which the data are known nevertheless: what depends on them is computed.

Where data decide what runs, tensors without data lead nowhere. While this mode is on, an operation
on known tensors alone really runs, beside the one without data; so a number that the model reads
from them is known, and so are the shapes that it makes of such numbers. All other tensors may be
taken for zeros, where the model reads numbers from them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from atomtrain.analysis.export.structure import tensors_among

_NUMBER = torch.ops.aten._local_scalar_dense.default
_RANDOM = torch.Tag.nondeterministic_seeded


@contextmanager
def known_data(
    known: Iterable[tuple[Tensor, Tensor]], *, others_are_zeros: bool = False
) -> Iterator[None]:
    """Compute on the data behind fake tensors, as far as they are known.

    Args:
        known: Fake tensors with their data, which are on the processor.
        others_are_zeros: All other tensors are taken for zeros.
    """
    data = _KnownData(known, others_are_zeros)
    with data, _ReadNumbers(data):
        yield


class _ReadNumbers(TorchFunctionMode):
    """Reads tensors of which a new one is made; they are read past all operations otherwise.

    Masks that select become the places that they mark: backward selects too, when nothing is known.
    """

    def __init__(self, data: _KnownData) -> None:
        super().__init__()
        self._known = data

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.tensor:
            args = tree_map(lambda v: v.tolist() if isinstance(v, FakeTensor) else v, args)
        if func in _SELECTING:
            args = (args[0], self._known.places(*args[:2]), *args[2:])
        if func in _AS_ARRAY:
            return self._known.array(func, *args, **(kwargs or {}))
        if func in _CTC:  # writes lists of lengths into tensors of its own, past all operations
            args, kwargs = tree_map(_as_tensor, (args, kwargs), is_leaf=_are_numbers)
        return func(*args, **(kwargs or {}))


_SELECTING = (Tensor.__getitem__, Tensor.__setitem__)
_AS_ARRAY = (Tensor.__array__, Tensor.numpy)
_CTC = (torch.ctc_loss, nn.functional.ctc_loss)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(n) is int for n in value)


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value) if _are_numbers(value) else value


class _KnownData(TorchDispatchMode):
    def __init__(self, known: Iterable[tuple[Tensor, Tensor]], others_are_zeros: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._data = WeakTensorKeyDictionary()
        self._others_are_zeros = others_are_zeros
        with _disable_current_modes():
            for fake, data in known:
                self._data[fake] = data.clone()  # which the model may write over

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_among(args, kwargs)
        if _RANDOM not in func.tags and all(self._is_known(tensor) for tensor in given):
            return self._computed(func, args, kwargs, given)
        for described, value in zip(func._schema.arguments, args, strict=False):
            if described.alias_info is not None and described.alias_info.is_write:
                for tensor in tensors_among(value):
                    if tensor in self._data:
                        self._forget(tensor)
        return func(*args, **kwargs)

    def array(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what NumPy gets of a tensor."""
        with _disable_current_modes():
            return func(self._data_of(tensor), *args, **kwargs)

    def places(self, selected: Any, index: Any) -> Any:
        """Return what selects the same of a tensor without data, with places in place of masks.

        They lie in as much memory as the masks, of which backward keeps as much.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if selected in self._data or not any(map(self._is_mask, parts)):
            return index
        found: list[Any] = []
        for part in parts:
            if not self._is_mask(part):
                found.append(part)
                continue
            count = int(self._data[part].count_nonzero())
            wanted = 8 * count * part.dim()
            memory = torch.empty(max(wanted, part.nbytes), dtype=torch.uint8, device=part.device)
            self._forget(memory)  # parts of what is known have memory of their own
            found += memory[:wanted].view(torch.int64).view(part.dim(), count)
        return tuple(found)

    def _is_mask(self, part: Any) -> bool:
        return isinstance(part, FakeTensor) and part.dtype == torch.bool and part in self._data

    def _forget(self, tensor: Tensor) -> None:
        """Take away the data of a tensor, and of all that share their memory."""
        written = self._data[tensor].untyped_storage()._cdata
        known = list(self._data.items())
        for other in [o for o, data in known if data.untyped_storage()._cdata == written]:
            del self._data[other]

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether there are data; numbers in the model's code are real tensors at first."""
        known = tensor in self._data or not isinstance(tensor, FakeTensor)
        return known or self._others_are_zeros

    def _data_of(self, tensor: Tensor) -> Tensor:
        data = self._data.get(tensor, tensor)
        if self._others_are_zeros and isinstance(data, FakeTensor):
            data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
            self._data[tensor] = data
        return data  # type: ignore[no-any-return]

    def _computed(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        def data_of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._data_of(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        with _disable_current_modes(), torch.no_grad():
            own_args, own_kwargs = tree_map(data_of, (args, kwargs))
            fakes = {id(self._data[tensor]): tensor for tensor in given if tensor in self._data}
            result = func(*own_args, **own_kwargs)
        if func is _NUMBER:
            return result

        made = iter(self._without_data(func, args, kwargs, given))

        def fake_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            fake = next(made, None)
            if id(value) in fakes:  # an operation in place returns what it was given
                return fakes[id(value)]
            if fake is None or fake.shape != value.shape:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            self._data[fake] = value
            return fake

        return tree_map(fake_of, result)

    def _without_data(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> list[Tensor]:
        """Return what the operation gives without data, which lies in memory as it would with data;
        nothing where it cannot say."""
        if not all(isinstance(tensor, FakeTensor) for tensor in given):
            return []
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return []
        return tensors_among(result)


def _as_long(mode: Any, operation: object, grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    """Return the gradient of a CTC loss but for its data, which torch's own rule would look at."""
    return log_probs.new_empty(log_probs.shape)


for _overload in ("default", "Tensor"):
    if _operation := getattr(torch.ops.aten._ctc_loss_backward, _overload, None):
        op_implementations_dict.setdefault(_operation, _as_long)

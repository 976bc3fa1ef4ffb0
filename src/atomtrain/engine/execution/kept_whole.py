"""Keeps operations whole while a layer is traced that autograd does by one kernel.

Of a few operations PyTorch has a formula beside the kernels: backward of SiLU is one. Autograd
takes the kernel where the device has one. Tracing does so, too, but not yet in torch 2.9: there it
writes down the formula, which rounds otherwise and changes tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

aten = torch.ops.aten
_WITH_FORMULAS = (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.native_channel_shuffle.default,
    aten._fused_rms_norm.default,
)
"""In torch 2.9 all that have a formula, and a kernel for some device."""
_BY_ITSELF = hasattr(torch.utils._python_dispatch, "autograd_would_have_decomposed")
"""Whether this torch does what is done here."""


@contextmanager
def kept_whole(device: torch.device) -> Iterator[None]:
    """Trace what a device has a kernel for as that kernel; one thread at a time."""
    with ExitStack() as stack:
        key = torch._C._dispatch_key_for_device(device.type)
        for operation in () if _BY_ITSELF else _WITH_FORMULAS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key):
                formula = _outside_of_traces(operation.decompose)
                operation.decompose = formula  # type: ignore[method-assign]
                stack.callback(delattr, operation, "decompose")
        yield


def _outside_of_traces(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a formula that says, while something is traced, that it is not there."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if get_proxy_mode() is not None else formula(*args, **kwargs)

    return decompose

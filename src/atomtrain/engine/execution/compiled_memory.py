"""Counts what compiled code takes on the emulated device, which sees operations only.

Compiled code allocates by itself. So what a kind of layer takes inside is measured once
(`calibration/compiled_costs.py`), and claimed each time the layer runs. What outlives the code is
counted as it is: results, what it saves for backward, gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from atomtrain.analysis.costs.storages import StorageTracker


class Inside(NamedTuple):
    """Bytes by which memory grows at most while a layer's code runs."""

    forward_bytes: int
    """Results and what is saved included."""
    backward_bytes: int
    """From the moment at which all that was saved is there."""


def active_tracker() -> StorageTracker | None:
    """Return what counts the storages that this thread allocates, or `None`."""
    stack = _get_current_dispatch_mode_stack()
    found = next((mode for mode in reversed(stack) if isinstance(mode, StorageTracker)), None)
    return found if found is not None and found.counts else None


def run_counted(
    tracker: StorageTracker,
    name: str,
    inside: Inside,
    values: Sequence[Any],
    run: Callable[[], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Run a compiled layer; count what it takes, now and in its backward.

    Args:
        tracker: Counts.
        name: Of the layer.
        inside: What its code takes.
        values: What it reads.
        run: Runs it.

    Raises:
        DeviceMemoryError: by the tracker, if it is too much.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = (_itself, _itself) if outer is None else outer

    def counted_pack(tensor: Tensor) -> Any:
        tracker.adopt(tensor, name)
        packed = pack(tensor)
        if isinstance(packed, Tensor):
            tracker.adopt(packed, name)  # a copy, of a buffer that changes
        return packed

    def counted_unpack(packed: Any) -> Tensor:
        tensor: Tensor = unpack(packed)
        tracker.expect(inside.backward_bytes, name)
        return tensor

    tracker.expect(inside.forward_bytes, name)
    with saved_tensors_hooks(counted_pack, counted_unpack):
        written = run()
    for value in written:
        if isinstance(value, Tensor):
            tracker.adopt(value, name)

    def adopt_gradients(gradients: Any, _: Any) -> None:
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                tracker.adopt(gradient, name)

    for node in _own_nodes(written, values):
        node.register_hook(adopt_gradients)
    return written


def _own_nodes(written: Sequence[Any], values: Sequence[Any]) -> Iterator[Node]:
    """Yield the nodes of compiled code between what a layer reads and what it writes."""
    seen = {value.grad_fn for value in values if isinstance(value, Tensor)}
    waiting = [value.grad_fn for value in written if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        waiting += [following for following, _ in node.next_functions]


def _itself(tensor: Tensor) -> Tensor:
    return tensor.detach()

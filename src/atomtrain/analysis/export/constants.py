"""Finds what does not depend on the micro-batch or the weights (masks, rotary tables).

Such values are computed once and held as buffers that all layers share, instead of being carried
from layer to layer for every micro-batch. Views of them, which cost nothing, are made where they
are read. So is what depends on buffers that a checkpoint may replace.

Models that are traced write out masks that they do without otherwise, because a traced graph might
be run with other data. Ours is not: it has the example's shapes, and its masks are known.

They are computed where the model runs, as the model itself would: a GPU's sine has other last bits
than the processor's. Then they lie on the host, as weights do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from atomtrain.analysis.export.export import Exported
from atomtrain.analysis.export.flattening import place_of
from atomtrain.analysis.export.functions import (
    argument,
    is_random,
    storages_of,
    tensors_of,
    written_by,
)

_CPU = torch.device("cpu")
_log = logging.getLogger("atomtrain.analysis")


def _computing_device(seeming: torch.device) -> torch.device:
    """Return where constants are computed; plans are also made for GPUs that are not there."""
    there = torch.accelerator.current_accelerator(check_available=True)
    return seeming if there is not None and there.type == seeming.type else _CPU


class Constants:
    """Which nodes of a graph are constant, and the values of those that are held as buffers."""

    def __init__(self, exported: Exported, live: list[fx.Node], persistent: set[str]) -> None:
        """Decide for each of the `live` nodes; `persistent` names buffers that may be replaced."""
        self._exported = exported
        self._device = _computing_device(exported.device)
        self._live = live
        self.nodes = _constant_nodes(exported, live, set())
        """Constant calls and sources: independent of micro-batch, weights and randomness."""
        self._replaceable = self._reach(live, persistent)
        self._writers = [n for n in live if n in self.nodes and written_by(n)]
        if any(writer in self._replaceable for writer in self._writers):
            # Such a value cannot be made anew where it is read.
            self.nodes = _constant_nodes(exported, live, persistent)
            self._writers = [writer for writer in self._writers if writer in self.nodes]
            self._replaceable = set()
        for writer in self._writers:
            # Its result is what it wrote to, which has this value when anything that varies reads.
            written = written_by(writer)[0]
            if storages_of(writer) == storages_of(written):
                writer.replace_all_uses_with(written)
        self._written = {
            key for writer in self._writers for t in written_by(writer) for key in storages_of(t)
        }
        self._held: dict[int, Tensor] = {}
        self._keys: dict[fx.Node, int] = {}
        self._expressions: dict[Any, int] = {}

    def _reach(self, live: list[fx.Node], persistent: set[str]) -> set[fx.Node]:
        reached = {node for node, (name, _) in self._exported.buffers.items() if name in persistent}
        for node in live:
            if node in self.nodes and any(source in reached for source in node.all_input_nodes):
                reached.add(node)
        return reached

    def is_remade(self, node: fx.Node) -> bool:
        """Return whether a constant is computed where it is read instead of once.

        Views and expanded tensors are remade: their bases are held.
        """
        return node in self.nodes and node.op == "call_function" and not self._is_held(node)

    def _is_held(self, node: fx.Node) -> bool:
        if node in self._replaceable:
            return False
        tensors = tensors_of(node)
        if len(tensors) != 1 or not isinstance(node.meta.get("val"), Tensor):
            return False
        [tensor] = tensors
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            return False
        own = storages_of(node)
        return not any(own & storages_of(source) for source in node.all_input_nodes)

    def held(self, node: fx.Node) -> Tensor:
        """Return the value of a constant; equal expressions give one tensor."""
        key = self.key(node)
        if key not in self._held:
            # Layers own what they are given: no views of larger tensors.
            value = self.value(node).detach()
            self._held[key] = value.clone() if value.is_meta else value.to("cpu", copy=True)
        return self._held[key]

    def value(self, node: fx.Node) -> Tensor:
        """Compute a constant. On the meta device if it depends on buffers without data."""
        wanted = _ancestors(node, self.nodes)
        # What writes in place to an ancestor belongs to its value.
        storages = {key for ancestor in wanted for key in storages_of(ancestor)}
        for writer in self._writers:
            if any(storages & storages_of(target) for target in written_by(writer)):
                wanted |= _ancestors(writer, self.nodes)
        try:
            return self._computed(node, wanted)
        except torch.OutOfMemoryError:
            _log.warning(
                "constants of the model are computed on the processor, since %s has too little "
                "memory for them: their last bits may differ", self._device,
            )  # fmt: skip
            self._device = _CPU
            return self._computed(node, wanted)

    def _computed(self, node: fx.Node, wanted: set[fx.Node]) -> Tensor:
        values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for source in wanted:
                if source.op != "call_function":
                    values[source] = self._source(source)
            for call in self._live:
                if call in wanted:
                    values[call] = _result(call, values, self._device)
        result: Tensor = values[node]
        return result

    def _source(self, node: fx.Node) -> Tensor:
        if node in self._exported.literals:
            return self._there(self._exported.literals[node]).clone()
        return self._there(self._exported.buffers[node][1])

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(self._device)

    def key(self, node: fx.Node) -> int:
        """Return a number for the expression that makes a constant, equal for equal ones."""
        if node not in self._keys:
            if node.op != "call_function" or self._written & storages_of(node):
                expression: Any = node
            else:
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Of(self.key(n)))
                expression = (str(node.target), repr(arguments))
            self._keys[node] = self._expressions.setdefault(expression, len(self._expressions))
        return self._keys[node]


class _Of(NamedTuple):
    key: int


def _constant_nodes(exported: Exported, live: list[fx.Node], excluded: set[str]) -> set[fx.Node]:
    written: dict[int, list[fx.Node]] = {}
    for node in live:
        for target in written_by(node):
            for key in storages_of(target):
                written.setdefault(key, []).append(node)
    constant = set(exported.literals)
    constant |= {
        node
        for node, (name, _) in exported.buffers.items()
        if name not in excluded and not _is_written(node, written)
    }
    changed: set[int] = set()  # storages that something not constant writes to, or writes too late
    position = {node: index for index, node in enumerate(live)}
    readers: dict[int, list[fx.Node]] = {key: [] for key in written}
    for node in live:
        for source in node.all_input_nodes:
            for key in storages_of(source):
                if key in readers:
                    readers[key].append(node)

    def settled(key: int) -> bool:
        """Return whether a storage has its last value before anything that varies reads it."""
        last = max(position[writer] for writer in written[key])
        return all(writer in found for writer in written[key]) and all(
            node in found or position[node] > last for node in readers[key]
        )

    while True:
        found = set(constant)
        for node in live:
            pure = not is_random(node) and all(source in found for source in node.all_input_nodes)
            if pure and not storages_of(node) & changed and _has_tensor(node):
                found.add(node)
        fresh = {key for key in written if key not in changed and not settled(key)}
        if not fresh:
            return found
        changed |= fresh
        constant = {node for node in constant if not storages_of(node) & changed}


def _is_written(node: fx.Node, written: Mapping[int, list[fx.Node]]) -> bool:
    return any(key in written for key in storages_of(node))


def _has_tensor(node: fx.Node) -> bool:
    return bool(tensors_of(node))


def _ancestors(node: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in among and current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return found


def _result(node: fx.Node, values: Mapping[fx.Node, Any], device: torch.device) -> Any:
    given = [values[source] for source in node.all_input_nodes]
    if any(isinstance(v, Tensor) and v.is_meta for v in given):
        return fx.node.map_aggregate(
            node.meta["val"],
            lambda v: (
                torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) else v
            ),
        )
    args, kwargs = fx.node.map_aggregate(
        fx.node.map_arg((node.args, node.kwargs), lambda n: values[n]),
        lambda a: device if isinstance(a, torch.device) else a,
    )
    assert callable(node.target)
    return node.target(*args, **kwargs)


_BY_TRANSFORMERS = "/transformers/models/", "attention_interface("
"""Both are in the place where transformers calls its attention."""
_LARGEST_GROUPED_HEAD = 256


def simplify_attention(live: Iterable[fx.Node], constants: Constants) -> None:
    """Replace constant masks of attention by `is_causal`, or by none, where that is the same.

    The kernels of the CPU give the same bits then (tested), need no mask in memory and, causal,
    about half of the work.
    """
    known: dict[int, str] = {}
    for node in live:
        if str(node.target) != "aten.scaled_dot_product_attention.default":
            continue
        mask = argument(node, "attn_mask")
        if not isinstance(mask, fx.Node) or mask not in constants.nodes:
            continue
        if mask.meta["val"].dtype is not torch.bool:
            continue
        key = constants.key(mask)
        if key not in known:
            known[key] = _kind_of_mask(constants.value(mask))
        if known[key] != "other":
            _without_mask(node, causal=known[key] == "causal")


def _kind_of_mask(mask: Tensor) -> str:
    if mask.is_meta:
        return "other"
    for axis in range(mask.ndim - 2):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    if bool(mask.all()):
        return "full"
    length, other = mask.shape[-2:]
    causal = torch.ones(length, other, dtype=torch.bool, device=mask.device).tril()
    return "causal" if length == other and bool((mask == causal).all()) else "other"


def _without_mask(node: fx.Node, causal: bool) -> None:
    query, key, value, *_ = node.args
    kwargs: dict[str, Any] = {
        name: given
        for name in ("dropout_p", "scale", "enable_gqa")
        if (given := argument(node, name)) is not None
    }
    kwargs["is_causal"] = causal
    if all(mark in place_of(node) for mark in _BY_TRANSFORMERS):
        # transformers copies keys and values for each query head only if there is a mask.
        few_keys, few_values = _not_repeated(key), _not_repeated(value)
        if few_keys is not None and few_values is not None and _may_be_grouped(key, value):
            key, value = few_keys, few_values
            kwargs["enable_gqa"] = True
    node.args, node.kwargs = (query, key, value), kwargs


def _may_be_grouped(key: Any, value: Any) -> bool:
    width: int = key.meta["val"].shape[-1]
    return width == value.meta["val"].shape[-1] and width <= _LARGEST_GROUPED_HEAD


def _not_repeated(node: Any) -> fx.Node | None:
    """Return `[B, H, T, K]` of which the node is copies, `[B, H * n, T, K]`, if it is that."""
    for name in ("aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default"):
        if not isinstance(node, fx.Node) or str(node.target) != name:
            return None
        if name == "aten.unsqueeze.default" and node.args[1] != 2:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None

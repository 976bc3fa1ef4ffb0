"""Attention as the model computes it when nobody traces it.

Models that are traced write out masks that they do without otherwise, because a traced graph might
be run with other data. Ours is not: it has the example's shapes, and its masks are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from atomtrain.analysis.export.constants import Constants
from atomtrain.analysis.export.effects import argument
from atomtrain.analysis.export.export import place_of

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

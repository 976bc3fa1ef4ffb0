"""Finds modules of a model that differ in nothing but their weights.

Such modules do the same operations on inputs of the same kind, so tracing one of them says what
all of them do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LEAST_EQUAL = 6
"""Fewer equal modules than this are not worth the trouble."""
_TENSORS_AND_MODULES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Equal(NamedTuple):
    """Modules that are equal but for their weights and for numbers that count them."""

    paths: tuple[str, ...]
    """Where they are in the model, in its order."""
    modules: tuple[nn.Module, ...]
    counted: frozenset[tuple[str, str]]
    """Path inside of the module and name of each attribute that differs: a module's number."""


def equal_modules(model: nn.Module) -> list[Equal]:
    """Return the groups of equal elements of the model's containers, none inside of another.

    Elements count as equal if they have the same classes at the same paths, parameters and
    buffers of the same shapes, types and layout, and equal attributes but for whole numbers.
    Anything that is not understood, such as an object of their own, makes them unequal.
    """
    named = list(model.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in named}) < len(named):
        return []  # a module at two paths: which one is called cannot be told
    found: list[Equal] = []
    taken: tuple[str, ...] = ()
    for path, module in named:
        if not isinstance(module, nn.ModuleList | nn.Sequential) or path.startswith(taken):
            continue
        prefix = f"{path}." if path else ""
        groups = _groups([(prefix + name, element) for name, element in module.named_children()])
        found += groups
        taken += tuple(f"{inside}." for group in groups for inside in group.paths)
    return found


def _groups(elements: Sequence[tuple[str, nn.Module]]) -> list[Equal]:
    groups: list[list[tuple[str, nn.Module]]] = []
    counted: list[set[tuple[str, str]]] = []
    for path, element in elements:
        for index, group in enumerate(groups):
            differing = _counting_attributes(group[0][1], element)
            if differing is not None:
                group.append((path, element))
                counted[index] |= differing
                break
        else:
            groups.append([(path, element)])
            counted.append(set())
    return [
        Equal(tuple(p for p, _ in group), tuple(m for _, m in group), frozenset(numbers))
        for group, numbers in zip(groups, counted, strict=True)
        if len(group) >= LEAST_EQUAL
    ]


def _counting_attributes(first: nn.Module, other: nn.Module) -> set[tuple[str, str]] | None:
    """Return the attributes that differ, all of them whole numbers; `None` if more differs."""
    if type(first) is not type(other) or not _same_tensors(first, other):
        return None
    both = list(zip(first.named_modules(), other.named_modules(), strict=False))
    if len(both) != sum(1 for _ in first.modules()) or len(both) != sum(1 for _ in other.modules()):
        return None
    numbers: set[tuple[str, str]] = set()
    for (path, one), (other_path, two) in both:
        if path != other_path or type(one) is not type(two):
            return None
        attributes, others = _attributes(one), _attributes(two)
        if list(attributes) != list(others):
            return None
        for name, value in attributes.items():
            if type(value) is int and type(others[name]) is int:
                if value != others[name]:
                    numbers.add((path, name))
            elif not _same(value, others[name]):
                return None
    return numbers


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in _TENSORS_AND_MODULES}


def _same_tensors(first: nn.Module, other: nn.Module) -> bool:
    return list(_described(first)) == list(_described(other))


def _described(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    positions: dict[int, int] = {}  # a weight that has two names in one module has so in all
    for path, inner in module.named_modules():
        for kind, tensors in (("parameter", inner._parameters), ("buffer", inner._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    yield path, kind, name
                    continue
                first = positions.setdefault(id(tensor), len(positions))
                yield (
                    path, kind, name, first, type(tensor), tensor.shape, tensor.stride(),
                    tensor.dtype, tensor.device, tensor.requires_grad,
                )  # fmt: skip


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if type(one) is not type(two) or isinstance(one, Tensor | nn.Module):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == two)
    if isinstance(one, functools.partial):
        return _same([one.func, one.args, one.keywords], [two.func, two.args, two.keywords])
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        same_keys = _same(list(one), list(two))
        return same_keys and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, set | frozenset):
        return all(isinstance(item, _PLAIN) for item in one) and one == two
    return False

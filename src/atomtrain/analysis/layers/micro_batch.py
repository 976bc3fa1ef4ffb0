"""How a micro-batch becomes the tensors of a chain, and that all of them have the same shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.export.structure import take_apart
from atomtrain.errors import ConfigError

MicroBatch = Mapping[str, Any] | Sequence[Any] | Tensor


class Spec(NamedTuple):
    """What a tensor of every micro-batch must be like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Entry(NamedTuple):
    """One entry of a micro-batch: a tensor, something that holds tensors, or a plain value."""

    name: str
    tensors: tuple[str, ...]
    """Names of the tensors inside, in order."""
    specs: tuple[Spec, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    plain: Any
    """The value if there is no tensor inside."""


class Inputs:
    """The entries of an example, divided into those for forward and those for the loss alone."""

    def __init__(self, model: nn.Module, example: MicroBatch, *, own_loss: bool) -> None:
        """Take the example apart; `own_loss` gives all entries to forward."""
        self.as_mapping = isinstance(example, Mapping)
        parameters = inspect.signature(model.forward).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        given = _named(example, positional)
        if not given:
            raise ConfigError("the example is empty; give one micro-batch as training will use it")
        self.entries = [_entry(name, value) for name, value in given.items()]
        if self.as_mapping:
            count = len(given)
            taken = [name in named or (any_name and own_loss) for name in given]
        else:
            count = len(given) if any_number else min(len(positional), len(given))
            taken = [index < count for index in range(len(given))]
        if own_loss and not all(taken):
            extra = [name for name, use in zip(given, taken, strict=True) if not use]
            raise ConfigError(
                f"forward of {type(model).__name__} does not take {', '.join(extra)}; leave it out "
                "of the example, or pass loss=callable, which may use it"
            )
        self.of_forward = [e for e, use in zip(self.entries, taken, strict=True) if use]

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that forward takes, in the order of `tensors`."""
        return [name for entry in self.of_forward for name in entry.tensors]

    def tensors(self, example: MicroBatch) -> list[Tensor]:
        """Return the tensors that forward takes."""
        values = self.values(example)
        return [
            tensor for entry in self.of_forward for tensor in take_apart(values[entry.name]).tensors
        ]

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model with other tensors in the example's places."""
        values, start = [], 0
        for entry in self.of_forward:
            stop = start + len(entry.tensors)
            values.append(entry.rebuild(tensors[start:stop]))
            start = stop
        if self.as_mapping:
            return model(**dict(zip((e.name for e in self.of_forward), values, strict=True)))
        return model(*values)

    def binder(
        self,
        used: Sequence[str],
        checks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        free: Container[str] = (),
    ) -> Callable[[MicroBatch], dict[str, Any]]:
        """Return a function that turns a micro-batch into the chain's inputs named `used`.

        Each of `checks` gets these inputs by name, and raises `ConfigError`. Those in `free` may
        have any shapes.

        The function raises `ConfigError` if the micro-batch lacks one, or is unlike the example.
        """
        wanted = set(used)
        names = (name for entry in self.of_forward for name in entry.tensors)
        fixed = {name for name in names if name not in free}

        def bind(micro_batch: MicroBatch) -> dict[str, Any]:
            values = self.values(micro_batch)
            bound: dict[str, Any] = {}
            for entry in self.entries:
                if not entry.tensors:
                    if entry in self.of_forward and _differs(values.get(entry.name), entry.plain):
                        raise ConfigError(
                            f"{entry.name} is {values.get(entry.name)!r}, but the model was "
                            f"analysed with {entry.plain!r}; swap it again with such an example"
                        )
                    bound[entry.name] = values.get(entry.name)
                    continue
                if not wanted.intersection(entry.tensors):
                    continue
                if values.get(entry.name) is None:
                    raise ConfigError(
                        f"the micro-batch lacks {entry.name}; it has "
                        f"{', '.join(values) or 'nothing'}"
                    )
                tensors = take_apart(values[entry.name]).tensors
                _check(entry, tensors, fixed)
                bound.update(zip(entry.tensors, tensors, strict=True))
            for check in checks:
                check(bound)
            return {name: bound[name] for name in used}

        return bind

    def values(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the entries of a micro-batch by name."""
        if isinstance(micro_batch, Mapping):
            return dict(micro_batch)
        names = [entry.name for entry in self.entries]
        values = [micro_batch] if isinstance(micro_batch, Tensor) else micro_batch
        return dict(zip(names, values, strict=False))


def _named(example: MicroBatch, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(example)
    values = [example] if isinstance(example, Tensor) else list(example)
    names = [*names[: len(values)], *(f"input{i}" for i in range(len(names), len(values)))]
    return dict(zip(names, values, strict=True))


def _entry(name: str, value: Any) -> Entry:
    tensors, rebuild = take_apart(value)
    single = isinstance(value, Tensor)
    return Entry(
        name,
        (name,) if single else tuple(f"{name}.{index}" for index in range(len(tensors))),
        tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors),
        rebuild,
        None if tensors else value,
    )


def _check(entry: Entry, tensors: Sequence[Tensor], fixed: set[str]) -> None:
    if len(tensors) != len(entry.tensors):
        raise ConfigError(
            f"{entry.name} holds {len(tensors)} tensors, but the model was analysed with "
            f"{len(entry.tensors)}; swap it again with such an example"
        )
    for name, spec, tensor in zip(entry.tensors, entry.specs, tensors, strict=True):
        if name in fixed and (tuple(tensor.shape), tensor.dtype) != spec:
            raise ConfigError(
                f"{name} is {_text(Spec(tuple(tensor.shape), tensor.dtype))}, but the model was "
                f"analysed with {_text(spec)}; pad it (or drop the last, shorter micro-batch), or "
                "swap the model with such an example"
            )


def _text(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def _differs(given: Any, expected: Any) -> bool:
    try:
        return bool(given != expected)
    except (TypeError, ValueError):
        return given is not expected

"""How a micro-batch becomes the tensors of a chain, and what must hold of each.

All have the example's shapes. Models that read images put features in the places of one token
(`masked_scatter`); with too many features the last ones would be dropped in silence, which shapes
do not tell, so their tokens are counted.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.structure import take_apart
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.limits import Limit
from atomtrain.errors import ConfigError

MicroBatch = Mapping[str, Any] | Sequence[Any] | Tensor


class Larger(Protocol):
    """Knows how large images may be; see `LargerImages`."""

    def among(self, micro_batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Return the micro-batch with the largest images, if no example had such large ones."""
        ...

    def as_example(self, micro_batch: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Have a micro-batch be the example, but not if what is done within fails."""
        ...


Ready = Callable[[bool, Callable[[], None], Callable[[Sequence[Limit]], None]], None]


class Traced(NamedTuple):
    """A chain, and how a micro-batch becomes the chain's inputs."""

    chain: Chain
    bind: Callable[[MicroBatch], dict[str, Any]]
    ready: Ready = lambda training, settle, hold: None
    """Call `ready(training, settle, hold)` before steps (`True`) and evaluations, in the mode that
    they run in. It calls `settle` before it traces the model, which no other thread may notice, and
    `hold` with what parameters are held within, if forward holds some.

    Raises `AnalysisError` or `ConfigError` if the layers cannot run in that mode.
    """
    own: Callable[[MicroBatch, Callable[..., Any]], Tensor] | None = None
    """`own(micro_batch, forward)` is the loss of what the model's `forward` returns; `None` of a
    model that tells its layers, or whose modules are its layers."""
    larger: Larger | None = None
    """Of a model of which some layers take images of any size, measured on those of the example."""


class Spec(NamedTuple):
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
        given = entries_of(example, numbered(positional))
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
        smaller: Container[str] = (),
    ) -> Callable[[MicroBatch], dict[str, Any]]:
        """Return a function that turns a micro-batch into the chain's inputs named `used`.

        Each of `checks` gets these inputs by name, and raises `ConfigError`. Those in `free` may
        have any shapes, those in `smaller` be smaller than in the example.

        The function raises `ConfigError` if the micro-batch lacks one, or is unlike the example.
        """
        wanted = set(used)
        names = (name for entry in self.of_forward for name in entry.tensors)
        fixed = {name: name in smaller for name in names if name not in free}

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
        return entries_of(micro_batch, [entry.name for entry in self.entries])


def entries_of(micro_batch: MicroBatch, names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a micro-batch by name; those that have none get `names` in turn."""
    if isinstance(micro_batch, Mapping):
        return dict(micro_batch)
    values = [micro_batch] if isinstance(micro_batch, Tensor) else micro_batch
    return dict(zip(names, values, strict=False))


def numbered(names: Sequence[str]) -> Iterator[str]:
    """Yield names, and then numbered ones without end."""
    yield from names
    yield from (f"input{index}" for index in itertools.count(len(names)))


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


def _check(entry: Entry, tensors: Sequence[Tensor], fixed: Mapping[str, bool]) -> None:
    if len(tensors) != len(entry.tensors):
        raise ConfigError(
            f"{entry.name} holds {len(tensors)} tensors, but the model was analysed with "
            f"{len(entry.tensors)}; swap it again with such an example"
        )
    for name, spec, tensor in zip(entry.tensors, entry.specs, tensors, strict=True):
        given = Spec(tuple(tensor.shape), tensor.dtype)
        if name in fixed and given != spec and not (fixed[name] and _is_smaller(given, spec)):
            raise ConfigError(
                f"{name} is {_text(given)}, but the model was "
                f"analysed with {_text(spec)}; pad it (or drop the last, shorter micro-batch), or "
                "swap the model with such an example"
            )


def _is_smaller(given: Spec, spec: Spec) -> bool:
    alike = (len(given.shape), given.dtype) == (len(spec.shape), spec.dtype)
    return alike and all(one <= two for one, two in zip(given.shape, spec.shape, strict=True))


def _text(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"


def _differs(given: Any, expected: Any) -> bool:
    try:
        return bool(given != expected)
    except (TypeError, ValueError):
        return given is not expected


_SCATTER = torch.ops.aten.masked_scatter.default
_EQUAL = torch.ops.aten.eq.Scalar
_RESHAPED = {
    torch.ops.aten.unsqueeze.default, torch.ops.aten.expand.default, torch.ops.aten.to.device,
    torch.ops.aten.to.dtype, torch.ops.aten.expand_as.default, torch.ops.aten.to.dtype_layout,
}  # fmt: skip
"""What may be between a comparison and the places that it marks."""
_KEYS = ("image_token_id", "image_token_index")


class ImageTokens(NamedTuple):
    entry: str
    """Name of the tensor with the tokens."""
    token: int
    features: int

    def check(self, tensors: Mapping[str, Any]) -> None:
        """Refuse a micro-batch with more or fewer such tokens.

        Raises:
            ConfigError: it has.
        """
        ids = tensors.get(self.entry)
        if not isinstance(ids, Tensor) or ids.is_meta:
            return
        if (found := int((ids == self.token).sum())) != self.features:
            raise ConfigError(
                f"{self.entry} has {found} image tokens ({self.token}), and the images of a "
                f"micro-batch have {self.features} features; give each image as many tokens as "
                "the model's processor does"
            )


def image_tokens(
    model: nn.Module, graph: fx.Graph, inputs: Mapping[fx.Node, int], names: Sequence[str]
) -> list[ImageTokens]:
    """Return what must hold of each micro-batch of a model whose configuration names the token."""
    config = getattr(model, "config", None)
    known = {getattr(config, key, None) for key in _KEYS} - {None}
    found = []
    for node in graph.nodes if known else ():
        if node.op != "call_function" or node.target is not _SCATTER:
            continue
        values, mask, source = node.args
        while mask.target in _RESHAPED:
            mask = mask.args[0]
        if mask.target is not _EQUAL or mask.args[0] not in inputs or mask.args[1] not in known:
            continue
        width = values.meta["val"].shape[-1]
        features = source.meta["val"].numel() // width
        found.append(ImageTokens(names[inputs[mask.args[0]]], mask.args[1], features))
    return found

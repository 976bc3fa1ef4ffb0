"""How tensors in files become what a model has, and back, as transformers itself does it.

Published files of many models are arranged otherwise than their modules: each expert's matrices lie
apart, the modules hold those of all experts as one. transformers keeps a table of such
conversions. Here they run for one parameter at a time, on tensors that are read only then. No
family is known by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from atomtrain.errors import ConfigError

Read = Callable[[str], Tensor]


class Conversion(NamedTuple):
    """What becomes of one tensor, or of several that belong together."""

    model: Any
    name: str
    """Of what they become, or of the first of it."""
    sources: dict[str, list[str]]
    """Names of the tensors in their order, by the pattern that they match."""
    converter: Any = None
    """Of transformers; `None` for a tensor that is only called otherwise."""
    renamings: Sequence[Any] = ()
    """What the converter's results are called in files."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def run(self, read: Read) -> dict[str, Tensor]:
        """Return what the tensors become, by name; memory holds sources and results at most twice.

        Args:
            read: Returns a source by its name; on the meta device shapes are found without data.

        Raises:
            Exception: of any type, where sources are missing or of shapes that do not fit.
        """
        if self.converter is None:
            return {self.name: read(self.names[0])}
        converter = copy.deepcopy(self.converter)  # collects what it converts in itself
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.name, name, pattern, partial(read, name))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {
            _renamed(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


def conversions_from_files(model: Any, names: Iterable[str]) -> list[Conversion]:
    """Return what becomes of tensors with these names in files, as `from_pretrained` would do it.

    Those that the model does not have become something of a name that it does not have.

    Args:
        model: Of transformers; may be on the meta device.
        names: Of all tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _parts(get_model_conversion_mapping(model))
    known = model.state_dict()
    made = _Grouped(model, converters)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if target not in known and name in known:
            target, pattern = name, None
        made.add(name, target, pattern)
    return made.conversions()


def conversions_to_files(model: Any, names: Sequence[str]) -> list[Conversion]:
    """Return what becomes of a model's tensors in files, as `save_pretrained` would do it.

    Args:
        model: Of transformers; may be on the meta device.
        names: Of the tensors that are to be written; the order of the conversions is theirs.

    Raises:
        ConfigError: the installed transformers cannot go back.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    # Older names are only read. Whether a prefix was there is not known, and both are read.
    table = [
        transform
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(transform, PrefixChange)
    ]
    try:
        renamings, converters = _parts([each.reverse_transform() for each in reversed(table)])
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"the installed transformers cannot write a {type(model).__name__} in the form of its "
            f"published files ({error or type(error).__name__}); install another release"
        ) from error
    made = _Grouped(model, converters, renamings)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = name, None
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                break
        made.add(name, _renamed(name, renamings) if pattern is None else target, pattern)
    order = {name: index for index, name in enumerate(names)}
    return sorted(made.conversions(), key=lambda each: min(order[name] for name in each.names))


def names_in_files(model: Any) -> dict[str, list[str]]:
    """Return what `save_pretrained` calls what it makes of each of a model's tensors.

    Those that the installed transformers cannot write are left out.
    """
    outlines = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    found: dict[str, list[str]] = {}
    try:
        conversions = conversions_to_files(model, list(outlines))
    except ConfigError:
        return found
    for conversion in conversions:
        try:
            made = list(conversion.run(outlines.__getitem__))
        except Exception:  # noqa: BLE001 (an operation of transformers may raise anything)
            continue
        found.update(dict.fromkeys(conversion.names, made))
    return found


class _Grouped:
    def __init__(
        self, model: nn.Module, converters: Sequence[Any], renamings: Sequence[Any] = ()
    ) -> None:
        self._model, self._renamings = model, renamings
        self._converters = {
            pattern: each for each in converters for pattern in each.source_patterns
        }
        self._made: dict[tuple[str, str], Conversion] = {}

    def add(self, name: str, target: str, pattern: str | None) -> None:
        """Take a tensor which becomes `target`, by a converter if there is a pattern."""
        if pattern is None:
            self._made[target, name] = Conversion(self._model, target, {name: [name]})
            return
        converter = self._converters[pattern]
        key = target, f"{id(converter)}"
        if key not in self._made:
            self._made[key] = Conversion(self._model, target, {}, converter, self._renamings)
        self._made[key].sources.setdefault(pattern, []).append(name)

    def conversions(self) -> list[Conversion]:
        return list(self._made.values())


def _parts(table: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rows = list(table)
    return (
        [row for row in rows if isinstance(row, WeightRenaming)],
        [row for row in rows if isinstance(row, WeightConverter)],
    )


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name

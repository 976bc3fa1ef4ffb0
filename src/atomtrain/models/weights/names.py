"""Which tensors of a model's files become which of its parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.errors import DataError, nearest
from atomtrain.models.weights.conversion import Conversion, conversions_from_files, names_in_files
from atomtrain.models.weights.files import WeightFiles, is_float

_LONGEST_REASON = 200


class Source(NamedTuple):
    name: str
    """The model's name of it."""
    conversion: Conversion

    @property
    def stored(self) -> list[str]:
        return self.conversion.names

    def read(self, files: WeightFiles) -> Tensor:
        """Return the tensor in memory of its own, in the type of the files."""
        return self.conversion.run(files.read)[self.name]

    def read_into(self, files: WeightFiles, target: Tensor) -> None:
        """Fill `target`, contiguous and on the CPU; where the files hold the tensor as it is,
        without memory beside it."""
        if self.conversion.converter is None:
            files.read_into(self.stored[0], target)
        else:
            target.copy_(self.conversion.run(files.reader(target.dtype))[self.name])


class _Folder(NamedTuple):
    files: WeightFiles
    conversions: list[Conversion]
    sources: dict[str, Source]
    outlines: dict[str, Tensor]
    """Without data, by the model's name."""
    reasons: dict[str, str]
    """Why something could not be made, by its name."""
    published: dict[str, list[str]]
    """What transformers would write of each of the model's tensors."""

    def lacking(self, name: str) -> list[str]:
        return [each for each in self.published.get(name, [name]) if each not in self.files]


def match_weights(
    model: nn.Module, files: WeightFiles, new: Collection[str] = ()
) -> dict[str, Source]:
    """Return what each of the model's parameters and saved buffers is made of.

    A tied weight is stored under one of its names. Weights that were saved without (or with) the
    prefix of the architecture's base model are found as well, and those in the form of published
    files where that is not the modules' own.

    Args:
        model: Of transformers; may be on the meta device.
        files: Its weights.
        new: Names of what the files need not have.

    Returns:
        By the model's own (first) name. Saved buffers that the files lack are left out: then the
        model's own values hold.

    Raises:
        DataError: a parameter without a tensor, of another shape or type, or
            files of a larger model than `config.json` says.
    """
    folder = _look(model, files)
    found: dict[str, Source] = {}
    for names, parameter in _unique(model):
        if names[0] in new:
            continue
        source = next((folder.sources[name] for name in names if name in folder.sources), None)
        if source is None:
            raise DataError(_missing(names, folder))
        _check(source, parameter, folder)
        found[names[0]] = source
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and (source := folder.sources.get(name)) is not None:
            _check(source, buffer, folder)
            found[name] = source
    _check_rest(model, folder, found)
    return found


def _look(model: nn.Module, files: WeightFiles) -> _Folder:
    conversions = conversions_from_files(model, files)
    folder = _Folder(files, conversions, {}, {}, {}, names_in_files(model))
    known = model.state_dict()
    for conversion in conversions:
        if conversion.name not in known:
            continue
        try:
            made = conversion.run(lambda name: _outline(name, files))
        except Exception as error:  # noqa: BLE001 (an operation of transformers may raise anything)
            folder.reasons[conversion.name] = " ".join(str(error).split())[:_LONGEST_REASON]
            continue
        for name, outline in made.items():
            if name not in folder.sources or conversion.names == [name]:
                folder.sources[name] = Source(name, conversion)
                folder.outlines[name] = outline
    return folder


def _outline(name: str, files: WeightFiles) -> Tensor:
    entry = files.entries[name]
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _unique(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    for key, parameter in parameters.items():
        yield names[key], parameter


def _check(source: Source, tensor: Tensor, folder: _Folder) -> None:
    name, stored = source.name, source.stored
    if source.conversion.converter is not None:
        published = folder.published.get(name, [])
        if set(stored) & set(published) and set(published) - set(stored):
            raise DataError(_missing([name], folder))
    entry, shape = folder.files.entries[stored[0]], list(folder.outlines[name].shape)
    if shape != list(tensor.shape):
        what = "" if len(stored) == 1 else f" and {len(stored) - 1} more, together"
        raise DataError(
            f"{entry.file} holds {stored[0]!r}{what} of shape {shape}, config.json says "
            f"{list(tensor.shape)}; both must be of one model"
        )
    for each in stored:
        entry = folder.files.entries[each]
        if tensor.is_floating_point() != is_float(entry):
            raise DataError(
                f"{entry.file} holds {each!r} as {entry.dtype}, the model's {name!r} is "
                f"{tensor.dtype}; give weights in float32, bfloat16 or float16"
            )


def _missing(names: Sequence[str], folder: _Folder) -> str:
    name, lacking = names[0], folder.lacking(names[0])
    if not lacking:
        reason = next((folder.reasons[each] for each in names if each in folder.reasons), "")
        return (
            f"the weights in {folder.files.folder} cannot be made {name!r} "
            f"({reason or 'transformers does not take them'}); give a complete copy of the model"
        )
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    made = "" if lacking == [name] else f", of which {name!r} is made"
    return (
        f"the weights in {folder.files.folder} lack {lacking[0]!r}{more}{made}."
        f"{nearest(lacking[0], folder.files.entries)} Give a complete copy of the model"
    )


def _check_rest(model: nn.Module, folder: _Folder, found: dict[str, Source]) -> None:
    """Refuse files with further layers, or with a head of its own where the model ties it."""
    first = {name: names[0] for names, _ in _unique(model) for name in names}
    layers = {_layer_of(name) for name in first}
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", ()) or ()
    ]
    used = {id(source.conversion) for source in found.values()}
    for conversion in folder.conversions:
        name, stored = conversion.name, conversion.names[0]
        if id(conversion) in used or any(pattern.search(stored) for pattern in ignored):
            continue
        file = folder.files.entries[stored].file
        if name in first and not _same(conversion, found[first[name]], folder.files):
            raise DataError(_twofold(name, stored, found[first[name]], file.name))
        numbered, prefix = _layer_of(name), str(getattr(model, "base_model_prefix", ""))
        known = {f"{prefix}.{numbered}", numbered, numbered.removeprefix(f"{prefix}.")}
        if any(part.isdigit() for part in numbered.split(".")) and not known & layers:
            raise DataError(
                f"{file} holds {stored!r}, a layer that config.json does not have; both must be "
                "of one model"
            )


def _layer_of(name: str) -> str:
    """Return a name up to its first number: `model.layers.3` of `model.layers.3.mlp.weight`."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def _same(conversion: Conversion, source: Source, files: WeightFiles) -> bool:
    """Return whether another tensor of the same parameter holds the same values."""
    return conversion.converter is None and bool(
        files.read(conversion.names[0]).equal(source.read(files))
    )


def _twofold(name: str, stored: str, source: Source, file: str) -> str:
    if name != source.name:
        return (
            f"{file} holds a {stored!r} that differs from the weight which config.json ties it to; "
            "set tie_word_embeddings to false in config.json"
        )
    return (
        f"{file} holds a {stored!r} beside {source.stored[0]!r}, and both become {name!r}; remove "
        "the one that is not the model's"
    )

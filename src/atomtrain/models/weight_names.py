"""Which tensor of a model's files belongs to which of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from atomtrain.errors import DataError, nearest
from atomtrain.models.weight_files import WeightFiles, is_float


def match_weights(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """Return the name in the files of each of the model's parameters and saved buffers.

    A tied weight is stored under one of its names. Weights that were saved without (or with) the
    prefix of the architecture's base model are found as well.

    Args:
        model: May be on the meta device.
        files: Its weights.

    Returns:
        By the model's own (first) name. Saved buffers that the files lack are left out: then the
        model's own values hold.

    Raises:
        DataError: a parameter without a tensor, of another shape or type, or
            files of a larger model than `config.json` says.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    found: dict[str, str] = {}
    for names, parameter in _unique(model):
        stored = _stored_name(names, prefix, files)
        if stored is None:
            raise DataError(_missing(names[0], files, model))
        _check(names[0], parameter, stored, files)
        found[names[0]] = stored
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and (stored := _stored_name([name], prefix, files)) is not None:
            _check(name, buffer, stored, files)
            found[name] = stored
    _check_rest(model, prefix, files, set(found.values()))
    return found


def _unique(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield each parameter once, with all of its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    for key, parameter in parameters.items():
        yield names[key], parameter


def _stored_name(names: list[str], prefix: str, files: WeightFiles) -> str | None:
    candidates = [*names]
    if prefix:
        candidates += [name.removeprefix(f"{prefix}.") for name in names]
        candidates += [f"{prefix}.{name}" for name in names]
    return next((name for name in candidates if name in files), None)


def _check(name: str, tensor: Tensor, stored: str, files: WeightFiles) -> None:
    entry = files.entries[stored]
    if entry.shape != tuple(tensor.shape):
        raise DataError(
            f"{entry.file} holds {stored!r} of shape {list(entry.shape)}, config.json says "
            f"{list(tensor.shape)}; both must be of one model"
        )
    if tensor.is_floating_point() != is_float(entry):
        raise DataError(
            f"{entry.file} holds {stored!r} as {entry.dtype}, the model's {name!r} is "
            f"{tensor.dtype}; give weights in float32, bfloat16 or float16"
        )


def _missing(name: str, files: WeightFiles, model: nn.Module) -> str:
    hint = (
        " This architecture's published files are arranged otherwise than its modules; rearrange "
        "them once: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW, "
        "save_original_format=False)"
        if _is_rearranged(model)
        else " Give a complete copy of the model"
    )
    return f"the weights in {files.folder} lack {name!r}.{nearest(name, files.entries)}{hint}"


def _is_rearranged(model: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return any(
        type(item).__name__ == "WeightConverter" for item in get_model_conversion_mapping(model)
    )


def _check_rest(model: nn.Module, prefix: str, files: WeightFiles, used: set[str]) -> None:
    """Refuse files with further layers, or with a head of its own where the model ties it."""
    aliases = {name for names, _ in _unique(model) for name in names}
    layers = {_layer_of(name) for name in aliases}
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", ()) or ()
    ]
    for name in files:
        if name in used or any(pattern.search(name) for pattern in ignored):
            continue
        if name in aliases and not _same(model, name, used, prefix, files):
            raise DataError(
                f"{files.entries[name].file} holds a {name!r} that differs from the weight which "
                "config.json ties it to; set tie_word_embeddings to false in config.json"
            )
        numbered = _layer_of(name)
        known = {f"{prefix}.{numbered}", numbered, numbered.removeprefix(f"{prefix}.")}
        if any(part.isdigit() for part in numbered.split(".")) and not known & layers:
            raise DataError(
                f"{files.entries[name].file} holds {name!r}, a layer that config.json does not "
                "have; both must be of one model"
            )


def _layer_of(name: str) -> str:
    """Return a name up to its first number: `model.layers.3` of `model.layers.3.mlp.weight`."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def _same(model: nn.Module, name: str, used: set[str], prefix: str, files: WeightFiles) -> bool:
    """Return whether another stored name of the same parameter holds the same values."""
    for names, _ in _unique(model):
        if name in names:
            other = _stored_name(names, prefix, files)
            assert other is not None
            return bool(files.read(name).equal(files.read(other)))
    return True

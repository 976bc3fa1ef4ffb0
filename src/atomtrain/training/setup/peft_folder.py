"""Adapters in a folder of `peft`: written so that it loads them, and read.

The adapter of a linear layer or an embedding has the layer's name. peft wraps a module with experts
once for each adapted parameter, in their order in the module: the last parameter's adapter has the
module's name, and `.base_layer` leads to each one before. A module of `modules_to_save` has its own
name there, and peft keeps a weight that several modules share once for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError, DataError, reason_of
from atomtrain.files import read_small
from atomtrain.models.hugging_face import read_config
from atomtrain.models.image_text import in_tower, tower_of
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.lora_embedding import EMBEDDING_PARTS, check_embedding
from atomtrain.models.lora_saved import is_within
from atomtrain.models.narrow import adapted_by, adapter_of, is_transposed
from atomtrain.models.weights.files import WeightFiles
from atomtrain.training.setup.adapters import Adapters, part_of

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INNER = ".base_layer"
_OF_NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "modules_to_save", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Read elsewhere, or without influence on trained adapters. What is adapted, the tensors say."""
_TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""As `target_modules` of a mixture peft takes these for those of experts, whose names they were in
older versions of transformers. As parameters they are what they are; rounding differs."""
_ONLY = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}


def peft_config(adapters: Adapters) -> dict[str, Any]:
    """Return the content of an `adapter_config.json`.

    Raises:
        ConfigError: peft would take a linear layer's DoRA for that of experts.
    """
    config = adapters.config
    linears = [layer for layer in adapters.tensors if adapted_by(layer) is None]
    experts = [name for name in map(adapted_by, adapters.tensors) if name is not None]
    parameters = {".".join(name.split(".")[-2:]) for name in experts}
    taken = [layer for layer in linears if layer.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    if adapters.experts and taken:
        if config.dora:
            raise ConfigError(
                f"peft takes DoRA of {taken[0]} for that of experts, which it does not have; "
                "export the whole model with --merge, or train with targets that leave out "
                f"{', '.join(sorted(_TAKEN_FOR_EXPERTS))}"
            )
        linears = [layer for layer in linears if layer not in taken]
        parameters |= {".".join(layer.split(".")[-2:]) + ".weight" for layer in taken}
    return {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if adapters.sizes.embeds else "CAUSAL_LM",
        "base_model_name_or_path": str(adapters.folder),
        "r": config.r,
        "lora_alpha": config.alpha,
        # Without influence on what is trained, and peft's adapters of parameters have none.
        "lora_dropout": 0.0 if parameters else config.dropout,
        "use_dora": config.dora,
        "use_rslora": config.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in linears}),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        **({"modules_to_save": list(_saved_as_peft(adapters))} if adapters.saved else {}),
        **_excluded(adapters),
    }


def _excluded(adapters: Adapters) -> dict[str, str]:
    """Return what peft is to leave out, though it has the names of what is adapted."""
    outline = adapters.weights.outline
    tower = tower_of(outline)
    if tower is None or any(in_tower(outline, layer) for layer in adapters.tensors):
        return {}
    return {"exclude_modules": rf"{re.escape(tower)}\..*"}


def peft_tensors(adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    wrapped = _wrapped(name for name in adapters.experts if adapter_of(name) in adapters.tensors)
    for layer, parts in adapters.tensors.items():
        name, path = adapted_by(layer), layer
        if name is not None:
            path = name.rpartition(".")[0]
            path += _INNER * (len(wrapped[path]) - 1 - wrapped[path].index(name))
        for part, tensor in parts.items():
            yield f"{_PREFIX}{path}.{part}", tensor
    first = _first_names(adapters.weights.outline)
    for path, module in _saved_as_peft(adapters).items():
        for inner in module.state_dict():
            name = f"{path}.{inner}"
            tensor = adapters.value(first.get(name, name))
            yield f"{_PREFIX}{name}", tensor if first.get(name, name) == name else tensor.clone()


def _saved_as_peft(adapters: Adapters) -> dict[str, nn.Module]:
    """Return the modules that peft is to save: those, and others that share their parameters."""
    saved = adapters.saved
    trained = {id(p) for module in saved.values() for p in module.parameters()}
    sharing = {
        path: module
        for path, module in adapters.weights.outline.named_modules()
        if path not in saved and not is_within(path, saved)
        if any(id(p) in trained for p in module.parameters(recurse=False))
    }
    return {**saved, **sharing}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return for each name of a parameter the first one of the same parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every}


def read_peft(folder: Path) -> Adapters:
    """Read the adapters in a folder; of the frozen model that they name, the headers.

    Raises:
        ConfigError: they are of a kind that ATOM does not have, or their model is not there.
        DataError: the tensors are damaged, or do not fit the model.
    """
    file = folder / ADAPTER_CONFIG
    said = _read(file)
    base = Path(str(said.get("base_model_name_or_path")))
    if not base.is_dir():  # a folder's word is not an id of a hub
        raise ConfigError(
            f"{file} is of the model {base}, which is not a folder here; put it there, or name its "
            "folder as base_model_name_or_path"
        )
    try:
        config = LoraConfig(
            r=int(said.get("r", 8)),
            alpha=float(said.get("lora_alpha", 8)),
            dora=bool(said.get("use_dora")),
            rslora=bool(said.get("use_rslora")),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} cannot be used ({reason_of(error)})") from error
    adapters = Adapters(config, read_config(base), base)
    files = WeightFiles(folder, [folder / ADAPTER_FILE])
    saved = _read_saved(adapters, tuple(said.get("modules_to_save") or ()), files)
    targets = tuple(f".{target}" for target in said.get("target_parameters") or ())
    wrapped = _wrapped(name for name in adapters.experts if f".{name}".endswith(targets))
    for key in files:
        if key in saved:
            continue
        if _is_kept_embedding(key, adapters, files):
            continue
        layer, part = _layer_of(key, wrapped, adapters) or ("", "")
        shape = _shapes(adapters, layer).get(part) if layer else None
        if shape != files.entries[key].shape:
            raise DataError(
                f"{folder / ADAPTER_FILE} holds {key!r} of shape "
                f"{list(files.entries[key].shape)}, and "
                f"{'that name is not an adapter' if shape is None else f'{list(shape)} is right'} "
                f"for the model in {base}; give adapters of linear layers or experts of that model"
            )
        adapters.tensors.setdefault(layer, {})[part] = files.read(key)
    for layer, parts in adapters.tensors.items():
        if EMBEDDING_PARTS[0] in parts:
            check_embedding(adapters.weights.outline, layer)
        if lacking := _shapes(adapters, layer).keys() - parts.keys():
            raise DataError(
                f"{folder / ADAPTER_FILE} lacks the {min(lacking)} of {layer}; give a whole copy"
            )
    return adapters


def _read(file: Path) -> dict[str, Any]:
    """Return the configuration, if ATOM's adapters are of its kind."""
    try:
        said = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({reason_of(error)}); restore it") from error
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise ConfigError(f"{file} is not of adapters of the type LORA; give some that are")
    for name, value in said.items():
        allowed = value in _ONLY[name] if name in _ONLY else not value
        if name not in _OF_NO_MATTER and not allowed:
            raise ConfigError(
                f"{file} has {name}={value!r}, which ATOM's adapters do not have; merge them with "
                "peft, and give the merged model"
            )
    for name in ("target_parameters", "modules_to_save"):
        names = said.get(name) or ()
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
            raise ConfigError(f"{file} has {name} that are not names; restore it")
    return said


def _read_saved(adapters: Adapters, ends: tuple[str, ...], files: WeightFiles) -> set[str]:
    """Read the modules whose path ends so, as peft compares; return the keys of their tensors.

    Raises:
        ConfigError: modules that share a parameter do not share it any more.
        DataError: one of their tensors lacks, or has another shape.
    """
    outline, folder = adapters.weights.outline, files.folder
    ending = {path: m for path, m in outline.named_modules() if path.endswith(ends)}
    adapters.saved = {path: m for path, m in ending.items() if not is_within(path, ending)}
    first, read = _first_names(outline), set[str]()
    for path, module in _saved_as_peft(adapters).items():
        for inner, like in module.state_dict().items():
            name = f"{path}.{inner}"
            key, own = f"{_PREFIX}{name}", first.get(name, name)
            entry, before = files.entries.get(key), adapters.whole.get(own)
            if (entry is None and before is None) or (entry and entry.shape != like.shape):
                raise DataError(
                    f"{folder / ADAPTER_FILE} lacks {key!r} of shape {list(like.shape)}, of "
                    "modules_to_save; give a whole copy"
                )
            found = None if entry is None else files.read(key)
            if found is None or (before is not None and not torch.equal(before, found)):
                raise ConfigError(
                    f"{folder / ADAPTER_FILE} trains {own} apart from other uses of it, such as "
                    f"{name}, and the model has one weight for all; merge the adapters with peft, "
                    "and give the merged model"
                )
            adapters.whole[own] = found
            read.add(key)
    return read


def _layer_of(
    key: str, wrapped: Mapping[str, list[str]], adapters: Adapters
) -> tuple[str, str] | None:
    """Return ATOM's name of the layer, and the part, of a tensor of peft's; `None` if it has
    neither."""
    layer, part = part_of(key.removeprefix(_PREFIX)) or ("", "")
    path = layer
    while path.endswith(_INNER):
        path = path.removesuffix(_INNER)
    if path in wrapped:
        depth = (len(layer) - len(path)) // len(_INNER)
        names = wrapped[path]
        return (adapter_of(names[-1 - depth]), part) if depth < len(names) else None
    weight = adapters.outline.get(f"{layer}.weight")
    return None if weight is None or weight.ndim != 2 else (layer, part)


def _is_kept_embedding(key: str, adapters: Adapters, files: WeightFiles) -> bool:
    """Return whether a tensor is the frozen embedding that peft keeps beside its adapter.

    Raises:
        ConfigError: it is not the model's.
    """
    path = key.removeprefix(_PREFIX).removesuffix(f"{_INNER}.weight")
    if f"{_PREFIX}{path}{_INNER}.weight" != key or path not in adapters.embeddings:
        return False
    own, kept = adapters.weights.read(f"{path}.weight"), files.read(key)
    if own.shape != kept.shape or not torch.equal(own.float(), kept.float()):
        raise ConfigError(
            f"{files.folder / ADAPTER_FILE} holds another {path}.weight than {adapters.folder}; "
            "merge the adapters with peft, and give the merged model"
        )
    return True


def _shapes(adapters: Adapters, layer: str) -> dict[str, tuple[int, ...]]:
    name, config = adapted_by(layer), adapters.config
    if layer in adapters.embeddings:
        tokens, width = adapters.outline[f"{layer}.weight"].shape
        return dict(zip(EMBEDDING_PARTS, ((config.r, tokens), (width, config.r)), strict=True))
    shape = adapters.outline[name or f"{layer}.weight"].shape
    experts, (outputs, inputs) = (1, shape) if name is None else (shape[0], shape[1:])
    if name is not None and is_transposed(adapters.experts[name]):
        outputs, inputs = inputs, outputs
    shapes: dict[str, tuple[int, ...]] = {
        "lora_A.weight": (experts * config.r, inputs),
        "lora_B.weight": (outputs, config.r * experts),
    }
    if config.dora:
        shapes["lora_magnitude_vector"] = (outputs,)
    return shapes


def _wrapped(parameters: Iterator[str]) -> dict[str, list[str]]:
    """Return the adapted parameters of each module with experts, in the module's order."""
    modules: dict[str, list[str]] = {}
    for name in parameters:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules

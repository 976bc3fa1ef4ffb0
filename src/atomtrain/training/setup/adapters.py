"""Trained adapters beside the frozen weights that they belong to, and in a folder of `peft`.

A linear layer's adapter has the layer's name. peft wraps a module with experts once for each
adapted parameter, in their order in the module: the last parameter's adapter has the module's name,
and `.base_layer` leads to each one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.errors import CheckpointError, ConfigError, DataError, reason_of
from atomtrain.files import read_small
from atomtrain.models.heads import HEAD_WEIGHT
from atomtrain.models.hugging_face import HuggingFaceConfig, build, read_config
from atomtrain.models.image_text import in_tower, tower_of
from atomtrain.models.lora import (
    ADAPTER_PARTS,
    adapted_by,
    adapter_of,
    experts_of,
    is_transposed,
    merged,
    merged_experts,
)
from atomtrain.models.lora_config import NOTHING, LoraConfig
from atomtrain.models.lora_init import begin
from atomtrain.models.weights.files import WeightFiles
from atomtrain.progress import Progress
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.loading import Weights, seed_of_adapter

_PARAMETER = "/parameter"


class Adapters:
    """Adapters, and the frozen weights that they belong to."""

    def __init__(self, config: LoraConfig, sizes: HuggingFaceConfig, folder: Path) -> None:
        """Read the headers of the frozen model's files; there is no adapter yet.

        Args:
            config: Of the adapters.
            sizes: Of the frozen model.
            folder: Where it lies.

        Raises:
            DataError: another model lies there.
        """
        self.config, self.sizes, self.folder = config, sizes, folder
        self.weights = Weights(folder, sizes)
        outline = self.weights.outline
        self.experts = experts_of(outline)
        """See `experts_of`; in the model's order."""
        self.outline = {**dict(outline.named_parameters()), **dict(outline.named_buffers())}
        """The frozen model's tensors without data, those that its files have."""
        self.outline = {name: self.outline[name] for name in self.weights.names}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By layer, then by `ADAPTER_PARTS`."""
        self.whole: dict[str, Tensor] = {}
        """What is trained itself, by name: the head of a classifier."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, recipe: Recipe) -> Adapters:
        """Read those of a run with `--lora`.

        Raises:
            CheckpointError: the frozen model is not where it was.
            DataError: it is another one now.
        """
        assert recipe.lora is not None
        assert isinstance(recipe.sizes, HuggingFaceConfig)
        folder = Path(str(checkpoint.meta.get("model_folder")))
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint.path} holds adapters of the model in {folder}, which is not "
                "there any more; put it there again"
            )
        adapters = cls(recipe.lora, recipe.sizes, folder)
        known = dict(adapters.weights.outline.named_parameters())
        for _, shard in checkpoint.shards():
            for key, tensor in shard.items():
                name = key.removesuffix(_PARAMETER)
                if not key.endswith(_PARAMETER):
                    continue
                if found := part_of(name):
                    layer, part = found
                    adapters.tensors.setdefault(layer, {})[part] = tensor.clone()
                elif name in known:
                    adapters.whole[name] = tensor.clone()
        if recipe.lora.init != NOTHING:
            adapters._become_ordinary(recipe.seed)
        head = known[HEAD_WEIGHT].shape if recipe.has_head else None
        if head is not None and adapters.whole.get(HEAD_WEIGHT, torch.empty(())).shape != head:
            raise CheckpointError(f"{checkpoint.path} lacks the parameter {HEAD_WEIGHT!r}")
        return adapters

    def _become_ordinary(self, seed: int) -> None:
        """Become adapters of the published matrices, out of which training took their beginning.

        `W - s B0 A0 + s B A` is `W + s B' A'` with `B' = [B, -B0]` and `A' = [A; A0]`, as peft
        converts them.
        """
        with Progress("finding how adapters began", len(self.tensors), "layers") as progress:
            for layer, parts in self.tensors.items():
                weight = self.weights.read(f"{layer}.weight").float()
                begun = begin(weight, self.config, seed_of_adapter(seed, layer))
                a, b = parts["lora_A.weight"].float(), parts["lora_B.weight"].float()
                parts["lora_A.weight"] = torch.cat((a, begun.a))
                parts["lora_B.weight"] = torch.cat((b, -begun.b), 1)
                progress.advance()
        self.config = self.config.as_ordinary

    def value(self, name: str) -> Tensor:
        """Return one of the model's tensors as it was trained, or with its adapter in it."""
        if name in self.whole:
            return self.whole[name]
        tensor = self.weights.read(name)
        scale = self.config.scale
        if adapter := self.tensors.get(adapter_of(name)):
            transposed = is_transposed(self.experts[name])
            return merged_experts(tensor, adapter, scale, transposed=transposed)
        adapter = self.tensors.get(name.removesuffix(".weight"))
        return tensor if adapter is None else merged(tensor, adapter, scale)

    def merged_model(self) -> nn.Module:
        """Return the frozen model with the adapters in its weights, on the CPU."""
        model = build(self.sizes, str(self.folder))
        self.weights.fill(model)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            adapted = (adapted_by(layer) or f"{layer}.weight" for layer in self.tensors)
            for name in (*adapted, *self.whole):
                parameters[name].copy_(self.value(name))
        return model


def part_of(name: str) -> tuple[str, str] | None:
    """Return the layer and the one of `ADAPTER_PARTS` that a name ends with; `None` if none."""
    for part in ADAPTER_PARTS:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return None


ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_INNER = ".base_layer"
_OF_NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
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
        "task_type": "CAUSAL_LM",
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


def read_peft(folder: Path) -> Adapters:
    """Read the adapters in a folder; of the frozen model that they name, the headers.

    Raises:
        ConfigError: they are of a kind that ATOM does not have, or their model is not there.
        DataError: the tensors are damaged, or do not fit the model.
    """
    file = folder / ADAPTER_CONFIG
    said = _read(file)
    base = Path(str(said.get("base_model_name_or_path")))
    if not base.is_dir():  # a folder's word is no id of a hub
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
    targets = tuple(f".{target}" for target in said.get("target_parameters") or ())
    wrapped = _wrapped(name for name in adapters.experts if f".{name}".endswith(targets))
    for key in files:
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
    targets = said.get("target_parameters") or ()
    if not isinstance(targets, list | tuple) or not all(isinstance(each, str) for each in targets):
        raise ConfigError(f"{file} has target_parameters that are not names; restore it")
    return said


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


def _shapes(adapters: Adapters, layer: str) -> dict[str, tuple[int, ...]]:
    name, config = adapted_by(layer), adapters.config
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

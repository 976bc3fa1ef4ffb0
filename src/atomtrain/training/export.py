"""A checkpoint as the folder of a Hugging Face model, written layer by layer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from atomtrain.checkpoint import Checkpoint
from atomtrain.data import Tokenizer
from atomtrain.errors import CheckpointError, ConfigError, nearest
from atomtrain.models.gpt_as_gpt2 import gpt2_config, gpt2_name, gpt2_tensor
from atomtrain.models.gpt_config import GPTConfig
from atomtrain.models.hugging_face import CONFIG_FILE
from atomtrain.models.making import Sizes, make_outline
from atomtrain.models.weight_files import INDEX_FILE, SINGLE_FILE
from atomtrain.training.state import PARAMETER, SWARM_SHARD, recipe_of

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Bytes of a file at most, unless a single tensor is larger."""


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    tensors: int
    size_bytes: int
    """Of the weights."""
    files: int
    """Of weights."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in the checkpoint, and how it is to be called."""

    shard: str
    key: str
    name: str
    size_bytes: int


def export(
    checkpoint: Checkpoint, target: Path, dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write a checkpoint's model as a folder that `transformers` loads.

    The folder appears as a whole, when everything is on disk. Memory holds one file's tensors.

    Args:
        checkpoint: Of `atom train`.
        target: Must not exist, or be an empty folder.
        dtype: Type of the weights; `float32` is exactly what was trained.
        shard_bytes: Bytes of a file at most.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`, or the folder cannot be written.
        ConfigError: the target is there already, or the model has no counterpart there.
    """
    if dtype not in TYPES:
        raise ConfigError(
            f"there is no type {dtype!r}.{nearest(dtype, TYPES)} Types: {', '.join(TYPES)}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; choose another folder, or remove it")
    recipe, tokenizer = recipe_of(checkpoint)
    texts = _texts(recipe.sizes, tokenizer, dtype)
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        files = _write_weights(checkpoint, recipe.sizes, unfinished, TYPES[dtype], shard_bytes)
        for file in unfinished.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{target} could not be written ({reason}); free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    places = [place for group in files for place in group]
    width_bytes = sum(place.size_bytes for place in places)
    return Exported(target, len(places), width_bytes, len(files))


def _write_weights(
    checkpoint: Checkpoint, sizes: Sizes, folder: Path, dtype: torch.dtype, shard_bytes: int
) -> list[list[_Place]]:
    """Write the safetensors files; return what is in each."""
    groups = list(_grouped(_places(checkpoint, sizes, dtype), shard_bytes))
    convert = _converter(sizes, dtype)
    weight_map = {}
    for index, group in enumerate(groups):
        name = SINGLE_FILE
        if len(groups) > 1:
            name = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        opened: dict[str, dict[str, Tensor]] = {}
        for place in group:
            if place.shard not in opened:
                opened = {place.shard: checkpoint.shard(place.shard)}
            tensors[place.name] = convert(place.key, opened[place.shard][place.key])
            weight_map[place.name] = name
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        total_bytes = sum(place.size_bytes for group in groups for place in group)
        index_text = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index_text, indent=2), encoding="utf-8")
    return groups


def _places(checkpoint: Checkpoint, sizes: Sizes, dtype: torch.dtype) -> Iterator[_Place]:
    """Yield parameters and saved buffers in the checkpoint's order."""
    wanted: Mapping[str, Tensor] = make_outline(sizes).state_dict()
    for shard, keys in checkpoint.tensor_names.items():
        for key in keys if shard != SWARM_SHARD else ():
            name, _, kind = key.rpartition("/")
            if kind == PARAMETER and name in wanted:
                tensor = wanted[name]
                each_bytes = dtype.itemsize if tensor.is_floating_point() else tensor.itemsize
                called = gpt2_name(name) if isinstance(sizes, GPTConfig) else name
                yield _Place(shard, key, called, tensor.numel() * each_bytes)


def _grouped(places: Iterator[_Place], most_bytes: int) -> Iterator[list[_Place]]:
    group: list[_Place] = []
    for place in places:
        if group and sum(p.size_bytes for p in group) + place.size_bytes > most_bytes:
            yield group
            group = []
        group.append(place)
    yield group


def _converter(sizes: Sizes, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    def convert(key: str, tensor: Tensor) -> Tensor:
        if isinstance(sizes, GPTConfig):
            tensor = gpt2_tensor(key.rpartition("/")[0], tensor)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return convert


def _texts(sizes: Sizes, tokenizer: Tokenizer, dtype: str) -> dict[str, str]:
    """Return the small files by name."""
    if isinstance(sizes, GPTConfig):
        config = gpt2_config(sizes, tokenizer.separator)
        files = {"tokenizer_config.json": _tokenizer_config(tokenizer, sizes.context)}
    else:
        config = {**sizes.config, "architectures": [type(make_outline(sizes)).__name__]}
        files = dict(sizes.files)
        files.setdefault("tokenizer_config.json", _tokenizer_config(tokenizer, sizes.context))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    return {
        **files,
        CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True) + "\n",
        "tokenizer.json": tokenizer.to_json(),
    }


def _tokenizer_config(tokenizer: Tokenizer, context: int | None) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.separator_text,
    }
    if context is not None:
        config["model_max_length"] = context
    return json.dumps(config, indent=2) + "\n"

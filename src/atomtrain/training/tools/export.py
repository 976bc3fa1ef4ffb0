"""A checkpoint as the folder of a Hugging Face model, written layer by layer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from atomtrain.checkpoint import Checkpoint
from atomtrain.errors import CheckpointError, ConfigError, nearest
from atomtrain.models.hugging_face import CONFIG_FILE
from atomtrain.models.weights.files import INDEX_FILE, SINGLE_FILE
from atomtrain.progress import BYTES, Progress
from atomtrain.training.setup.peft_folder import ADAPTER_FILE
from atomtrain.training.tools.export_parts import TYPES, Weight, parts_of
from atomtrain.training.tools.hub import PlannedFile

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


def export(
    checkpoint: Checkpoint,
    target: Path,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    *,
    merge: bool = False,
) -> Exported:
    """Write a checkpoint's model as a folder that `transformers` loads, or adapters for `peft`.

    The folder appears as a whole, when everything is on disk. Memory holds one file's tensors and
    what is made of one parameter. Tensors have the names and shapes that `save_pretrained` gives
    them: those of the model's published files.

    Args:
        checkpoint: Of `atom train`.
        target: Must not exist, or be an empty folder.
        dtype: Type of the weights; `float32` is exactly what was trained.
        shard_bytes: Bytes of a file at most.
        merge: Write the whole model with its adapters in it, in place of the adapters alone.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`, or the folder cannot be written.
        ConfigError: the target is there already, or the model has no counterpart there.
    """
    weights, texts, groups = _prepared(checkpoint, target, dtype, shard_bytes, merge=merge)
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir(parents=True)
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        _write_weights(groups, unfinished, TYPES[dtype])
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
    size_bytes = sum(weight.size_bytes for weight in weights)
    return Exported(target, len(weights), size_bytes, len(groups))


def planned(
    checkpoint: Checkpoint, target: Path, dtype: str, shard_bytes: int, *, merge: bool
) -> list[PlannedFile]:
    """Return the files that `export` would write; arguments and errors are the same."""
    _, texts, groups = _prepared(checkpoint, target, dtype, shard_bytes, merge=merge)
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    for name, group in groups.items():
        sizes[name] = sum(weight.size_bytes for weight in group)
    return [PlannedFile(name, size_bytes) for name, size_bytes in sorted(sizes.items())]


class _Prepared(NamedTuple):
    """What is written where."""

    weights: list[Weight]
    texts: dict[str, str]
    """Small files, by name."""
    groups: dict[str, list[Weight]]
    """Files of weights, by name."""


def _prepared(
    checkpoint: Checkpoint, target: Path, dtype: str, shard_bytes: int, *, merge: bool
) -> _Prepared:
    if dtype not in TYPES:
        raise ConfigError(
            f"there is no type {dtype!r}.{nearest(dtype, TYPES)} Types: {', '.join(TYPES)}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; choose another folder, or remove it")
    _, weights, texts = parts_of(checkpoint, dtype, merge=merge)
    if CONFIG_FILE not in texts:
        return _Prepared(weights, texts, {ADAPTER_FILE: weights})
    groups = list(_grouped(weights, shard_bytes))
    if len(groups) == 1:
        return _Prepared(weights, texts, {SINGLE_FILE: groups[0]})
    named = {
        f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors": group
        for index, group in enumerate(groups)
    }
    weight_map = {weight.name: name for name, group in named.items() for weight in group}
    total_bytes = sum(weight.size_bytes for weight in weights)
    index_text = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return _Prepared(weights, {**texts, INDEX_FILE: json.dumps(index_text, indent=2)}, named)


def _write_weights(
    groups: Mapping[str, Sequence[Weight]], folder: Path, dtype: torch.dtype
) -> None:
    total_bytes = sum(weight.size_bytes for group in groups.values() for weight in group)
    with Progress("writing weights", total_bytes, BYTES) as progress:
        for name, group in groups.items():
            tensors: dict[str, Tensor] = {}
            for weight in group:
                tensor = weight.read()
                tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
                tensors[weight.name] = tensor.contiguous()
                progress.advance(weight.size_bytes)
            save_file(tensors, folder / name, metadata={"format": "pt"})


def _grouped(weights: Sequence[Weight], most_bytes: int) -> Iterator[list[Weight]]:
    group: list[Weight] = []
    for weight in weights:
        if group and sum(w.size_bytes for w in group) + weight.size_bytes > most_bytes:
            yield group
            group = []
        group.append(weight)
    yield group

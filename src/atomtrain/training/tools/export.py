"""A checkpoint as the folder of a Hugging Face model, written layer by layer."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.errors import CheckpointError, ConfigError, nearest
from atomtrain.models.gpt_config import CONFIG_FILE, GPTConfig, gpt2_config, gpt2_name, gpt2_tensor
from atomtrain.models.making import Sizes, make_outline
from atomtrain.models.weights.conversion import Read, conversions_to_files
from atomtrain.models.weights.files import INDEX_FILE, SINGLE_FILE
from atomtrain.progress import BYTES, Progress
from atomtrain.training.setup.adapters import Adapters
from atomtrain.training.setup.peft_folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    peft_config,
    peft_tensors,
)
from atomtrain.training.setup.state import PARAMETER, SWARM_SHARD, recipe_of
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


TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weight(NamedTuple):
    """One tensor of the export."""

    name: str
    size_bytes: int
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Reads it anew; those that one conversion makes are cheap one after the other."""


class Parts(NamedTuple):
    """All that is written."""

    sizes: Sizes
    weights: list[Weight]
    """In the checkpoint's order."""
    texts: dict[str, str]
    """Small files, by name."""


def parts_of(checkpoint: Checkpoint, dtype: str, *, merge: bool | None) -> Parts:
    """Return what is written of a checkpoint; no weight is read before its turn.

    Args:
        checkpoint: Of `atom train`.
        dtype: One of `TYPES`.
        merge: Of a run with adapters: the whole model with these in it, not these alone. `None`:
            the whole model of any run.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`, or the frozen model is gone.
        ConfigError: `merge`, and it has no adapters; or not, and beside them it has a head.
    """
    recipe, tokenizer = recipe_of(checkpoint)
    texts = _texts(recipe.sizes, tokenizer, dtype)
    if recipe.lora is None:
        if merge:
            raise ConfigError(f"{checkpoint.path} has no adapters; leave out --merge")
        return Parts(recipe.sizes, _trained(checkpoint, recipe.sizes, TYPES[dtype]), texts)
    adapters = Adapters.of_checkpoint(checkpoint, recipe)
    if merge is not False:
        outline = make_outline(adapters.sizes)
        whole = _published(outline, adapters.outline, adapters.value, TYPES[dtype])
        return Parts(recipe.sizes, whole, texts)
    if recipe.has_head:
        raise ConfigError(
            f"{checkpoint.path} holds adapters and a head, and peft's folder does not say which "
            "labels it has; export the whole model with --merge"
        )
    del texts[CONFIG_FILE]
    texts[ADAPTER_CONFIG] = json.dumps(peft_config(adapters), indent=2) + "\n"
    alone = [
        Weight(name, _bytes(own, TYPES[dtype]), tuple(own.shape), partial(torch.as_tensor, own))
        for name, own in peft_tensors(adapters)
    ]
    return Parts(recipe.sizes, alone, texts)


def _trained(checkpoint: Checkpoint, sizes: Sizes, dtype: torch.dtype) -> list[Weight]:
    """Return parameters and saved buffers in the checkpoint's order."""
    outline = make_outline(sizes)
    wanted: Mapping[str, Tensor] = outline.state_dict()
    shards = lru_cache(maxsize=1)(checkpoint.shard)  # its tensors are mapped, not read
    places: dict[str, tuple[str, str]] = {}
    for shard, keys in checkpoint.tensor_names.items():
        for key in keys if shard != SWARM_SHARD else ():
            name, _, kind = key.rpartition("/")
            if kind == PARAMETER and name in wanted:
                places[name] = shard, key

    def read(name: str) -> Tensor:
        shard, key = places[name]
        return shards(shard)[key]

    if not isinstance(sizes, GPTConfig):
        return _published(outline, {name: wanted[name] for name in places}, read, dtype)

    def read_as_gpt2(name: str) -> Tensor:
        return gpt2_tensor(name, read(name))

    return [
        Weight(
            gpt2_name(name),
            _bytes(wanted[name], dtype),
            tuple(gpt2_tensor(name, wanted[name]).shape),
            partial(read_as_gpt2, name),
        )
        for name in places
    ]


def _published(
    model: nn.Module, outlines: Mapping[str, Tensor], read: Read, dtype: torch.dtype
) -> list[Weight]:
    """Return what becomes of a model's tensors in the form of its published files.

    Args:
        model: On the meta device.
        outlines: Of its tensors those that are written, without data.
        read: Returns one of them with data.
        dtype: What is written.
    """
    conversions = conversions_to_files(model, list(outlines))
    made = lru_cache(maxsize=1)(lambda index: conversions[index].run(read))

    def reader(index: int, name: str) -> Callable[[], Tensor]:
        return lambda: made(index)[name]

    return [
        Weight(name, _bytes(outline, dtype), tuple(outline.shape), reader(index, name))
        for index, conversion in enumerate(conversions)
        for name, outline in conversion.run(outlines.__getitem__).items()
    ]


def _bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)


def _texts(sizes: Sizes, tokenizer: Tokenizer, dtype: str) -> dict[str, str]:
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

"""What an export is made of: a checkpoint's tensors in published form, and small texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.data import Tokenizer
from atomtrain.errors import ConfigError
from atomtrain.models.gpt_config import GPTConfig, gpt2_config, gpt2_name, gpt2_tensor
from atomtrain.models.hugging_face import CONFIG_FILE
from atomtrain.models.making import Sizes, make_outline
from atomtrain.models.weights.conversion import Read, conversions_to_files
from atomtrain.training.setup.adapters import Adapters
from atomtrain.training.setup.peft_folder import ADAPTER_CONFIG, peft_config, peft_tensors
from atomtrain.training.setup.state import PARAMETER, SWARM_SHARD, recipe_of

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
        return Parts(recipe.sizes, _merged(adapters, TYPES[dtype]), texts)
    if recipe.has_head:
        raise ConfigError(
            f"{checkpoint.path} holds adapters and a head, and peft's folder does not say which "
            "labels it has; export the whole model with --merge"
        )
    del texts[CONFIG_FILE]
    texts[ADAPTER_CONFIG] = json.dumps(peft_config(adapters), indent=2) + "\n"
    return Parts(recipe.sizes, list(_adapters(adapters, dtype)), texts)


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
    return [_of_gpt2(name, wanted[name], dtype, read) for name in places]


def _of_gpt2(name: str, outline: Tensor, dtype: torch.dtype, read: Read) -> Weight:
    shape = tuple(gpt2_tensor(name, outline).shape)
    return Weight(gpt2_name(name), _bytes(outline, dtype), shape, partial(_as_gpt2, name, read))


def _as_gpt2(name: str, read: Read) -> Tensor:
    return gpt2_tensor(name, read(name))


def _merged(adapters: Adapters, dtype: torch.dtype) -> list[Weight]:
    """Return the frozen model's tensors with the adapters in them."""
    outline = make_outline(adapters.sizes)
    return _published(outline, adapters.outline, adapters.value, dtype)


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


def _adapters(adapters: Adapters, dtype: str) -> Iterator[Weight]:
    """Yield the adapters alone."""
    for name, tensor in peft_tensors(adapters):
        size_bytes = _bytes(tensor, TYPES[dtype])
        yield Weight(name, size_bytes, tuple(tensor.shape), partial(_same, tensor))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)


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

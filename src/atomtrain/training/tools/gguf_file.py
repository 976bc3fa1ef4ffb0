"""A checkpoint as a GGUF file, which llama.cpp and others run, written tensor by tensor."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atomtrain.checkpoint import Checkpoint
from atomtrain.errors import CheckpointError, ConfigError, choices
from atomtrain.files import replacing
from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.making import make_outline
from atomtrain.progress import Progress
from atomtrain.training.tools.export_parts import Weight, parts_of
from atomtrain.training.tools.gguf_model import (
    Description,
    described,
    rope_factors,
    rope_of,
    turned,
)
from atomtrain.training.tools.gguf_tokenizer import Vocabulary, vocabulary_of
from atomtrain.training.tools.hub import PlannedFile

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUF_TYPES = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
"""Of matrices, with their names in `gguf.GGMLQuantizationType`; vectors are always float32."""
SUFFIX = ".gguf"
_INSTALL = "pip install 'atomtrain[gguf]'"
_Array = np.ndarray[Any, Any]


class GgufWritten(NamedTuple):
    """What was written."""

    file: Path
    tensors: int
    size_bytes: int
    """Of the weights."""


class _Entry(NamedTuple):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Its name in `gguf.GGMLQuantizationType`."""
    read: Callable[[], Tensor]


def export_gguf(checkpoint: Checkpoint, target: Path, kind: str) -> GgufWritten:
    """Write a checkpoint's model as one GGUF file, adapters merged.

    All that can be refused is refused before a byte is written, and the file appears as a whole.
    Memory holds what is made of one parameter, as wide and as written.

    Args:
        checkpoint: Of `atom train`, of a model of Hugging Face.
        target: Must not exist; ends in `.gguf`.
        kind: One of `GGUF_TYPES`.

    Raises:
        CheckpointError: the checkpoint is none of `atom train`, or the file cannot be written.
        ConfigError: the package `gguf` is missing, the target is there already, or GGUF is not
            written for this model, tokenizer or type.
    """
    model, vocabulary, entries = _prepared(checkpoint, target, kind)
    try:
        with replacing(target) as unfinished:
            _write(unfinished, target.stem, model, vocabulary, entries, kind)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written ({error.strerror or error}); free some space or choose "
            "another file"
        ) from error
    return GgufWritten(target, len(entries), sum(_size_bytes(entry) for entry in entries))


def planned_gguf(checkpoint: Checkpoint, target: Path, kind: str) -> list[PlannedFile]:
    """Return the file that `export_gguf` would write; arguments and errors are the same."""
    _, _, entries = _prepared(checkpoint, target, kind)
    return [PlannedFile(target.name, sum(_size_bytes(entry) for entry in entries))]


def _prepared(
    checkpoint: Checkpoint, target: Path, kind: str
) -> tuple[Description, Vocabulary, list[_Entry]]:
    _check(target, kind)
    parts = parts_of(checkpoint, "float32", merge=None)
    if isinstance(parts.sizes, HuggingFaceConfig):
        model = described(make_outline(parts.sizes).config, parts.sizes.config["model_type"])
    else:
        model = described(None, "gpt (ATOM's own)")
    vocabulary = vocabulary_of(parts.texts, model.config.vocab_size)
    return model, vocabulary, _entries(parts.weights, model, kind)


def _check(target: Path, kind: str) -> None:
    """Refuse what needs no checkpoint to be known as wrong."""
    if kind not in GGUF_TYPES:
        raise ConfigError(f"--gguf takes {choices(kind, GGUF_TYPES)}, not {kind!r}")
    if target.suffix != SUFFIX:
        raise ConfigError(f"--gguf writes one file; give it a name such as {target.name}{SUFFIX}")
    if target.exists():
        raise ConfigError(f"{target} is there already; choose another file, or remove it")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} to write {target.name} in; make it")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"--gguf needs the package gguf, which is not installed; run {_INSTALL}")


def _entries(weights: Sequence[Weight], model: Description, kind: str) -> list[_Entry]:
    """Return all tensors by GGUF's names.

    Raises:
        ConfigError: one has no name there, or no such type.
    """
    import gguf

    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[model.architecture], model.config.num_hidden_layers
    )
    entries = []
    for weight in weights:
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(
                f"GGUF has no name for {weight.name!r} in models of the type {model.family}; "
                "export a folder (leave out --gguf)"
            )
        matrix = len(weight.shape) > 1
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[GGUF_TYPES[kind]]][0]
        if matrix and weight.shape[-1] % block:
            raise ConfigError(
                f"the rows of {weight.name!r} have {weight.shape[-1]} elements, {kind} takes "
                f"multiples of {block}; choose f16 or bf16"
            )
        read = partial(_read, weight, model)
        entries.append(_Entry(name, weight.shape, GGUF_TYPES[kind] if matrix else "F32", read))
    factors = rope_factors(model)
    if factors is not None:
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
        entries.append(_Entry(name, tuple(factors.shape), "F32", lambda: factors))
    return entries


def _read(weight: Weight, model: Description) -> Tensor:
    return turned(weight.name, weight.read(), model).contiguous()


def _write(
    file: Path,
    name: str,
    model: Description,
    vocabulary: Vocabulary,
    entries: Sequence[_Entry],
    kind: str,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[model.architecture]])
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{GGUF_TYPES[kind]}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _say_model(writer, model)
        _say_vocabulary(writer, vocabulary)
        for entry in entries:
            float32 = np.dtype(np.float32)  # the shape is that of elements, not of bytes
            size, raw = _size_bytes(entry), gguf.GGMLQuantizationType[entry.kind]
            writer.add_tensor_info(entry.name, entry.shape, float32, size, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with Progress("writing tensors", len(entries)) as progress:
            for entry in entries:
                writer.write_tensor_data(_packed(entry))
                progress.advance()
        writer.flush()
        for stream in writer.fout or ():
            os.fsync(stream.fileno())
    finally:
        writer.close()


def _say_model(writer: GGUFWriter, model: Description) -> None:
    config = model.config
    writer.add_context_length(model.context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    writer.add_rope_dimension_count(model.head_width)
    writer.add_rope_freq_base(rope_of(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _say_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    pieces = vocabulary.pieces
    writer.add_tokenizer_model("gpt2" if pieces is None else "llama")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if pieces is None:
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(pieces.scores)
        writer.add_add_space_prefix(pieces.space_prefix)
    for kind, number in vocabulary.special.items():
        getattr(writer, f"add_{kind}_token_id")(number)
    for kind, does in vocabulary.adds.items():
        getattr(writer, f"add_add_{kind}_token")(does)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _size_bytes(entry: _Entry) -> int:
    import gguf

    elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.kind]]
    return math.prod(entry.shape) // elements * block_bytes


def _packed(entry: _Entry) -> _Array:
    """Return a tensor's bytes as the file has them.

    Raises:
        ConfigError: float16 cannot hold one of its numbers.
    """
    import gguf

    tensor = entry.read()
    if entry.kind == "F16":
        narrow = tensor.to(torch.float16)
        if not bool(narrow.isfinite().all()):
            raise ConfigError(f"{entry.name} has numbers too large for f16; choose bf16 or q8_0")
        return narrow.numpy()
    if entry.kind == "BF16":
        return tensor.to(torch.bfloat16).view(torch.int16).numpy()
    wide = tensor.to(torch.float32).numpy()
    return wide if entry.kind == "F32" else gguf.quantize(wide, gguf.GGMLQuantizationType.Q8_0)

"""A checkpoint as a GGUF file, which llama.cpp and others run, written tensor by tensor."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
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
from atomtrain.training.tools.export import Weight, parts_of
from atomtrain.training.tools.gguf_tokenizer import Vocabulary, vocabulary_of
from atomtrain.training.tools.hub import PlannedFile

if TYPE_CHECKING:
    from gguf import GGUFWriter


_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Names of `gguf.MODEL_ARCH`, by what transformers calls the type of a model."""
_TURNED = ("llama", "mistral")
"""llama.cpp rotates neighbouring pairs of these; transformers the two halves of a head."""


class Description(NamedTuple):
    """A model's numbers, as `transformers` fills them in."""

    family: str
    config: Any

    @property
    def architecture(self) -> str:
        """Name of a `gguf.MODEL_ARCH`."""
        return _ARCHITECTURES[self.family]

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        config = self.config
        width = getattr(config, "head_dim", None)
        return int(width or config.hidden_size // config.num_attention_heads)

    @property
    def context(self) -> int:
        """Tokens that GGUF promises: no more than a sliding window has, which it cannot say."""
        config = self.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if window is None or (kinds and "sliding_attention" not in kinds):
            return int(config.max_position_embeddings)
        return int(min(window, config.max_position_embeddings))


def described(config: Any, family: str) -> Description:
    """Return the description of a model, if GGUF is written for its family.

    Args:
        config: A `PretrainedConfig`, or `None` if the model is not one of Hugging Face.
        family: What transformers calls its type, or another name of it.

    Raises:
        ConfigError: it is not written, or not with these numbers.
    """
    if family not in _ARCHITECTURES or config is None:
        raise ConfigError(
            f"GGUF is not written for models of the type {family}; it is for "
            f"{', '.join(_ARCHITECTURES)}. Export a folder (leave out --gguf) and convert that"
        )
    rope = rope_of(config)
    faults = {
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        f"rope_type {rope['rope_type']}": rope["rope_type"] not in ("default", "llama3"),
        "rope for a part of each head": rope.get("partial_rotary_factor", 1) != 1,
        "attention_bias": family == "qwen3" and bool(config.attention_bias),
    }
    if fault := next((name for name, there in faults.items() if there), None):
        raise ConfigError(
            f"the model has {fault}, which is not written to GGUF; export a folder (leave out "
            "--gguf) and convert that"
        )
    return Description(family, config)


def rope_of(config: Any) -> Mapping[str, Any]:
    """Return how positions rotate: `rope_type`, `rope_theta` and what a type adds."""
    return {"rope_type": "default", **config.rope_parameters}


def turned(name: str, tensor: Tensor, model: Description) -> Tensor:
    """Return a tensor with its rows in llama.cpp's order.

    Row `i` of a head's first half and row `i` of its second half become neighbours.

    Args:
        name: In the published form.
        tensor: Shape (heads * head_width, ...) if it makes queries or keys.
        model: Whose it is.
    """
    if model.family not in _TURNED:
        return tensor
    layer = name.rpartition(".")[0]
    if layer.endswith("self_attn.q_proj"):
        heads = model.config.num_attention_heads
    elif layer.endswith("self_attn.k_proj"):
        heads = model.config.num_key_value_heads
    else:
        return tensor
    width = tensor.shape[0] // heads
    halves = tensor.reshape(heads, 2, width // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(model: Description) -> Tensor | None:
    """Return what each frequency is divided by, float32 of shape (head_width / 2,).

    `None` if by nothing. transformers' own function gives the frequencies.
    """
    rope = rope_of(model.config)
    if rope["rope_type"] == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model.config, torch.device("cpu"))
    frequencies: Tensor = made
    powers = torch.arange(0, model.head_width, 2, dtype=torch.float32) / model.head_width
    base: float = rope["rope_theta"]
    return (1 / base**powers) / frequencies


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
        if parts.sizes.embeds:
            raise ConfigError(
                f"{checkpoint.path} has no head, and GGUF is written of language models; leave "
                "--gguf out"
            )
        model = described(make_outline(parts.sizes).config, parts.sizes.config["model_type"])
    else:
        model = described(None, "gpt (ATOM's own)")
    vocabulary = vocabulary_of(parts.texts, model.config.vocab_size)
    return model, vocabulary, _entries(parts.weights, model, kind)


def _check(target: Path, kind: str) -> None:
    """Refuse what needs no checkpoint to be known as wrong."""
    if kind not in GGUF_TYPES:
        raise ConfigError(f"--gguf {kind!r} is not known; choose {choices(kind, GGUF_TYPES)}")
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

"""What GGUF says of a model: its family's name, its sizes, and which tensor is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import ConfigError

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

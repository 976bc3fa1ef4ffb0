"""Sizes of a GPT, those that have a name, and the same model as Hugging Face's GPT-2.

Needs no torch, so mistakes are told at once. GPT-2 has other names, and its linear maps are
transposed: `Conv1D` of `transformers.models.gpt2` keeps `[inputs, outputs]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 1 << 31
_MOST_LAYERS = 4096
"""More would take hours to look at; the deepest models have some hundreds."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int
    """Number of blocks."""
    width: int
    """Size of the hidden state."""
    heads: int
    head_width: int
    """Size of each attention head; `heads * head_width` need not equal `width`."""
    vocabulary: int = 50257
    context: int = 2048
    """Longest sequence in tokens."""
    dropout: float = 0.0
    """Probability, after the embedding, the attention and the MLP."""
    head_pieces: int = 1
    """In how many pieces of the vocabulary the loss is computed. More need less memory and a third
    more arithmetic in the head; the result differs in its last bits."""

    def __post_init__(self) -> None:
        for name in (
            "layers", "width", "heads", "head_width", "vocabulary", "context", "head_pieces",
        ):  # fmt: skip
            number = getattr(self, name)
            if not isinstance(number, int) or not 1 <= number <= _MOST:
                raise ConfigError(f"{name} must be a whole number from 1 to {_MOST}, not {number}")
        if self.layers > _MOST_LAYERS:
            raise ConfigError(f"layers must be at most {_MOST_LAYERS}, not {self.layers}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.head_pieces > self.vocabulary:
            raise ConfigError(
                f"head_pieces must be at most the vocabulary of {self.vocabulary}, not "
                f"{self.head_pieces}"
            )


def _gpt3(layers: int, width: int, heads: int, head_width: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads, head_width=head_width)


# Brown et al. 2020, table 2.1, as printed: its head widths do not always multiply to the width
# (XL: 24 * 128 against 2048; 13B: 40 * 128 against 5140), so the head width is given as there.
_GPT3 = {
    "gpt3-small": _gpt3(12, 768, 12, 64),
    "gpt3-medium": _gpt3(24, 1024, 16, 64),
    "gpt3-large": _gpt3(24, 1536, 16, 96),
    "gpt3-xl": _gpt3(24, 2048, 24, 128),
    "gpt3-2.7b": _gpt3(32, 2560, 32, 80),
    "gpt3-6.7b": _gpt3(32, 4096, 32, 128),
    "gpt3-13b": _gpt3(40, 5140, 40, 128),
    "gpt3-175b": _gpt3(96, 12288, 96, 128),
}
GPT3 = tuple(_GPT3)
"""The family's names, from small to large."""
CONFIG_FILE = "config.json"
PRESETS: dict[str, GPTConfig] = {
    **_GPT3,
    "demo": GPTConfig(layers=8, width=320, heads=5, head_width=64, vocabulary=4096, context=256),
    "tiny": GPTConfig(layers=4, width=64, heads=2, head_width=32, vocabulary=512, context=64),
}


def preset(name: str) -> GPTConfig:
    """Return the sizes of a named model.

    Raises:
        ConfigError: there is no such model; offers the nearest name.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"there is no model {name!r}.{nearest(name, PRESETS)} Models: {', '.join(PRESETS)}"
        ) from None


_FIXED = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
}
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(\w+)\.(weight|bias)")


def check_place(name: str) -> None:
    """Refuse a path at which no model of Hugging Face lies; ids such as `org/name` pass.

    Here since it needs no PyTorch: the command line tells this mistake at once.

    Raises:
        ConfigError: there is no such folder, or no model in it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{path} has no {CONFIG_FILE}; give the folder of a Hugging Face model, or one of "
                f"{', '.join(PRESETS)}"
            )
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"there is no folder {path}.{nearest(name, PRESETS)} Give the folder of a Hugging Face "
            f"model, its id such as org/name, or one of {', '.join(PRESETS)}"
        )


def gpt2_name(name: str) -> str:
    if name in _FIXED:
        return _FIXED[name]
    match = _BLOCK.fullmatch(name)
    assert match is not None, name
    return f"transformer.h.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"


def gpt2_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return one of a GPT's parameters as GPT-2 has it; `name` is the GPT's."""
    match = _BLOCK.fullmatch(name)
    return tensor.T.contiguous() if match is not None and tensor.ndim == 2 else tensor


def gpt2_config(sizes: GPTConfig, separator: int) -> dict[str, Any]:
    """Return the content of a `config.json`.

    Raises:
        ConfigError: GPT-2 has no such sizes.
    """
    if sizes.heads * sizes.head_width != sizes.width:
        raise ConfigError(
            f"{sizes.heads} heads of {sizes.head_width} are not as wide as the model's "
            f"{sizes.width}, which Hugging Face's GPT-2 cannot express; keep the checkpoint"
        )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "vocab_size": sizes.vocabulary,
        "n_positions": sizes.context,
        "n_embd": sizes.width,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "embd_pdrop": sizes.dropout,
        "attn_pdrop": 0.0,
        "resid_pdrop": sizes.dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": separator,
        "eos_token_id": separator,
    }

"""ATOM's GPT as Hugging Face's GPT-2, which computes the same: other names, linear maps transposed.

Source of the names: `transformers.models.gpt2`, whose `Conv1D` keeps `[inputs, outputs]`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.models.gpt_config import GPTConfig

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


def gpt2_name(name: str) -> str:
    """Return GPT-2's name of one of a GPT's parameters."""
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

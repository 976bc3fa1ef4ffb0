"""Small random models of every family of causal language models that transformers has.

A family's default configuration says which sizes it has; those of known names become small, and of
layers only one of each kind stays. What that breaks is put right in one table.
"""

from __future__ import annotations

import re
from typing import Any

from atomtrain.errors import ConfigError, nearest
from atomtrain.models.hugging_face import without_cache

VOCABULARY = 128
_LAYERS = 2
_MOST_LAYERS = 6
MOST_PARAMETERS = 4_000_000
"""What is larger was not made small."""
_SIZES: tuple[tuple[str, int], ...] = (
    ("(vocab_size|vocab_size_per_layer_input|codebook_size|vocabulary|group_vocab)$", VOCABULARY),
    ("(pad|cls)_token_id$", 0),
    ("(bos|decoder_start)_token_id$", 1),
    ("(eos|sep|mask|forced_eos)_token_id$", 2),
    ("^(hidden_size|hidden_size_global|n_embd|d_model|hidden_dim|embedding_dim|emb_dim"
     "|lru_width|attention_hidden_size|embedding_size|input_embedding_size|output_embedding_size"
     "|word_embed_proj_dim|out_hidden_size"
     "|vision_output_dim|projector_(in|out)put_dim|adapter_(in|out)_dim|adapter_input_size"
     "|q_latent_size)$", 32),
    ("(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_ff|dff|mlp_dim|feed_forward_size"
     "|d_inner|intermediate_size_mlp)$", 48),
    ("^(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(de|en)coder_layers"
     "|num_blocks|num_layers_per_stack|depth)$", _LAYERS),
    ("^(mamba_d_state|state_size|ssm_state_size)$", 8),
    ("^(mamba_n_heads|n_mamba_heads|mamba_num_heads)$", 8),
    ("^mamba_d_ssm$", 64),
    ("^qk_head_dim$", 16),
    ("(num_key_value_heads|num_kv_heads|num_query_groups)$", 2),
    ("(attention_heads|n_heads?|num_heads|linear_num_value_heads)$", 4),
    ("^linear_num_key_heads$", 2),
    ("(head_?dim|d_head|d_kv|kv_channels|dim_head|attention_head_size|qk_head_dim|rotary_dim"
     "|query_pre_attn_scalar)$", 8),
    ("lora_rank$", 16),
    ("^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$", 4),
    ("^(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|experts_per_token)$", 2),
    ("^(n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups)$", 1),
    ("^(max_position_embeddings|n_positions|n_ctx|context_length|max_seq_len|max_target_positions"
     "|model_max_length|original_max_position_embeddings)$", 64),
    ("^(sliding_window|sliding_window_size|local_attention|attention_window_size|window_size)$", 8),
    ("chunk_size$", 8),
    ("(time_step_rank|dt_rank)$", 4),
    ("^n_shared_experts$", 1),
    ("^num_kv_shared_layers$", 0),
    ("^image_size$", 16),
    ("^patch_size$", 8),
)  # fmt: skip
"""Sizes by what their names match, the first of these patterns."""
_LAYER_LISTS = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers",
    "indexer_types", "layer_rope_theta", "num_attention_heads_per_layer", "attn_layers",
    "activation_sparsity_pattern", "intermediate_size",
)  # fmt: skip
"""One entry for each layer."""
_NEVER_NONE = (
    "head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok",
)  # fmt: skip
"""Some families' defaults leave these out, and cannot do without."""
_NOT_PASSED = ("transformers_version", "_name_or_path", "architectures", "per_layer_config")
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
    "attention_hidden_size": 64, "attention_head_dim": 16,
}  # fmt: skip
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
_OTHERWISE: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "dory": {
        "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3,
        "layer_types": None,
    },
    "dots3_note": {"text_config": {"per_layer_config": {}, "head_dim": 16}},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_shape": [1, 13], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 13,
        "lsh_attn_chunk_length": 13,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "hybrid_layer_ids": [1, 3]},
}  # fmt: skip
"""What the sizes above get wrong, by family; `None` leaves a value out."""


def families() -> list[str]:
    """Return the families of causal language models of this transformers, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(family: str) -> Any:
    """Return the configuration of a small model of one of the `families`.

    Raises:
        ConfigError: there is no such family.
    """
    from transformers import CONFIG_MAPPING

    if family not in families():
        raise ConfigError(f"transformers has no family {family!r}.{nearest(family, families())}")
    kind = CONFIG_MAPPING[family]
    values = shrunk(_defaults(kind), _OTHERWISE.get(family, {}))
    return without_cache(kind(**values))


def _defaults(kind: Any) -> dict[str, Any]:
    values: dict[str, Any] = kind().to_dict()
    return values


def shrunk(values: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with small sizes, those inside of it too.

    Args:
        values: As a family's configuration is by default.
        otherwise: What is taken in place of that, for the configurations inside under their names.
    """
    kept = _kept_layers(values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("config"):
            small[name] = shrunk(value, otherwise.get(name, {}))
        elif name in _LAYER_LISTS and isinstance(value, list) and kept and max(kept) < len(value):
            small[name] = [_shrunk(name, value[index]) for index in kept]
        else:
            small[name] = _shrunk(name, value)
    if kept:
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if name in values:
                small[name] = len(kept)
    if "kv_lora_rank" in values:  # keys and values are made for every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name in _NOT_PASSED:
        small.pop(name, None)
    for name, value in otherwise.items():
        if name in _NOT_PASSED or not (isinstance(value, dict) and name.endswith("config")):
            small[name] = value
    return {name: value for name, value in small.items() if value is not None}


_MOST = 1 << 30


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Return the layers that stay: one of each kind, in order; at least two."""
    lists = [values[name] for name in _LAYER_LISTS if isinstance(values.get(name), list)]
    if not lists:
        return []
    count = min(map(len, lists))
    seen: dict[Any, int] = {}
    for index in range(count):
        seen.setdefault(tuple(str(each[index]) for each in lists), index)
    kept = list(seen.values())[:_MOST_LAYERS]
    more = (index for index in range(count) if index not in kept)
    while len(kept) < min(_LAYERS, count):
        kept.append(next(more))
    return sorted(kept)


def _shrunk(name: str, value: Any) -> Any:
    if name == "is_decoder":
        return True
    if value is None and name in _NEVER_NONE:
        value = _MOST
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    small = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
    if small is None:
        return value
    return small if name.endswith("token_id") else min(value, small) if value > 0 else value

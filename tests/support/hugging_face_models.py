"""Tiny random Hugging Face models with a tokenizer, in a folder; what runs of them saved."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.data.tokenizer import Tokenizer

VOCABULARY = 300
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
UNTIED: dict[str, Any] = {**LLAMA, "tie_word_embeddings": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8,
    },
    "deepseek_v3": {
        **_ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 1,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    },
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    kind: {**UNTIED, **_TOKENS, "model_type": kind, **more} for kind, more in _MIXTURES.items()
}
"""Mixtures of experts, by what transformers calls their type."""
SENTENCE = "the cat sat on the mat and the dog lay by the door while rain fell on the roof "


@lru_cache
def tokenizer() -> Tokenizer:
    """Return a small tokenizer; always the same."""
    return Tokenizer.train([SENTENCE * 4], VOCABULARY - 10)


def write_tokenizer(folder: Path, **config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    made = tokenizer()
    (folder / "tokenizer.json").write_text(made.to_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": made.separator_text, **config
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    folder: Path, config: dict[str, Any] | None = None, *, shard: str = "5GB", seed: int = 0
) -> Any:
    """Write a random model with its tokenizer; return the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoConfig.for_model(**(LLAMA if config is None else config))
    model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return model.eval()


def write_text(file: Path, sentences: int = 400) -> Path:
    """Write a text that is long enough to train on."""
    words = SENTENCE.split()
    lines = [" ".join(words[(i + j * j) % len(words)] for j in range(12)) for i in range(sentences)]
    file.write_text("\n".join(lines) + "\n")
    return file


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return what the newest checkpoint of a run's peer has of model and optimizer."""
    return {
        key: tensor.clone()
        for name, tensors in open_checkpoint(run).shards()
        for key, tensor in tensors.items()
        if name != "swarm"
    }


def train_by_command(
    folder: Path, text: Path, run: str, *more: str, memory: str, sequences: int, steps: int
) -> Path:
    """Train the model in a folder by `atom train`, below the working directory; return the peer's
    folder."""
    arguments = [
        "train", "--model", str(folder), "--data", str(text), "--run", run, "--host", "127.0.0.1",
        "--device", "emulated:4GiB/s", "--device-memory", memory, "--context", "16",
        "--sequences", str(sequences), "--steps", str(steps), "--plain", "--no-profile",
        "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "100",
        "--learning-rate", "0.01",
    ]  # fmt: skip
    assert main([*arguments, *more]) == 0
    return Path("runs") / run / "peer-0"

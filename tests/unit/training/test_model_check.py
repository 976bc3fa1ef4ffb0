"""Packing is for models that keep documents apart: tried on real ones, and on narrow copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.errors import ConfigError
from atomtrain.models import HuggingFaceConfig, make_outline
from atomtrain.models.making import narrow_models, parameter_count
from atomtrain.training.setup import model_check
from atomtrain.training.setup.model_check import check_separation
from tests.support.hugging_face_models import LLAMA

pytest.importorskip("transformers")
SMALL: dict[str, Any] = {**LLAMA, "num_hidden_layers": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "gemma2": {"head_dim": 8},
}
LEAKING: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **EXPERTS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
BIG_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "eos_token_id": 128001, "bos_token_id": 128000, "pad_token_id": 128004,
}  # fmt: skip
BIG_QWEN3_NEXT = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16,
}  # fmt: skip
BIG_GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip


def sizes_of(config: dict[str, Any]) -> HuggingFaceConfig:
    return HuggingFaceConfig(config=config, vocabulary=config["vocab_size"], context=None, width=32)


def check(config: dict[str, Any], name: str = "a/model") -> None:
    sizes = sizes_of(config)
    check_separation(name, sizes, make_outline(sizes))


@pytest.mark.parametrize("kind", APART)
def test_models_that_mask_by_position_are_packed(kind: str) -> None:
    check({**SMALL, "model_type": kind, **APART[kind]})


@pytest.mark.parametrize("kind", LEAKING)
def test_models_that_carry_something_on_are_refused(kind: str) -> None:
    """All of them take `position_ids`: a state, a convolution or an unmasked attention is left."""
    with pytest.raises(ConfigError) as refused:
        check({**SMALL, "model_type": kind, **LEAKING[kind]})
    said = str(refused.value)
    assert said.startswith("a/model does not keep documents that share a sequence apart (another")
    assert said.endswith("train it without --packing")


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no position_ids"):
        check({"model_type": "bloom", "vocab_size": 300, "hidden_size": 32, "n_head": 4})


@pytest.mark.slow
def test_large_models_are_tried_many_times_narrower() -> None:
    check(BIG_LLAMA)
    for config in (BIG_QWEN3_NEXT, BIG_GPT_OSS):
        with pytest.raises(ConfigError, match="does not keep documents"):
            check(config)


def test_a_narrow_model_has_all_layers_of_the_large_one() -> None:
    outline = make_outline(sizes_of(BIG_QWEN3_NEXT))
    narrow = next(narrow_models(sizes_of(BIG_QWEN3_NEXT), parameter_count(outline)))
    assert [type(module) for module in narrow.modules()] == [type(m) for m in outline.modules()]
    assert parameter_count(narrow) < parameter_count(outline) / 1000


def test_a_small_model_is_tried_as_it_is() -> None:
    outline = make_outline(sizes_of(SMALL))
    (tried,) = narrow_models(sizes_of(SMALL), parameter_count(outline))
    shapes = [parameter.shape for parameter in tried.parameters()]
    assert shapes == [parameter.shape for parameter in outline.parameters()]
    assert not tried.training


def test_what_cannot_be_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "narrow_models", lambda *_: [])
    with pytest.raises(ConfigError, match="too large, and a narrower one cannot be built"):
        check(SMALL)

    class Broken(nn.Module):
        def __init__(self, value: float | None) -> None:
            super().__init__()
            self.value = value

        def get_input_embeddings(self) -> nn.Module:
            return nn.Embedding(300, 2)

        def forward(self, input_ids: torch.Tensor, position_ids: Any = None) -> Any:
            if self.value is None:
                raise RuntimeError("a kernel\nis missing")
            logits = torch.full((*input_ids.shape, 300), self.value)
            return type("Output", (), {"logits": logits})

    for value, reason in (
        (None, "RuntimeError: a kernel is missing"),
        (1.0, "does not react to other tokens"),
        (float("nan"), "not finite"),
    ):
        monkeypatch.setattr(model_check, "narrow_models", lambda *_, v=value: [Broken(v)])
        with pytest.raises(ConfigError, match=reason):
            check(SMALL)


def test_the_random_state_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    check(SMALL)
    assert torch.equal(torch.get_rng_state(), before)

"""Small random models of many architectures, none of them changed for ATOM, with micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY = 101
DRAW = Callable[[], dict[str, Tensor]]


class Case(NamedTuple):
    """A model in training mode, and a function that draws a micro-batch."""

    model: nn.Module
    draw: DRAW


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.1,
}


def _tokens(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def _language_model(model: nn.Module) -> Case:
    def draw() -> dict[str, Tensor]:
        tokens = _tokens(13)
        return {"input_ids": tokens, "labels": tokens}

    return Case(model.train(), draw)


def _pair(model: nn.Module) -> Case:
    return Case(model.train(), lambda: {"input_ids": _tokens(11), "labels": _tokens(9)})


def _images(model: nn.Module) -> Case:
    def draw() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(5, (2,))}

    return Case(model.train(), draw)


def gpt2(dropout: float = 0.0) -> Case:
    return _language_model(
        hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64,
                bos_token_id=1, eos_token_id=2, resid_pdrop=dropout, embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
        )
    )  # fmt: skip


def gpt2_with_dropout() -> Case:
    return gpt2(0.2)


def llama() -> Case:
    return _language_model(hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)))


def llama_without_cache() -> Case:
    """Its forward then looks for several documents in a sequence, which it does by data."""
    return _language_model(hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED, use_cache=False)))


def llama_with_padding() -> Case:
    """The mask depends on the micro-batch, so it is carried."""

    def draw() -> dict[str, Tensor]:
        tokens = _tokens(13)
        mask = torch.ones_like(tokens)
        mask[1, 9:] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}

    return Case(hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)).train(), draw)


def qwen3() -> Case:
    return _language_model(hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8)))


def mistral() -> Case:
    config = hf.MistralConfig(**_GROUPED, sliding_window=6)
    return _language_model(hf.MistralForCausalLM(config))


def gemma2() -> Case:
    config = hf.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=6)
    return _language_model(hf.Gemma2ForCausalLM(config))


def gemma3() -> Case:
    config = hf.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=6)
    return _language_model(hf.Gemma3ForCausalLM(config))


def phi() -> Case:
    return _language_model(hf.PhiForCausalLM(hf.PhiConfig(**_GROUPED)))


def opt() -> Case:
    return _language_model(
        hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
                dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )
        )
    )  # fmt: skip


def gpt_neox() -> Case:
    return _language_model(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_DECODER)))


def mixtral() -> Case:
    return _language_model(hf.MixtralForCausalLM(hf.MixtralConfig(**_GROUPED, num_local_experts=4)))


def qwen3_moe() -> Case:
    config = hf.Qwen3MoeConfig(
        **_GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )
    return _language_model(hf.Qwen3MoeForCausalLM(config))


def qwen3_next() -> Case:
    """Linear attention, whose code computes otherwise when it is exported, and experts."""
    config = hf.Qwen3NextConfig(
        **_GROUPED, layer_types=["linear_attention", "full_attention"], head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return _language_model(hf.Qwen3NextForCausalLM(config))


def gpt_oss() -> Case:
    """Counts the rows of experts in another type on each kind of device."""
    config = hf.GptOssConfig(
        **_GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    )
    return _language_model(hf.GptOssForCausalLM(config))


def t5() -> Case:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=0.1, decoder_start_token_id=0,
    )  # fmt: skip
    return _pair(hf.T5ForConditionalGeneration(config))


def bart() -> Case:
    config = hf.BartConfig(
        **_PAIR, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None
    )
    return _pair(hf.BartForConditionalGeneration(config))


def whisper() -> Case:
    config = hf.WhisperConfig(
        **_PAIR, num_mel_bins=8, max_source_positions=16, max_target_positions=20,
        decoder_start_token_id=1,
    )  # fmt: skip

    def draw() -> dict[str, Tensor]:
        return {"input_features": torch.randn(2, 8, 32), "labels": _tokens(9)}

    return Case(hf.WhisperForConditionalGeneration(config).train(), draw)


def bert() -> Case:
    """Has a 4-D mask made of the micro-batch's, which every layer reads."""
    config = hf.BertConfig(**_DECODER)

    def draw() -> dict[str, Tensor]:
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, 8:] = 0
        return {"input_ids": _tokens(12), "attention_mask": mask, "labels": torch.randint(2, (2,))}

    return Case(hf.BertForSequenceClassification(config).train(), draw)


def vit() -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return _images(hf.ViTForImageClassification(config))


def resnet() -> Case:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=5, layer_type="basic"
    )
    return _images(hf.ResNetForImageClassification(config))


class ActorCritic(nn.Module):
    """Two heads on one body, an encoder that both read, a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.actor = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))
        self.critic = nn.Sequential(nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, 1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = state
        for layer in self.body:
            hidden = torch.nn.functional.elu(layer(hidden)) + hidden
        return self.actor(hidden) / self.temperature, self.critic(hidden).squeeze(-1)


def actor_critic() -> Case:
    def draw() -> dict[str, Tensor]:
        return {
            "state": torch.randn(6, 12),
            "action": torch.randint(4, (6,)),
            "value": torch.randn(6),
        }

    return Case(ActorCritic(), draw)


def policy_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the actions and squared error of the values."""
    logits, values = output
    actor = nn.functional.cross_entropy(logits, batch["action"])
    return actor + 0.5 * (values - batch["value"]).pow(2).mean()


class UNet(nn.Module):
    """Skips that cross several cuts, batch statistics, in-place activations, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _convolutions(1, 4), _convolutions(4, 8)
        self.middle = _convolutions(8, 8)
        self.up2, self.up1 = _convolutions(16, 4), _convolutions(8, 4)
        self.last = nn.Conv2d(4, 1, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        pool, grow = nn.functional.max_pool2d, nn.functional.interpolate
        first = self.down1(image)
        second = self.down2(pool(first, 2))
        low = self.dropout(self.middle(pool(second, 2)))
        low = self.up2(torch.cat([grow(low, scale_factor=2), second], 1))
        low = self.up1(torch.cat([grow(low, scale_factor=2), first], 1))
        image = self.last(low)
        return {"loss": (image - target).pow(2).mean(), "image": image}


def _convolutions(channels: int, to: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, to, 3, padding=1), nn.BatchNorm2d(to), nn.ReLU(inplace=True),
        nn.Conv2d(to, to, 3, padding=1), nn.BatchNorm2d(to), nn.ReLU(inplace=True),
    )  # fmt: skip


def u_net() -> Case:
    return Case(
        UNet(), lambda: {"image": torch.randn(2, 1, 8, 8), "target": torch.randn(2, 1, 8, 8)}
    )


HUGGING_FACE: list[Callable[[], Case]] = [
    gpt2, gpt2_with_dropout, llama, llama_without_cache, llama_with_padding, qwen3, mistral,
    gemma2, gemma3, phi, opt, gpt_neox, mixtral, qwen3_moe, qwen3_next, gpt_oss,
    t5, bart, whisper, bert, vit, resnet,
]  # fmt: skip

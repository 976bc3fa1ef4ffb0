"""A model from what decides it: a GPT's sizes, or a Hugging Face model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from atomtrain.models.gpt import GPT
from atomtrain.models.gpt_config import GPTConfig
from atomtrain.models.hugging_face import HuggingFaceConfig, build
from atomtrain.models.lora import add_adapters
from atomtrain.models.lora_config import LoraConfig

Sizes = GPTConfig | HuggingFaceConfig


def make_model(sizes: Sizes, lora: LoraConfig | None = None) -> nn.Module:
    """Return the model: a GPT with random weights, or a Hugging Face model with untouched ones.

    With `lora` it is frozen and has adapters.

    Raises:
        ConfigError: the adapters' targets are not there.
    """
    model = build(sizes) if isinstance(sizes, HuggingFaceConfig) else GPT(sizes)
    return model if lora is None else add_adapters(model, lora)


def make_outline(sizes: Sizes, lora: LoraConfig | None = None) -> nn.Module:
    """Return the model without memory, on the meta device."""
    with torch.device("meta"):
        return make_model(sizes, lora)


def make_empty(sizes: Sizes) -> nn.Module:
    """Return the model on the CPU with memory in place of its weights, which are to be read."""
    if isinstance(sizes, HuggingFaceConfig):
        return build(sizes)
    model = make_outline(sizes).to_empty(device="cpu")
    assert isinstance(model, GPT)
    model.tie()
    return model


def sizes_from_json(data: Mapping[str, Any]) -> Sizes:
    """Read what `dataclasses.asdict` made of either kind.

    Raises:
        TypeError: it is neither.
    """
    return HuggingFaceConfig(**data) if "config" in data else GPTConfig(**data)

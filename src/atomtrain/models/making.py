"""Models of what decides them: as they are, without memory, or much narrower; and their size.

A model's widths are sums over its attention heads. To make it narrower all of them, and what is
counted (heads, experts, tokens of the vocabulary), are divided by one number, and what one head has
stays. So do all layers, each of its kind. No family is known by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from atomtrain.errors import AnalysisError, reason_of
from atomtrain.models.gpt import GPT
from atomtrain.models.gpt_config import GPTConfig
from atomtrain.models.hugging_face import HuggingFaceConfig, build, build_random
from atomtrain.models.image_text import freeze_tower
from atomtrain.models.lora import LoraLinear, add_adapters
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.narrow import NarrowLinear, NarrowParameter

Sizes = GPTConfig | HuggingFaceConfig
_MOST_PARAMETERS = 150_000_000
_TRIED_AS_IT_IS = 20_000_000
_DIVIDED = re.compile(
    r"(?:^|_)(?:hidden_size|hidden_dim|intermediate_size|intermediate_dim|vocab_size|ffn_dim|"
    r"embedding_size|embed_dim|d_model|n_embd|n_inner|d_inner|d_ff|dff|dim_ff|d_ssm|lru_width|"
    r"n_heads?|heads|n_groups?|ngroups|experts?|top_?k|moe_k|rank)(?:_|$)"
)
_KEPT = re.compile(
    r"head_dim|dim_head|d_head|kernel|conv|layers|type_vocab|period|offset|interval|dropout"
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_TOKEN = re.compile(r"token_(?:id|index)$")


def make_model(
    sizes: Sizes, lora: LoraConfig | None = None, *, train_tower: bool = False
) -> nn.Module:
    """Return the model: a GPT with random weights, or a Hugging Face model with untouched ones.

    With `lora` it is frozen and has adapters. What looks at images is frozen without them, unless
    `train_tower`.

    Raises:
        ConfigError: the adapters' targets are not there.
        AnalysisError: no memory is large enough for it.
    """
    try:
        model = build(sizes) if isinstance(sizes, HuggingFaceConfig) else GPT(sizes)
    except RuntimeError as error:
        raise AnalysisError(
            f"the model cannot be made ({reason_of(error)}); choose a smaller one"
        ) from error
    if lora is not None:
        return add_adapters(model, lora, in_tower=train_tower)
    if not train_tower:
        freeze_tower(model)
    return model


def make_outline(
    sizes: Sizes, lora: LoraConfig | None = None, *, train_tower: bool = False
) -> nn.Module:
    """Return the model without memory, on the meta device; arguments are those of `make_model`."""
    with torch.device("meta"):
        return make_model(sizes, lora, train_tower=train_tower)


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


def parameter_count(model: nn.Module) -> int:
    """Return the number of a model's parameters, shared weights counted once.

    A matrix in few bits counts as what it is made wide to: two of its parameters may lie in a byte,
    and its scales are none.
    """
    elements = {id(parameter): parameter.numel() for parameter in model.parameters()}
    kinds = (LoraLinear, NarrowLinear, NarrowParameter)
    for module in model.modules():
        if isinstance(module, kinds) and hasattr(module, "codes"):
            elements[id(module.codes)] *= 1 if module.codes.dtype == torch.int8 else 2
            elements[id(module.scales)] = 0
            if hasattr(module, "order"):
                elements[id(module.order)] = 0
    return sum(elements.values())


def narrow_models(sizes: HuggingFaceConfig, parameters: int) -> Iterator[nn.Module]:
    """Yield random models of this kind, to be evaluated, each twice as wide as the one before.

    The narrowest has one attention head. Those that cannot be built are left out (a size has
    become too small for another); none is too large to try. A model that is small itself is the
    only one.
    """
    small = parameters <= _TRIED_AS_IT_IS
    heads = 1 if small else _heads_of(sizes.config) or _heads_of(sizes.config.get("text_config"))
    for halvings in range(max(1, heads).bit_length()):
        config = sizes.config if small else _narrowed(sizes.config, halvings, heads)
        narrow = dataclasses.replace(sizes, config=config)
        try:
            with torch.device("meta"):
                outline = build(narrow)
            if parameter_count(outline) > _MOST_PARAMETERS:
                return
            yield build_random(narrow)
        except AnalysisError:
            continue


def _narrowed(config: Mapping[str, Any], halvings: int, outer: int) -> dict[str, Any]:
    """Divide by the heads, halved so often; a configuration inside by its own, if it has some."""
    heads = _heads_of(config) or outer
    divisor = max(1, heads >> halvings)
    return {
        name: _narrowed(value, halvings, heads)
        if isinstance(value, Mapping) and name.endswith("config")
        else _divided(name, value, divisor)
        for name, value in config.items()
    }


def _divided(name: str, value: Any, divisor: int) -> Any:
    if isinstance(value, int) and _TOKEN.search(name):
        return 0  # the vocabulary has fewer tokens; this one is not among those that are tried
    if not _DIVIDED.search(name) or _KEPT.search(name):
        return value
    if isinstance(value, list):
        return [_divided(name, each, divisor) for each in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return value
    return max(1, value // divisor)


def _heads_of(config: Any) -> int:
    found = (config.get(name) for name in _HEADS) if isinstance(config, Mapping) else ()
    return next((heads for heads in found if isinstance(heads, int)), 0)

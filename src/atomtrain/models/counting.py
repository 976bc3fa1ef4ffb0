"""How many parameters a model has, whatever they are held in."""

from __future__ import annotations

from torch import nn

from atomtrain.models.lora import LoraLinear


def parameter_count(model: nn.Module) -> int:
    """Return the number of a model's parameters, shared weights counted once.

    A matrix in few bits counts as what it is made wide to: two of its parameters may lie in a byte,
    and its scales are none.
    """
    elements = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.weight is None:
            elements[id(module.codes)] = module.lora_B.out_features * module.lora_A.in_features
            elements[id(module.scales)] = 0
    return sum(elements.values())

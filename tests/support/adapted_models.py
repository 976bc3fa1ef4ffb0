"""Models of a folder with adapters, as `atom train --lora` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from atomtrain.models.hugging_face import build, read_config
from atomtrain.models.lora import adapted_layers, add_adapters, begun_layers
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.narrow import adapted_by
from atomtrain.training.setup.loading import Weights


def adapted(folder: Path, config: LoraConfig) -> Any:
    """Return a model with adapters that are not zero any more."""
    sizes = read_config(folder)
    weights, model = Weights(folder, sizes), build(sizes)
    weights.fill(model)
    add_adapters(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, layer in begun_layers(model).items():
            base = weights.read(adapted_by(name) or f"{name}.weight")
            order = (weights.order(name),) if hasattr(layer, "order") else ()
            for part, values in layer.beginning(lambda base=base: base, name, *order):
                layer.get_parameter(part).copy_(values)
        for layer in adapted_layers(model).values():
            drawn = torch.randn(layer.lora_B.weight.shape, generator=generator)
            layer.lora_B.weight.copy_(0.05 * drawn)
    return model

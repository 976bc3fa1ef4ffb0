"""Trained adapters in a checkpoint: read, merged into their model, named as in peft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.errors import CheckpointError
from atomtrain.models.hugging_face import HuggingFaceConfig, build
from atomtrain.models.lora import ADAPTER_PARTS, merged
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.lora_experts import (
    adapted_by,
    adapter_of,
    experts_of,
    is_transposed,
    merged_experts,
)
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.loading import Weights

_PARAMETER = "/parameter"
_PEFT_PREFIX = "base_model.model."


class Adapters:
    """The adapters of a checkpoint, and the frozen weights that they belong to."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        """Read the adapters; of the frozen model's files, the headers.

        Raises:
            CheckpointError: the frozen model is not where it was.
            DataError: it is another one now.
        """
        assert recipe.lora is not None
        assert isinstance(recipe.sizes, HuggingFaceConfig)
        self.config: LoraConfig = recipe.lora
        self.folder = Path(str(checkpoint.meta.get("model_folder")))
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{checkpoint.path} holds adapters of the model in {self.folder}, which is not "
                "there any more; put it there again"
            )
        self.sizes = recipe.sizes
        self.weights = Weights(self.folder, recipe.sizes)
        outline = self.weights.outline
        self._experts = experts_of(outline)
        self.outline = {**dict(outline.named_parameters()), **dict(outline.named_buffers())}
        """The frozen model's tensors without data, those that its files have."""
        self.outline = {name: self.outline[name] for name in self.weights.names}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By layer, then by `ADAPTER_PARTS`."""
        for _, shard in checkpoint.shards():
            for key, tensor in shard.items():
                self._take(key, tensor)

    def value(self, name: str) -> Tensor:
        """Return one of the model's tensors with its adapter in it, if it has one."""
        tensor = self.weights.read(name)
        scale = self.config.scale
        if adapter := self.tensors.get(adapter_of(name)):
            transposed = is_transposed(self._experts[name])
            return merged_experts(tensor, adapter, scale, transposed=transposed)
        adapter = self.tensors.get(name.removesuffix(".weight"))
        return tensor if adapter is None else merged(tensor, adapter, scale)

    @property
    def adapted(self) -> list[str]:
        """The names of the parameters that have adapters."""
        return [adapted_by(layer) or f"{layer}.weight" for layer in self.tensors]

    def peft_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters' tensors under the names that peft gives them."""
        for layer, parts in self.tensors.items():
            for part, tensor in parts.items():
                yield f"{_PEFT_PREFIX}{self._in_peft(layer)}.{part}", tensor

    def peft_config(self) -> dict[str, Any]:
        """Return the content of an `adapter_config.json`."""
        config = self.config
        linears = [layer for layer in self.tensors if adapted_by(layer) is None]
        experts = [adapted_by(layer) or "" for layer in self.tensors.keys() - set(linears)]
        parameters = {".".join(name.split(".")[-2:]) for name in experts}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.folder),
            "r": config.r,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_dora": config.dora,
            "use_rslora": config.rslora,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted({layer.rpartition(".")[2] for layer in linears}),
            **({"target_parameters": sorted(parameters)} if parameters else {}),
        }

    def _in_peft(self, layer: str) -> str:
        """Return what peft calls an adapted layer.

        It wraps a module with experts once for each adapted parameter, in their order. So the last
        parameter's adapter is outermost, and `base_layer` leads to each one before.
        """
        name = adapted_by(layer)
        if name is None:
            return layer
        path = name.rpartition(".")[0]
        adapted = [n for n in self._experts if adapter_of(n) in self.tensors]
        outer = [n for n in adapted if n.rpartition(".")[0] == path]
        depth = len(outer) - 1 - outer.index(name)
        return path + ".base_layer" * depth

    def _take(self, key: str, tensor: Tensor) -> None:
        if not key.endswith(_PARAMETER):
            return
        name = key.removesuffix(_PARAMETER)
        for part in ADAPTER_PARTS:
            if name.endswith(f".{part}"):
                layer = name.removesuffix(f".{part}")
                self.tensors.setdefault(layer, {})[part] = tensor.clone()


def merged_model(checkpoint: Checkpoint, recipe: Recipe) -> nn.Module:
    """Return the frozen model with a checkpoint's adapters in its weights, on the CPU.

    Raises:
        CheckpointError: the frozen model is not where it was.
    """
    adapters = Adapters(checkpoint, recipe)
    model = build(adapters.sizes, str(adapters.folder))
    adapters.weights.fill(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in adapters.adapted:
            parameters[name].copy_(adapters.value(name))
    return model

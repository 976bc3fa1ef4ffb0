"""Trained adapters beside the frozen weights that they belong to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from atomtrain.checkpoint import Checkpoint
from atomtrain.errors import CheckpointError
from atomtrain.models.hugging_face import HuggingFaceConfig, build
from atomtrain.models.lora import (
    ADAPTER_PARTS,
    merged,
    merged_experts,
)
from atomtrain.models.lora_config import NOTHING, LoraConfig
from atomtrain.models.lora_embedding import embeddings_of
from atomtrain.models.lora_init import begin
from atomtrain.models.lora_saved import saved_modules
from atomtrain.models.making import make_outline
from atomtrain.models.narrow import adapted_by, adapter_of, experts_of, is_transposed
from atomtrain.progress import Progress
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.loading import Weights, seed_of_adapter

_PARAMETER = "/parameter"


class Adapters:
    """Adapters, and the frozen weights that they belong to."""

    def __init__(self, config: LoraConfig, sizes: HuggingFaceConfig, folder: Path) -> None:
        """Read the headers of the frozen model's files; there is no adapter yet.

        Args:
            config: Of the adapters.
            sizes: Of the frozen model.
            folder: Where it lies.

        Raises:
            DataError: another model lies there.
        """
        self.config, self.sizes, self.folder = config, sizes, folder
        self.weights = Weights(folder, sizes)
        outline = self.weights.outline
        self.experts = experts_of(outline)
        """See `experts_of`; in the model's order."""
        self.embeddings = embeddings_of(outline)
        self.outline = {**dict(outline.named_parameters()), **dict(outline.named_buffers())}
        """The frozen model's tensors without data, those that its files have."""
        self.outline = {name: self.outline[name] for name in self.weights.names}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """By layer, then by `ADAPTER_PARTS`."""
        self.saved: dict[str, nn.Module] = {}
        """The modules that are trained themselves, of the model without data, by their path."""
        self.whole: dict[str, Tensor] = {}
        """What is trained itself, by name: the tensors of `saved`, and a classifier's head."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, recipe: Recipe) -> Adapters:
        """Read those of a run with `--lora`.

        Raises:
            CheckpointError: the frozen model is not where it was, or something trained lacks.
            DataError: it is another one now.
        """
        assert recipe.lora is not None
        assert isinstance(recipe.sizes, HuggingFaceConfig)
        folder = Path(str(checkpoint.meta.get("model_folder")))
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint.path} holds adapters of the model in {folder}, which is not "
                "there any more; put it there again"
            )
        adapters = cls(recipe.lora, recipe.sizes, folder)
        known = dict(adapters.weights.outline.named_parameters())
        for _, shard in checkpoint.shards():
            for key, tensor in shard.items():
                name = key.removesuffix(_PARAMETER)
                if not key.endswith(_PARAMETER):
                    continue
                if found := part_of(name):
                    layer, part = found
                    adapters.tensors.setdefault(layer, {})[part] = tensor.clone()
                elif name in known:
                    adapters.whole[name] = tensor.clone()
        if recipe.lora.init != NOTHING:
            adapters._become_ordinary(recipe.seed)
        tower = recipe.train_tower
        adapters.saved = saved_modules(adapters.weights.outline, recipe.lora, in_tower=tower)
        trained = make_outline(recipe.sizes, recipe.lora, train_tower=tower)
        for name, parameter in trained.named_parameters():
            if not parameter.requires_grad or part_of(name):
                continue
            if name not in adapters.whole or adapters.whole[name].shape != parameter.shape:
                raise CheckpointError(f"{checkpoint.path} lacks the parameter {name!r}")
        return adapters

    def _become_ordinary(self, seed: int) -> None:
        """Become adapters of the published matrices, out of which training took their beginning.

        `W - s B0 A0 + s B A` is `W + s B' A'` with `B' = [B, -B0]` and `A' = [A; A0]`, as peft
        converts them.
        """
        with Progress("finding how adapters began", len(self.tensors), "layers") as progress:
            for layer, parts in self.tensors.items():
                weight = self.weights.read(f"{layer}.weight").float()
                begun = begin(weight, self.config, seed_of_adapter(seed, layer))
                a, b = parts["lora_A.weight"].float(), parts["lora_B.weight"].float()
                parts["lora_A.weight"] = torch.cat((a, begun.a))
                parts["lora_B.weight"] = torch.cat((b, -begun.b), 1)
                progress.advance()
        self.config = self.config.as_ordinary

    def value(self, name: str) -> Tensor:
        """Return one of the model's tensors as it was trained, or with its adapter in it."""
        if name in self.whole:
            return self.whole[name]
        tensor = self.weights.read(name)
        scale = self.config.scale
        if adapter := self.tensors.get(adapter_of(name)):
            transposed = is_transposed(self.experts[name])
            return merged_experts(tensor, adapter, scale, transposed=transposed)
        adapter = self.tensors.get(name.removesuffix(".weight"))
        return tensor if adapter is None else merged(tensor, adapter, scale)

    def merged_model(self) -> nn.Module:
        """Return the frozen model with the adapters in its weights, on the CPU."""
        model = build(self.sizes, str(self.folder))
        self.weights.fill(model)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            adapted = (adapted_by(layer) or f"{layer}.weight" for layer in self.tensors)
            for name in (*adapted, *self.whole):
                tensors[name].copy_(self.value(name))
        return model


def part_of(name: str) -> tuple[str, str] | None:
    """Return the layer and the one of `ADAPTER_PARTS` that a name ends with; `None` if none."""
    for part in ADAPTER_PARTS:
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    return None

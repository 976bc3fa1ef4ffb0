"""The weights of a model's files, read layer by layer straight into the engine's host store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor, nn

from atomtrain.engine.engine import Engine
from atomtrain.models.confined import check_layers, parts_within
from atomtrain.models.dequantised.files import open_weights
from atomtrain.models.heads import HEAD_WEIGHT, NewHead, head_of, is_classifier
from atomtrain.models.hugging_face import HuggingFaceConfig, read_config
from atomtrain.models.lora import begun_layers
from atomtrain.models.lora_embedding import LoraEmbedding
from atomtrain.models.making import Sizes, make_outline
from atomtrain.models.narrow import adapted_by
from atomtrain.models.weights.names import Source, match_weights
from atomtrain.progress import BYTES, Progress

_PARTS_A_TENSOR, _MORE_PARTS = 16, 1000
"""Of a model, modules without a tensor of their own included; fewer than two is usual."""


class Weights:
    """Files that were found to fit a model."""

    def __init__(self, folder: Path, sizes: Sizes, seed: int = 0) -> None:
        """Check that `folder` has all weights of the model without adapters; reads headers only.

        Args:
            folder: Of a Hugging Face model.
            sizes: What the model is; beside what the folder says it may have the head of a
                classifier, which then begins anew.
            seed: Of what begins anew: adapters, and such a head.

        Raises:
            DataError: it has not.
            ConfigError: the model has more layers, or far more parts, than there are tensors.
        """
        self.folder = folder
        self.seed = seed
        self._files = open_weights(folder)
        count = len(self._files.entries)
        if isinstance(sizes, HuggingFaceConfig):
            check_layers(sizes.config, count, str(folder))
        with parts_within(_PARTS_A_TENSOR * count + _MORE_PARTS, str(folder)):
            self.outline = make_outline(sizes)
            """The model without memory."""
        new: dict[str, NewHead] = {}
        if head_of(self.outline) is not None and not is_classifier(read_config(folder).config):
            new[HEAD_WEIGHT] = NewHead.of(self.outline, seed)
        found = match_weights(self.outline, self._files, new)
        self._sources: dict[str, Source | NewHead] = {**found, **new}

    @property
    def names(self) -> list[str]:
        """The model's names of everything that the files have of it, or that begins anew."""
        return list(self._sources)

    def load(self, engine: Engine) -> None:
        """Fill the engine's parameters (or their float32 masters) and saved buffers.

        Beside them, memory holds one parameter at a time: once where its type or layout differs,
        twice where it is made of several tensors, and what `models/lora_init.py` says where an
        adapter begins with a part of its matrix.

        Raises:
            DataError: a file cannot be read.
        """
        engine.synchronize()
        parameters = dict(engine.model.named_parameters())
        begun = _begun_by(engine.model)
        total_bytes = sum(parameters[name].nbytes for name in parameters.keys() - begun)
        with Progress(f"reading the weights of {self.folder}", total_bytes, BYTES) as progress:
            for names in engine.layers().values():
                for name in names:
                    if name not in begun:
                        self._put(engine, name, parameters[name])
                        progress.advance(parameters[name].nbytes)
        layers = begun_layers(engine.model)
        with Progress("beginning adapters", len(layers), "layers") as progress:
            for name, layer in layers.items():
                seed = seed_of_adapter(self.seed, name)
                order = (self.order(name),) if hasattr(layer, "order") else ()
                for part, values in layer.beginning(partial(self._wide, name), seed, *order):
                    engine.masters.write(parameters[f"{name}.{part}"], values)
                progress.advance()
        buffers = dict(engine.model.named_buffers())
        for name in self._sources.keys() & buffers.keys():
            buffers[name].copy_(self.read(name))
        engine.refresh_buffers()

    def read(self, name: str) -> Tensor:
        """Return one of the model's tensors in the files' type, a quantised one as float32."""
        return self._sources[name].read(self._files)

    def order(self, layer: str) -> Tensor | None:
        """Return the columns of a linear layer's matrix in the order in which they were quantised,
        `[inputs]`; `None` where that is how they lie."""
        source = self._sources[f"{layer}.weight"]
        if isinstance(source, NewHead) or source.conversion.converter is not None:
            return None
        return self._files.order(source.stored[0])

    def fill(self, model: nn.Module) -> None:
        """Fill the parameters and saved buffers of a model without adapters on the CPU."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, source in self._sources.items():
            source.read_into(self._files, tensors[name].detach())

    def _wide(self, layer: str) -> Tensor:
        """Return the matrix of a linear layer, or the parameter beside which it is, as float32."""
        return self.read(adapted_by(layer) or f"{layer}.weight").float()

    def _put(self, engine: Engine, name: str, parameter: nn.Parameter) -> None:
        source, masters = self._sources[name], engine.masters
        if masters.has(parameter):
            values = masters.read(parameter)  # the master's own memory, where it is kept as float32
            source.read_into(self._files, values)
            masters.adopt(parameter, values)
        elif parameter.is_contiguous():
            source.read_into(self._files, parameter.detach())
        else:
            masters.write(parameter, source.read(self._files))


def seed_of_adapter(seed: int, layer: str) -> str:
    """Return what decides how a layer's adapter begins, in a run of this seed."""
    return f"{seed}/{layer}"


def _begun_by(model: nn.Module) -> set[str]:
    """Return the names of what has a beginning of its own."""
    return {
        f"{name}.{part}"
        for name, layer in begun_layers(model).items()
        for part, _ in layer.named_parameters()
        if part != ("weight" if isinstance(layer, LoraEmbedding) else "bias")
    }

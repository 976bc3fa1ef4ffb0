"""The weights of a model's files, read layer by layer straight into the engine's host store."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from atomtrain.models.hugging_face import HuggingFaceConfig
from atomtrain.models.weight_files import WeightFiles
from atomtrain.models.weight_names import match_weights
from atomtrain.swapping.engine import Engine


class Weights:
    """Files that were found to fit a model."""

    def __init__(self, folder: Path, outline: nn.Module, sizes: HuggingFaceConfig) -> None:
        """Check that `folder` has all weights of the model; reads headers only.

        Raises:
            DataError: it has not.
        """
        self._files = WeightFiles(folder)
        self._names = match_weights(outline, sizes, self._files)

    def load(self, engine: Engine) -> None:
        """Fill the engine's parameters (or their float32 masters) and saved buffers.

        No more than the largest parameter is ever held twice.

        Raises:
            DataError: a file cannot be read.
        """
        engine.synchronize()
        parameters = dict(engine.model.named_parameters())
        for names in engine.layers().values():
            for name in names:
                self._put(engine, name, parameters[name])
        buffers = dict(engine.model.named_buffers())
        for name in self._names.keys() & buffers.keys():
            buffers[name].copy_(self._files.read(self._names[name]))
        engine.refresh_buffers()

    def fill(self, model: nn.Module) -> None:
        """Fill the parameters and saved buffers of a model on the CPU."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, stored in self._names.items():
            self._files.read_into(stored, tensors[name].detach())

    def _put(self, engine: Engine, name: str, parameter: nn.Parameter) -> None:
        stored, masters = self._names[name], engine.masters
        if masters.has(parameter):
            values = masters.read(parameter)  # the master's own memory, where it is kept as float32
            self._files.read_into(stored, values)
            masters.adopt(parameter, values)
        elif parameter.is_contiguous():
            self._files.read_into(stored, parameter.detach())
        else:
            masters.write(parameter, self._files.read(stored))

"""The model that a plan is asked for: by name or by its Hugging Face configuration, never loaded.

Weights stay on the meta device, so a model of any size costs no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.head.head import split_head
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.state.gradients import with_gradients_in
from atomtrain.engine.state.precision import Narrowed
from atomtrain.engine.updates.optimizer import states_of, update_model
from atomtrain.errors import ConfigError
from atomtrain.models.gpt import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.models.heads import head_of
from atomtrain.models.hugging_face import (
    CONFIG_FILE,
    build,
    check_context,
    is_hugging_face,
    model_folder,
    read_config,
)
from atomtrain.models.image_text import freeze_tower, kind_of, pixels_of
from atomtrain.models.lora import add_adapters
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.making import parameter_count
from atomtrain.planning.plan.updating import UpdateModel
from atomtrain.planning.search.batch_search import Analysis

Precision = Literal["bf16", "fp16"]
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
MeasureUpdates = Callable[[UpdateModel, torch.optim.Optimizer, Chain], UpdateModel]

_USUAL_CONTEXT = 4096
"""Tokens of a sequence, where the model allows more: what most models are pre-trained with."""


@dataclass(frozen=True)
class Subject:
    """A model without weights."""

    name: str
    context_tokens: int
    """Tokens of a sequence."""
    model: nn.Module
    """On the meta device."""
    head_pieces: int | None = None
    """In how many pieces of the vocabulary the head computes its loss; `None` is as it is."""
    optimizer: torch.optim.Optimizer | None = None
    """Of the model's parameters; `None` is AdamW with two moments of their type."""
    gradient_dtype: Literal["float32"] | None = None
    """In which type gradients add up; `None` is that of the parameters."""
    measure: MeasureUpdates | None = None
    """Measures what the optimizer takes; `None` leaves it estimated by what is moved."""
    _analyses: dict[int, Analysis] = field(default_factory=dict, repr=False, compare=False)

    def trained_with(
        self,
        make: OptimizerOf,
        precision: Precision | None = None,
        gradient_dtype: Literal["float32"] | None = None,
        measure: MeasureUpdates | None = None,
    ) -> Subject:
        """Return the model with an optimizer, and in the type that it is computed in.

        Args:
            make: Makes the optimizer of a model on the meta device.
            precision: As for `atomtrain.Options`; the model itself is changed.
            gradient_dtype: As for `atomtrain.Options`.
            measure: See `Subject.measure`.

        Raises:
            ConfigError: a parameter that cannot be bfloat16, or that the optimizer cannot update.
        """
        if precision is not None:
            Narrowed(self.model, precision)
        return replace(
            self,
            optimizer=make(self.model),
            gradient_dtype=gradient_dtype,
            measure=measure,
            _analyses={},
        )

    def with_adapters(self, config: LoraConfig) -> Subject:
        """Return the model frozen, with adapters beside its linear layers, in place.

        Raises:
            ConfigError: a target names no linear layer.
        """
        add_adapters(self.model, config)
        return replace(self, _analyses={})

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return parameter_count(self.model)

    def analyse(self, sequences: int) -> Analysis:
        """Return chain and costs of a micro-batch of so many sequences; each is analysed once.

        Raises:
            AnalysisError: the model is no chain of layers, or its head cannot be split.
        """
        if sequences not in self._analyses:
            shape = (sequences, self.context_tokens)
            ids = torch.zeros(shape, dtype=torch.int64, device="meta")
            head = head_of(self.model)
            labels = ids
            if head is not None:  # one a sequence; of a reward model a number
                labels = ids[:, 0] if head.out_features > 1 else ids[:, 0].float()
            example = {"input_ids": ids, "labels": labels}
            kind = kind_of(self.model)
            if kind is not None and kind.alike:  # of any other one data decide how large images are
                example["pixel_values"] = pixels_of(self.model, sequences)
            traced = chain_of(self.model, example)
            chain = traced.chain
            if self.head_pieces is not None:
                chain = split_head(chain, self.head_pieces)
            chain = with_gradients_in(chain, self.gradient_dtype)
            costs = layer_costs(chain, traced.bind(example))
            updates = states = None
            if self.optimizer is not None:
                updates, states = update_model(self.optimizer, chain), states_of(self.optimizer)
                if self.measure is not None:
                    updates = self.measure(updates, self.optimizer, chain)
            self._analyses[sequences] = Analysis(chain, costs, updates, states)
        return self._analyses[sequences]


def subject(
    name: str, context_tokens: int | None = None, head_pieces: int | None = None
) -> Subject:
    """Return the model that a user named.

    Args:
        name: A preset, the path of a Hugging Face `config.json` or of a folder with one, or an id
            such as `org/name`.
        context_tokens: Tokens of a sequence; `None` is the model's own length, at most 4096 for a
            Hugging Face model.
        head_pieces: See `Subject.head_pieces`.

    Raises:
        ConfigError: no such model, or its sequences are shorter; a package that reads it lacks.
    """
    if context_tokens is not None and context_tokens < 1:
        raise ConfigError(f"--context must be at least 1 token, not {context_tokens}")
    if head_pieces is not None and head_pieces < 1:
        raise ConfigError(f"--head-pieces must be at least 1, not {head_pieces}")
    if is_hugging_face(name):
        return _from_hugging_face(name, context_tokens, head_pieces)
    config = preset(name)
    context = context_tokens or config.context
    check_context(name, context, config.context)
    with torch.device("meta"):
        return Subject(name, context, GPT(config), head_pieces)


def _from_hugging_face(name: str, context_tokens: int | None, head_pieces: int | None) -> Subject:
    path = Path(name)
    is_file = path.suffix == ".json" and not path.is_dir()
    source = path if is_file else model_folder(name, weights=False)
    file = source / CONFIG_FILE if source.is_dir() else source
    sizes = read_config(source)
    context = context_tokens or min(sizes.context or _USUAL_CONTEXT, _USUAL_CONTEXT)
    check_context(name, context, sizes.context)
    with torch.device("meta"):
        model = build(sizes, str(file), as_stored=True)
    freeze_tower(model)  # as atom train does
    return Subject(_name_of(name, file), context, model, head_pieces)


def _name_of(name: str, file: Path) -> str:
    """Return a short name: the folder's, the file's own, or the id."""
    if not Path(name).exists():
        return name
    folder = file.absolute().parent.name
    return folder if file.name == CONFIG_FILE and folder else file.stem

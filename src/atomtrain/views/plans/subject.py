"""What a plan is asked for: a model, never loaded, and where it would train.

The model is named, or given by its Hugging Face configuration. Its weights stay on the meta device,
so one of any size costs no memory. The place is a GPU of the catalogue, or this machine as it is
measured.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime, estimated_times, flops_per_s, measured_bytes
from atomtrain.analysis.head.head import split_head
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration.profile_cache import machine_key
from atomtrain.engine.calibration.profiling import profiled_machine, take_profile
from atomtrain.engine.calibration.update_rates import measured_updates
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.state.gradients import with_gradients_in
from atomtrain.engine.state.precision import PRECISIONS, Narrowed
from atomtrain.engine.updates.optimizer import states_of, update_model
from atomtrain.errors import AtomError, ConfigError
from atomtrain.models.gpt import GPT
from atomtrain.models.gpt_config import CONFIG_FILE, preset
from atomtrain.models.heads import head_of
from atomtrain.models.hugging_face import (
    build,
    check_context,
    is_hugging_face,
    model_folder,
    read_config,
    read_quantisation,
)
from atomtrain.models.image_text import freeze_tower, kind_of, pixels_of
from atomtrain.models.lora import add_adapters, narrowing_of
from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.making import parameter_count
from atomtrain.planning.catalogue import MATMUL_SHARE, Gpu, estimate_times
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.updating import UpdateModel
from atomtrain.planning.search.batch_search import Analysis, Compute
from atomtrain.views.plans.pictured import Pictured, assumed_picture

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
    pictured: Pictured | None = None
    """Micro-batches with images; `None`: the model reads texts, or images are as its configuration
    says, or left out."""
    images_left_out: str | None = None
    """Why images are not counted, if the model reads some."""
    quantised: dict[str, Any] | None = None
    """How the folder holds its weights, if in few bits: its `quantization_config`."""
    left_wide: str | None = None
    """Which frozen matrices cannot be held in few bits, if some shall be."""
    _analyses: dict[tuple[int, bool], Analysis] = field(
        default_factory=dict, repr=False, compare=False
    )

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
        """Return the model frozen, with adapters, in place.

        Raises:
            ConfigError: a target names nothing that can be adapted.
        """
        config = config.published_as(self.quantised)
        left = None if config.bits is None else narrowing_of(self.model, config).told(config.bits)
        add_adapters(self.model, config)
        return replace(self, left_wide=left, _analyses={})

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return parameter_count(self.model)

    def analyse(self, sequences: int, *, on_gpu: bool = False) -> Analysis:
        """Return chain and costs of a micro-batch of so many sequences; each is analysed once.

        Args:
            sequences: Of the micro-batch.
            on_gpu: Count what kernels of a GPU take inside themselves.

        Raises:
            AnalysisError: the model is not a chain of layers, or its head cannot be split.
        """
        key = sequences, on_gpu
        if key not in self._analyses:
            example = self._example(sequences)
            traced = chain_of(self.model, example)
            inputs = traced.bind(example)
            chain = traced.chain
            if self.head_pieces is not None:
                chain = split_head(chain, self.head_pieces)
            chain = with_gradients_in(chain, self.gradient_dtype)
            costs = layer_costs(chain, inputs, on_gpu=on_gpu)
            updates = states = None
            if self.optimizer is not None:
                updates, states = update_model(self.optimizer, chain), states_of(self.optimizer)
                if self.measure is not None:
                    updates = self.measure(updates, self.optimizer, chain)
            given = {} if self.pictured is None else inputs
            self._analyses[key] = Analysis(chain, costs, updates, states, given)
        return self._analyses[key]

    def _example(self, sequences: int) -> dict[str, torch.Tensor]:
        if self.pictured is not None:
            return self.pictured.example(sequences)
        shape = (sequences, self.context_tokens)
        ids = torch.zeros(shape, dtype=torch.int64, device="meta")
        head = head_of(self.model)
        labels = ids
        if head is not None:  # one a sequence; of a reward model a number
            labels = ids[:, 0] if head.out_features > 1 else ids[:, 0].float()
        example = {"input_ids": ids, "labels": labels}
        kind = kind_of(self.model)
        if kind is not None and kind.alike:
            example["pixel_values"] = pixels_of(self.model, sequences)
        return example


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
    quantised = read_quantisation(source)
    made = Subject(_name_of(name, file), context, model, head_pieces, quantised=quantised)
    kind = kind_of(model)
    if kind is None or not source.is_dir():
        told = "name the folder of the model, which has its processor"
        return made if kind is None or kind.alike else replace(made, images_left_out=told)
    try:
        return replace(made, pictured=assumed_picture(sizes, source, context))
    except AtomError as error:
        return made if kind.alike else replace(made, images_left_out=str(error))


def _name_of(name: str, file: Path) -> str:
    """Return a short name: the folder's, the file's own, or the id."""
    if not Path(name).exists():
        return name
    folder = file.absolute().parent.name
    return folder if file.name == CONFIG_FILE and folder else file.stem


_MOST_MEASURED_BYTES = 1 << 30
"""Layers that need more to be measured are estimated: planning must not need a large machine."""


class Place(NamedTuple):
    """Link, host and budgets, and whose compute counts: `card` or `local` is given."""

    machine: Machine
    card: Gpu | None = None
    local: Compute | None = None
    updates: MeasureUpdates | None = None
    """Measures the optimizer where compute is `local`; `None` leaves estimates as they are."""
    crowded_share: float = 0.0
    """What other programs had of the processor while `machine` was measured."""


def compute_of(card: Gpu, dtype: str) -> Compute:
    """Return how fast a GPU of the catalogue computes; `dtype` is that of matrix products."""
    peak = card.peak_flops_per_s(dtype)
    return Compute(
        lambda analysis: estimate_times(analysis.costs, card, dtype),
        MATMUL_SHARE[dtype] * peak,
        peak,
        on_gpu=True,
    )


def this_place(
    device_memory_bytes: int | None,
    precision: str = "fp32",
    *,
    clips: bool = False,
    again: bool = False,
) -> Place:
    """Measure this machine: its link, host optimizer, disk and matrix products.

    Layers are measured when their times are first asked for.

    Args:
        device_memory_bytes: Budget; `None` is the device's own.
        precision: What layers compute in: `fp32`, `bf16` or `fp16`.
        clips: Whether updates multiply gradients in their own type.
        again: Forget what was measured before.

    Raises:
        ConfigError: the budget is more than the GPU has.
    """
    device = open_device("auto", device_memory_bytes)
    try:
        profile = profiled_machine(device, measured_overhead, again=again)
        dtype = PRECISIONS.get(precision, torch.float32)
        rate = flops_per_s(device.torch_device, device.synchronize, dtype)
        key, on_gpu = machine_key(device), device.torch_device.type != "cpu"
    finally:
        device.close()

    def updates(model: UpdateModel, optimizer: Optimizer, chain: Chain) -> UpdateModel:
        return measured_updates(model, optimizer, chain, key, one_processor=not on_gpu, clips=clips)

    local = Compute(_Measured(rate, device_memory_bytes), rate, rate, on_gpu)
    return Place(profile.machine, local=local, updates=updates, crowded_share=profile.crowded_share)


class _Measured:
    """Times of layers: measured for the first size of a micro-batch, scaled by FLOPs for others."""

    def __init__(self, rate_flops_per_s: float, device_memory_bytes: int | None) -> None:
        self._rate, self._device_memory_bytes = rate_flops_per_s, device_memory_bytes
        self._ratios: dict[str, LayerTime] | None = None

    def __call__(self, analysis: Analysis) -> Mapping[str, LayerTime]:
        estimates = estimated_times(analysis.costs, self._rate)
        if self._ratios is None:
            measured = self._measure(analysis) or estimates
            self._ratios = {kind: _each(measured[kind], estimates[kind]) for kind in estimates}
        ratios = {kind: self._ratios.get(kind, LayerTime(1.0, 1.0)) for kind in estimates}
        return {
            kind: LayerTime(
                time.forward_s * ratios[kind].forward_s, time.backward_s * ratios[kind].backward_s
            )
            for kind, time in estimates.items()
        }

    def _measure(self, analysis: Analysis) -> Mapping[str, LayerTime] | None:
        distinct = {cost.kind: cost for cost in analysis.costs.layers}.values()
        if max(map(measured_bytes, distinct)) > _MOST_MEASURED_BYTES:
            return None
        device = open_device("auto", self._device_memory_bytes)
        try:
            chain = _with_data(analysis.chain, analysis.costs)
            return take_profile(
                device, chain, analysis.costs, analysis.inputs, measured_overhead
            ).times
        finally:
            device.close()


def _each(measured: LayerTime, estimated: LayerTime) -> LayerTime:
    return LayerTime(
        measured.forward_s / estimated.forward_s, measured.backward_s / estimated.backward_s
    )


def _with_data(chain: Chain, costs: ChainCosts) -> Chain:
    """Return the chain with real weights, random ones, in the first layer of each kind."""
    layers, seen = [], set()
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        layers.append(layer if cost.kind in seen else _filled(layer))
        seen.add(cost.kind)
    return dataclasses.replace(chain, layers=tuple(layers))


def _filled(layer: Layer) -> Layer:
    # What an exported layer runs is the same for all, and knows tensors that have no copies.
    shared = [getattr(layer.module, name, None) for name in ("template", "mode", "other")]
    memo = {id(part): part for part in shared if part is not None}
    module = copy.deepcopy(layer.module, memo).to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            # Not what the memory held before: denormal numbers are slow.
            if tensor.is_floating_point():
                tensor.normal_(std=0.02, generator=random)
            else:
                tensor.zero_()
    return dataclasses.replace(layer, module=module)

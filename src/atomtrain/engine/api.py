"""Opens an engine: analyses the model, profiles the machine, plans, and fills the host store."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from atomtrain.analysis.costs.costs import ChainCosts, layer_costs
from atomtrain.analysis.head.head import split_head, split_head_as_needed
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.checking import check_chain
from atomtrain.analysis.layers.trace import Loss, MicroBatch, Traced, chain_of
from atomtrain.engine.calibration.compile_choice import (
    CompileChoice,
    Profiled,
    choice_of,
    faster_of,
)
from atomtrain.engine.calibration.compiled_costs import with_compiled_costs
from atomtrain.engine.calibration.disk_profile import disk_rates
from atomtrain.engine.calibration.machines import Overhead, emulated_overhead
from atomtrain.engine.calibration.profile_cache import machine_key
from atomtrain.engine.calibration.profiling import take_profile
from atomtrain.engine.calibration.update_rates import measured_updates
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_devices
from atomtrain.engine.devices.host_memory import interleaved
from atomtrain.engine.devices.native import require_native
from atomtrain.engine.engine import Engine
from atomtrain.engine.engine_base import EngineCore
from atomtrain.engine.execution.compiled import TRACING, compiled, require_compilable
from atomtrain.engine.execution.determinism import deterministic, told_plainly
from atomtrain.engine.execution.multi_device import join
from atomtrain.engine.kept_plan import first_plan
from atomtrain.engine.options import Options
from atomtrain.engine.planner import (
    Planner,
    check_shared,
    machine_of_all,
    times_of_all,
    without_choices,
)
from atomtrain.engine.state.disk_parameters import Placement, placed
from atomtrain.engine.state.gradients import with_gradients_in
from atomtrain.engine.state.kept_parameters import check_hooks, check_memory
from atomtrain.engine.state.precision import LossScale, Narrowed
from atomtrain.engine.state.store import HostStore, require_data
from atomtrain.engine.updates.optimizer import (
    OptimizerFactory,
    optimizer_of,
    states_of,
    update_model,
)
from atomtrain.engine.updates.updates import Updates
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.layout import Layout, host_gradients
from atomtrain.planning.plan.machine import Machine
from atomtrain.progress import Progress
from atomtrain.units import parse_bytes


class Fitted(NamedTuple):
    """A micro-batch, how many there are in a step, and what is known of the model on it."""

    example: MicroBatch
    micro_batches: int
    head_pieces: int | Literal["auto"] | None
    traced: Traced | None = None
    """The model itself, traced on the example for the first device; `None` if that is to be done.
    """
    costs: ChainCosts | None = None
    """Of what was traced, with the head whole and gradients of the type that they will have."""


Fitter = Callable[[nn.Module, Sequence[Device]], Fitted]
"""Finds how a step is divided: gets the model as it will be computed, and where."""


def swap(
    model: nn.Module,
    example: MicroBatch,
    *,
    optimizer: OptimizerFactory,
    device_memory: str | int | None = None,
    device: str | Device | Sequence[str | Device] = "auto",
    loss: Loss | None = None,
    layers: Sequence[str] | None = None,
    options: Options | None = None,
) -> Engine:
    """Return an engine that trains `model` within a device budget.

    The model's parameters move into the host store; the model can still be read (for instance with
    `state_dict`) after `Engine.synchronize`. With a `precision` it becomes that, and
    `Engine.state_dict` has the float32 masters.

    Args:
        model: Any module, in the mode in which it is to be trained.
        example: One micro-batch as the model's forward takes it: a mapping, a tuple or a tensor.
            If the model's layers are found by export, all later ones must have its shapes.
        optimizer: Gets the list of trainable parameters (host tensors), returns the optimizer,
            for instance `lambda params: torch.optim.AdamW(params, lr=3e-4)`. It must update each
            parameter independently of the others, as those of `torch.optim` do.
        device_memory: Budget such as `"8GiB"`; see `open_device` for the default.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `emulated:4GiB/s`; or an open device, which the
            engine then owns (its budget counts, not `device_memory`). Several, as a list or with
            commas between the names, divide the micro-batches of each step among them.
        loss: `loss(output)` or `loss(output, micro_batch)`; `None` takes the output's `.loss`. A
            micro-batch may then hold more than forward takes (targets), for the loss.
        layers: Paths of the modules that forward calls one after the other, each on what the one
            before it returns, if they cannot be found automatically.
        options: Further choices.

    Raises:
        PlanError: no plan fits device or host; names the layer and the least budget that would do.
        DiskError: `disk` cannot be used, or has too little space.
        AnalysisError: the model's layers cannot be found, or its head cannot be split.
        ConfigError: a device, size or example that cannot be used, or `precision="bf16"` with an
            optimizer that keeps no masters or on a GPU that only emulates it.
    """
    options = options or Options()
    given = Fitted(example, options.micro_batches, options.head_pieces)
    return swap_fitted(
        model,
        lambda _model, _devices: given,
        optimizer=optimizer,
        device_memory=device_memory,
        device=device,
        loss=loss,
        layers=layers,
        options=options,
    )


def swap_fitted(
    model: nn.Module, fit: Fitter, *, optimizer: OptimizerFactory, options: Options, **more: Any
) -> Engine:
    """Return an engine as `swap` does, whose micro-batch is found when the devices are open.

    What `fit` says counts more than `options`, and what it has traced is not traced again.
    """
    opening = functools.partial(_open, fit=fit, optimizer=optimizer, options=options, **more)
    with ExitStack() as undo:
        if options.deterministic:
            undo.enter_context(deterministic())
        with told_plainly(), interleaved():
            engine = _swap(model, options.precision, opening)
        engine.end_with(undo.pop_all())
    return engine


def _swap(
    model: nn.Module, precision: str | None, opening: Callable[[nn.Module], Engine]
) -> Engine:
    """Return the engine of a model that becomes what it is to be computed in."""
    check_memory(model)
    if precision is None:
        return opening(model)
    narrowed = Narrowed(model, precision)
    try:
        engine = opening(model)
    except BaseException:
        narrowed.restore()
        raise
    try:
        narrowed.give_masters(engine.masters)
    except BaseException:
        engine.close()
        narrowed.restore()
        raise
    return engine


def measured_overhead() -> Overhead:
    """Return what compute spends beside layers on the emulated device, measured by training."""

    def opened(
        *arguments: Any, device: Device, loss: Loss, optimizer: Any, **choices: Any
    ) -> Engine:
        return swap(
            *arguments, optimizer=optimizer, device=device, loss=loss, options=Options(**choices)
        )

    return emulated_overhead(opened)


def _open(
    model: nn.Module,
    fit: Fitter,
    optimizer: OptimizerFactory,
    options: Options,
    device: str | Device | Sequence[str | Device] = "auto",
    device_memory: str | int | None = None,
    loss: Loss | None = None,
    layers: Sequence[str] | None = None,
) -> Engine:
    """Return the engine of a model in the type that it is to be computed in."""
    devices = open_devices(device, device_memory)
    opened = devices[0]
    options = without_choices(options, opened.torch_device)
    placement: Placement | None = None
    try:
        check_shared(options, devices)
        for one in devices:
            require_native(one, options.precision)
        fitted = fit(model, devices)
        options = dataclasses.replace(
            options, micro_batches=fitted.micro_batches, head_pieces=fitted.head_pieces
        )
        traced = _traced(model, fitted, loss, layers, opened, check=options.check_model)
        inputs = traced.bind(fitted.example)
        chain, costs = _layers_of(traced.chain, fitted.costs, inputs, opened, options)
        (chain, costs, profile), compiling = _profiled(
            chain, costs, inputs, devices, options, images_grow=traced.larger is not None
        )
        made = optimizer_of(chain, optimizer)
        machine = machine_of_all(_machine_with_disk(profile.machine, chain, options), devices)
        states = None if options.disk is None else states_of(made)
        on_gpu = opened.torch_device.type != "cpu"
        taken = update_model(made, chain, on_gpu=on_gpu)
        if options.profile:
            key = machine_key(opened)
            taken = measured_updates(
                taken, made, chain, key, one_processor=not on_gpu, clips=options.rescales
            )
        times, one_memory = times_of_all(profile.times, devices), opened.one_memory
        planner = Planner(
            chain, costs, times, machine, options, taken, states, one_memory, len(devices),
            profile.crowded_share, compiling,
        )  # fmt: skip
        planner, plan = first_plan(planner, devices)
        layout = Layout(chain)
        if states is not None and plan.on_disk and options.disk is not None:
            placement = placed(Path(options.disk), chain, layout, states, plan.on_disk)
        places = host_gradients(layout, plan.shape, spends=plan.spends)
        store = HostStore(chain, layout, opened, placement, places)
        updates = Updates(
            chain,
            store,
            made,
            clip_norm=options.clip_norm,
            loss_scale=_loss_scale_of(options),
            placement=placement,
            guard=TRACING if compiling.compiled else None,
            inject=opened.inject,
            stream_type=opened.host_stream,
        )
        members, shared = join(chain, devices, store, updates)
    except BaseException:
        for one in devices:
            one.close()
        if placement is not None:
            placement.file.close()
        raise
    core = EngineCore(model, planner, plan, store, members, updates, shared)
    return Engine(core, traced)


def _layers_of(
    chain: Chain,
    costs: ChainCosts | None,
    inputs: Mapping[str, Any],
    device: Device,
    options: Options,
) -> tuple[Chain, ChainCosts]:
    """Return the chain as it will be trained, and its costs; those that are known are taken.

    Raises:
        ConfigError: it cannot be trained on this device, or with these options.
    """
    if isinstance(options.head_pieces, int):
        chain, costs = split_head(chain, options.head_pieces), None
    chain = with_gradients_in(chain, options.gradient_dtype)
    require_data(chain)
    check_hooks(chain.parameters, chain.names)
    if device.one_memory and (options.host_layers or options.disk is not None):
        what = "host_layers" if options.host_layers else "disk"
        raise ConfigError(
            f"with device='cpu' all layers compute on the host store itself; leave {what} out, "
            "or choose device='emulated'"
        )
    if options.compile is True:
        require_compilable(device)
    if costs is None:
        costs = layer_costs(chain, inputs, device.torch_device)
    if options.head_pieces == "auto":
        whole, chain = chain, split_head_as_needed(chain, costs, device.torch_device)
        costs = costs if chain is whole else layer_costs(chain, inputs, device.torch_device)
    return chain, costs


def _profiled(
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    devices: Sequence[Device],
    options: Options,
    *,
    images_grow: bool,
) -> tuple[Profiled, CompileChoice]:
    """Return the layers, compiled if they shall be, and what is known of them.

    Raises:
        ConfigError: layers that shall be compiled cannot be.
    """
    device = devices[0]

    def taken(chain: Chain, costs: ChainCosts, measure: bool | Literal["again"]) -> Profiled:
        profile = take_profile(device, chain, costs, inputs, measured_overhead, measure=measure)
        return Profiled(chain, costs, profile)

    def compile_all(measure: bool | Literal["again"]) -> Profiled:
        templates = compiled(chain, costs, device.torch_device)
        return taken(*with_compiled_costs(templates, costs, inputs, device), measure)

    choice = choice_of(
        options.compile,
        devices,
        deterministic=options.deterministic,
        images_grow=images_grow,
        profile=options.profile,
    )
    if choice is not None and choice.compiled:
        return compile_all(options.profile), choice
    plain = taken(chain, costs, options.profile)
    if choice is not None:
        return plain, choice
    # What was to be forgotten is forgotten by now.
    return faster_of(plain, lambda: compile_all(measure=True), device)


def _machine_with_disk(machine: Machine, chain: Chain, options: Options) -> Machine:
    """Return the machine with the host memory that may be used, and the rates of the disk.

    Raises:
        DiskError: the folder cannot be used.
    """
    # What the parameters take now goes when they move into the store.
    n_bytes = machine.host_memory_bytes + sum(parameter.nbytes for parameter in chain.parameters)
    if options.host_memory is not None:
        n_bytes = parse_bytes(options.host_memory, "host memory")
    machine = dataclasses.replace(machine, host_memory_bytes=n_bytes)
    if options.disk is None:
        return machine
    return disk_rates(Path(options.disk), measure=options.profile).of(machine)


def _traced(
    model: nn.Module,
    fitted: Fitted,
    loss: Loss | None,
    layers: Sequence[str] | None,
    device: Device,
    *,
    check: bool,
) -> Traced:
    """Return the model's chain as on the device; `check` compares them, on the processor.

    There the model may take other branches than on a GPU, so then it is traced for that too.
    """
    traced = fitted.traced
    if traced is None:
        with Progress("tracing the model"):
            traced = chain_of(model, fitted.example, loss, layers, device.torch_device)
    device.trim()  # what constants were computed in
    if check:
        require_data(traced.chain)
        on_host = device.torch_device.type == "cpu"
        there = traced if on_host else chain_of(model, fitted.example, loss, layers)
        check_chain(model, there, fitted.example)
    return traced


def _loss_scale_of(options: Options) -> LossScale | None:
    if options.precision != "fp16":
        return None
    return LossScale(options.loss_scale, options.loss_scale_steps)

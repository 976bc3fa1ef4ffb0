"""The public API: `swap` a model, then `step` it.

The caller's loop stays his own; parameters, gradients and optimizer state live on the host, and
the device holds no more than its budget.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts, layer_costs
from atomtrain.analysis.head import split_head, split_head_as_needed
from atomtrain.analysis.profile import LayerTime
from atomtrain.analysis.trace import Loss, MicroBatch, Traced, chain_of
from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning.costing import spans_of
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.search import make_plan
from atomtrain.planning.timeline import Span
from atomtrain.swapping.device import Device
from atomtrain.swapping.devices import open_device
from atomtrain.swapping.executor import Executor
from atomtrain.swapping.fragments import Fragment, element_bytes, fragment_ranges
from atomtrain.swapping.precision import (
    Masters,
    Narrowed,
    check_precision,
)
from atomtrain.swapping.profiling import take_profile
from atomtrain.swapping.store import HostStore, require_data
from atomtrain.swapping.streams import Inject
from atomtrain.swapping.tracing import Record
from atomtrain.swapping.updates import (
    OptimizerBytes,
    OptimizerFactory,
    Updates,
    optimizer_bytes,
    optimizer_of,
)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step took."""

    loss: float
    step_s: float
    link_wait_s: float
    """Time that compute waited for the link or for host updates."""
    device_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is swapped; every field has a working default."""

    micro_batches: int = 1
    """How many micro-batches a step will have. A step with more makes a new plan first."""
    segments: int | None = None
    """Number of segments, or `None` for the planner's choice."""
    slots: int | None = None
    """Number of device slots, or `None` for the planner's choice."""
    gradient_buffers: int | None = None
    """Number of gradient buffers, or `None` for the planner's choice."""
    host_layers: int | None = None
    """How many leading layers run on the host (an embedding: only the rows that tokens touch cross
    the link), or `None` for the planner's choice."""
    activations: Literal["recompute"] | None = None
    """`"recompute"`: keep no graphs from forward to backward, whatever memory there is; `None`: the
    planner keeps those of one segment where that pays."""
    clip_norm: float | None = None
    """Clip the global gradient norm, exactly, or `None`."""
    head_pieces: int | Literal["auto"] | None = None
    """In how many pieces of the vocabulary a language model's head computes its loss: more need
    less memory and a third more arithmetic there, and the result differs in its last bits. `None`
    leaves the head as the model has it, `"auto"` takes the fewest that make it need no more memory
    than other layers."""
    precision: Literal["bf16"] | None = None
    """`"bf16"`: stream and compute in bfloat16, with exact float32 masters in the optimizer's
    state (`atomtrain.optimizers.AdamW` keeps them). `None`: as the model is."""
    profile: bool = True
    """Measure this machine and the model's layers for a few seconds (once; then they are in the
    user's cache). Else a GPU's rates come from the catalogue, and the emulated device's from the
    model's FLOPs."""
    inject: Inject | None = None
    """Called before each job of each stream; tests delay transfers with it."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm must be positive, or None, not {self.clip_norm}")
        check_precision(self.precision)
        pieces = self.head_pieces
        counts = isinstance(pieces, int) and not isinstance(pieces, bool) and pieces >= 1
        if not counts and pieces not in (None, "auto"):
            raise ConfigError(
                f"head_pieces must be at least 1, 'auto', or None for the model's own head, not "
                f"{pieces!r}"
            )


def swap(
    model: nn.Module,
    example: MicroBatch,
    *,
    optimizer: OptimizerFactory,
    device_memory: str | int | None = None,
    device: str | Device = "auto",
    loss: Loss | None = None,
    layers: Sequence[str] | None = None,
    options: Options | None = None,
) -> Engine:
    """Return an engine that trains `model` within a device budget.

    The model's parameters move into the host store; the model can still be read (for instance with
    `state_dict`) after `Engine.synchronize`. With `precision="bf16"` it becomes bfloat16, and
    `Engine.state_dict` has the float32 masters.

    Args:
        model: Any module, in the mode in which it is to be trained.
        example: One micro-batch as the model's forward takes it: a mapping, a tuple or a tensor.
            If the model's layers are found by export, all later ones must have its shapes.
        optimizer: Gets the list of trainable parameters (host tensors), returns the optimizer,
            for instance `lambda params: torch.optim.AdamW(params, lr=3e-4)`. It must update each
            parameter independently of the others, as those of `torch.optim` do.
        device_memory: Budget such as `"8GiB"`; see `open_device` for the default.
        device: `auto`, `cuda`, `cuda:1` or `emulated:4GiB/s`; or an open device, which the engine
            then owns (its budget counts, not `device_memory`).
        loss: `loss(output)` or `loss(output, micro_batch)`; `None` takes the output's `.loss`. A
            micro-batch may then hold more than forward takes (targets), for the loss.
        layers: Paths of the modules that forward calls one after the other, each on what the one
            before it returns, if they cannot be found automatically.
        options: Further choices.

    Raises:
        PlanError: no plan fits the budget; names the layer and the least budget that would do.
        AnalysisError: the model's layers cannot be found, or its head cannot be split.
        ConfigError: a device, size or example that cannot be used, or `precision="bf16"` with an
            optimizer that keeps no masters.
    """
    options = options or Options()
    if options.precision is None:
        return _open(model, example, optimizer, device_memory, device, loss, layers, options)
    narrowed = Narrowed(model)
    try:
        engine = _open(model, example, optimizer, device_memory, device, loss, layers, options)
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


def _open(
    model: nn.Module,
    example: MicroBatch,
    optimizer: OptimizerFactory,
    device_memory: str | int | None,
    device: str | Device,
    loss: Loss | None,
    layers: Sequence[str] | None,
    options: Options,
) -> Engine:
    """Return the engine of a model in the type that it is to be computed in."""
    traced = chain_of(model, example, loss, layers)
    inputs = traced.bind(example)
    chain = traced.chain
    if isinstance(options.head_pieces, int):
        chain = split_head(chain, options.head_pieces)
    require_data(chain)
    opened = (
        open_device(device, device_memory, options.inject) if isinstance(device, str) else device
    )
    try:
        costs = layer_costs(chain, inputs, opened.torch_device)
        if options.head_pieces == "auto":
            chain = split_head_as_needed(chain, costs, opened.torch_device)
            costs = layer_costs(chain, inputs, opened.torch_device)
        profile = take_profile(opened, chain, costs, inputs, measure=options.profile)
        made = optimizer_of(chain, optimizer)
        planner = Planner(
            chain, costs, profile.times, profile.machine, options, optimizer_bytes(made)
        )
        plan = planner.plan(options.micro_batches)
        store = HostStore(chain, Layout(chain), opened)
        updates = Updates(chain, store.layout, store, made, options.clip_norm, options.inject)
    except BaseException:
        opened.close()
        raise
    return Engine(model, traced, planner, plan, store, opened, updates)


@dataclass(frozen=True)
class Planner:
    """What was learnt about model and machine, from which plans are made."""

    chain: Chain
    costs: ChainCosts
    times: Mapping[str, LayerTime]
    machine: Machine
    options: Options
    optimizer_bytes: OptimizerBytes | None = None
    """Of all parameters; `None` if the optimizer does not tell."""

    def plan(self, micro_batches: int) -> Plan:
        """Return the best plan for steps of so many micro-batches."""
        taken = self.optimizer_bytes
        request = Request(
            micro_batches=micro_batches,
            segments=self.options.segments,
            slots=self.options.slots,
            gradient_buffers=self.options.gradient_buffers,
            host_layers=self.options.host_layers,
            activations=self.options.activations,
            optimizer_state_bytes=None if taken is None else sum(taken),
        )
        return make_plan(self.chain, self.costs, self.times, self.machine, request)


class Engine:
    """Trains a swapped model. Not thread-safe: one thread drives it.

    `optimizer` is the optimizer of all parameters, for schedulers: its hyperparameters are read
    when a step begins. Its state lives in the engine (`optimizer_state`).
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        planner: Planner,
        plan: Plan,
        store: HostStore,
        device: Device,
        updates: Updates,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.last: StepReport | None = None
        self.recording = False
        """Whether steps note what each stream does, for `last_spans`."""
        self._record: Record | None = None
        self._traced, self._planner, self._store, self._updates = traced, planner, store, updates
        self.masters = Masters(updates.worker_of)
        """The parameters' values; call `synchronize` before."""
        self._broken: BaseException | None = None
        self._closed = False
        # Also when the caller forgets: a thread inside torch must not outlive the interpreter.
        self._release = weakref.finalize(self, _release, updates, device)
        try:
            self._executor = self._execute(plan)
        except BaseException:
            self._release()
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made; a scheduler may change its learning rate."""
        return self._updates.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; `None` without clipping."""
        with self._guarded():
            self._updates.wait()
        return self._updates.gradient_norm

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run one optimizer step over the micro-batches; return their mean loss.

        Each micro-batch's loss is divided by their number before its backward. Blocks until the
        loss is known; updates go on in the background and overlap the next step.

        Raises:
            ConfigError: no micro-batch, or one that lacks an input or has another shape.
            DeviceMemoryError: a micro-batch larger than the example exceeded the budget.
            PlanError: more micro-batches than before, and no plan for them fits.
            StreamError: a transfer or update failed, now or in an earlier step.
        """
        batches = self._begin(micro_batches)
        self._traced.ready(True)
        self._make_room(len(batches))
        started_s = time.perf_counter()
        self.device.reset_peak()
        with self._guarded(), self.device.computing(), self._recorded():
            losses = self._executor.train(batches)
            loss = _mean(losses)
            del losses
        self.device.synchronize()
        self.last = StepReport(
            loss=loss,
            step_s=time.perf_counter() - started_s,
            link_wait_s=self.device.take_wait_s(),
            device_peak_bytes=self.device.peak_bytes(),
        )
        return loss

    def last_spans(self) -> tuple[Span, ...]:
        """Return what each stream did in the last step, in seconds from any common zero.

        Blocks until the step's updates are done. Empty unless `recording` was set before the step.
        """
        self.synchronize()
        return () if self._record is None else self._record.spans()

    def predicted_spans(self) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        p = self._planner
        spans = spans_of(
            self.plan.shape, p.chain, p.costs, p.times, p.machine, self.plan.micro_batches
        )
        return tuple(span for span in spans if span.end_s > span.start_s)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the mean loss over the micro-batches, in evaluation mode; nothing is updated.

        Raises:
            AnalysisError: what the model does in evaluation does not fit its layers in training.
        """
        batches = self._begin(micro_batches)
        with self._guarded():
            # Exporting what the model does in evaluation switches flags that all threads see, so
            # no optimizer may run meanwhile.
            self._updates.wait()
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            self._traced.ready(False)
            with self._guarded(), self.device.computing():
                losses: list[Tensor] = []
                most = self.plan.micro_batches
                for first in range(0, len(batches), most):
                    losses += self._executor.evaluate(batches[first : first + most])
                loss = _mean(losses)
                del losses
            self.device.take_wait_s()
            return loss
        finally:
            for module, mode in training.items():
                module.training = mode

    def synchronize(self) -> None:
        """Block until all updates are applied and the model on the host is current.

        Raises:
            StreamError: a transfer or update failed, or an earlier step did; then part of the
                model is a step ahead of the rest, and must not be taken for a model.
        """
        self._check_whole()
        with self._guarded():
            self._updates.wait()
            self.device.synchronize()
            self._executor.buffers.to_host()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers under the model's own names.

        They share the host's memory, but for bfloat16 parameters with masters: of those it has the
        masters, as float32, which share memory or not as the optimizer keeps them. Read only.
        """
        self.synchronize()
        state = self.model.state_dict()
        read: dict[int, Tensor] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in state and self.masters.has(parameter):
                if id(parameter) not in read:
                    read[id(parameter)] = self.masters.read(parameter)
                state[name] = read[id(parameter)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace parameters (masters included) and buffers; names and shapes must match."""
        self.synchronize()
        self.model.load_state_dict(state)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if self.masters.has(parameter):
                self.masters.write(parameter, state.get(name, parameter.detach()))
        self.refresh_buffers()

    def refresh_buffers(self) -> None:
        """Bring the model's buffers to the device again, after they were changed on the host."""
        self._executor.buffers.from_host()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, such as `exp_avg`; shares memory.

        Masters are no part of it: `state_dict` has them.
        """
        self.synchronize()
        return {
            name: self.masters.moments(parameter)
            for name, parameter in self.model.named_parameters()
        }

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer state by parameter name."""
        self.synchronize()
        parameters = dict(self.model.named_parameters())
        for name, values in state.items():
            if name not in parameters:
                raise ConfigError(f"optimizer state names {name!r}, which the model does not have")
            self.masters.set_moments(parameters[name], values)

    @property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return sum(parameter.numel() for parameter in self._planner.chain.parameters)

    @property
    def state_bytes(self) -> int:
        """Host bytes of parameters, gradients and optimizer state.

        The state of an optimizer that does not tell is taken for two moments of the parameters'
        type.
        """
        streamed_bytes = 2 * self._store.layout.total_bytes
        taken = self._planner.optimizer_bytes
        return streamed_bytes + (streamed_bytes if taken is None else taken.state_bytes)

    def layers(self) -> dict[str, list[str]]:
        """Return the names of the parameters by layer; a shared weight is with its first layer."""
        names = self._planner.chain.names
        seen: set[int] = set()
        layers: dict[str, list[str]] = {}
        for layer in self._planner.chain.layers:
            fresh = {id(p): names[id(p)] for p in layer.parameters.values() if id(p) not in seen}
            seen.update(fresh)
            layers[layer.name] = list(fresh.values())
        return layers

    def fragment_ranges(self) -> list[tuple[int, int]]:
        """Divide the host's parameters into fragments of whole layers, a few MB to 64 MB each.

        The result depends only on the model, so all peers of a run divide alike.

        Returns:
            Byte ranges of the host store, in order and without gaps.
        """
        return fragment_ranges(self._store.layout)

    @contextmanager
    def fragment(self, start_bytes: int, stop_bytes: int) -> Iterator[Tensor]:
        """Give exclusive access to a range of the host's parameters, between two steps.

        Yields:
            1-D float32; what is written there is what the next step uses. A view of the host store,
            or, for a model of bfloat16, a copy of the masters that is written back at the end.

        Raises:
            ConfigError: the model's parameters are not all float32, nor all bfloat16.
        """
        self._check_whole()
        with self._guarded():
            self._updates.wait_for_range(start_bytes, stop_bytes)
        store, chain = self._store, self._planner.chain
        fragment = Fragment(chain, store.layout, store.parameters, start_bytes, stop_bytes)
        with fragment.view(self.masters) as values:
            yield values

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter in the host store: 4 of float32, 2 of bfloat16.

        Raises:
            ConfigError: the model's parameters are not all of one of the two.
        """
        return element_bytes(self._planner.chain)

    def close(self) -> None:
        """Finish pending updates and release device and threads; the model stays usable."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._broken is None:
                self.synchronize()
        finally:
            self._release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        if self._closed:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        self._check_whole()
        if isinstance(micro_batches, Tensor | Mapping) or len(micro_batches) == 0:
            raise ConfigError("give a list of at least one micro-batch: engine.step([batch])")
        return [self._traced.bind(micro_batch) for micro_batch in micro_batches]

    def _make_room(self, micro_batches: int) -> None:
        """Make a new plan if the step has more micro-batches than the plan was made for."""
        if micro_batches <= self.plan.micro_batches:
            return
        plan = self._planner.plan(micro_batches)
        self.synchronize()
        with self._guarded():
            # The old slots must be gone before the new ones come, or both would count.
            del self._executor
            self._executor = self._execute(plan)
            self.plan = plan

    def _execute(self, plan: Plan) -> Executor:
        planner = self._planner
        with self.device.computing():
            return Executor(
                planner.chain, planner.costs, plan, self._store, self.device, self._updates
            )

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Let the streams note what they do in this step, if that is wanted."""
        self._record = self.device.new_record() if self.recording else None
        device = self.device
        holders = (device.load, device.fetch, device.unload, device.save, self._updates.stream)
        for holder in (*holders, self._executor):
            holder.record = self._record
        try:
            yield
        finally:
            for holder in (*holders, self._executor):
                holder.record = None

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise StreamError(
                f"the engine failed earlier ({self._broken}); resume from the last checkpoint"
            ) from self._broken

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember a failure: half a step has run, so nothing after it would be right."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise


def _release(updates: Updates, device: Device) -> None:
    updates.close()
    device.close()


def _mean(losses: Sequence[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)

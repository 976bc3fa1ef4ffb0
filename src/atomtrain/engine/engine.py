"""The engine: runs the steps of a swapped model. `atomtrain.swap` opens it.

The caller's loop stays his own; parameters, gradients and optimizer state live on the host, and
the device holds no more than its budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from atomtrain.analysis.export.as_traced import AsTraced
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.analysis.layers.limits import Limit
from atomtrain.analysis.layers.trace import MicroBatch, Traced
from atomtrain.engine.calibration.compile_choice import CompileChoice
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.devices.streams import Record
from atomtrain.engine.engine_base import EngineCore, SegmentDone, StepReport
from atomtrain.engine.engine_state import EngineState
from atomtrain.engine.generation.generating import (
    Generated,
    decoded,
    encoded,
    generate,
    wish_of,
)
from atomtrain.engine.kept_plan import kept_plan
from atomtrain.engine.planner import Planner
from atomtrain.engine.state.disk_parameters import DiskTraffic
from atomtrain.engine.state.precision import LossScale, Masters
from atomtrain.engine.updates.updates import Combining
from atomtrain.engine.weighting import Weighted, weighted
from atomtrain.errors import ConfigError
from atomtrain.planning.cost.timeline import Span
from atomtrain.planning.plan.plan import Plan, Region


class Engine:
    """Trains a swapped model. Not thread-safe: one thread drives it.

    `optimizer` is the optimizer of all parameters, for schedulers: its hyperparameters are read
    when a step begins. Its state lives in the engine (`optimizer_state`).
    """

    def __init__(self, core: EngineCore, traced: Traced) -> None:
        """Run the steps of a core; `traced` binds micro-batches. `atomtrain.swap` calls this."""
        self._core, self._traced = core, traced
        self._state = EngineState(core)
        self.last: StepReport | None = None
        """What the last step took."""
        self.recording = False
        """Whether steps note what each stream does, for `last_spans`."""
        self._record: Record | None = None
        traces = any(isinstance(layer.module, GraphLayer) for layer in traced.chain.layers)
        self._as_measured = None if traces else AsTraced(core.model)

    @property
    def traced(self) -> Traced:
        """The layers as they were found, before a head was split or layers were compiled."""
        return self._traced

    @property
    def model(self) -> nn.Module:
        """The model that was given; its parameters lie in the host's memory."""
        return self._core.model

    @property
    def plan(self) -> Plan:
        """What the engine follows; a step with more micro-batches makes a new one."""
        return self._core.plan

    @property
    def planner(self) -> Planner:
        """What plans are made from: costs and times of the layers, rates of the machine."""
        return self._core.planner

    @property
    def compiling(self) -> CompileChoice:
        """Whether layers run compiled, and why."""
        return self._core.planner.compiling

    @property
    def device(self) -> Device:
        """The first device."""
        return self._core.devices[0]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return self._core.devices

    @property
    def masters(self) -> Masters:
        """The parameters' values; call `synchronize` before."""
        return self._core.masters

    @property
    def on_segment(self) -> Callable[[SegmentDone], None] | None:
        """Called after each segment's visit, in steps and evaluations, on the caller's thread; of
        several devices, after those of the first one. What it raises ends the step and the engine
        with it, as any other error in a step."""
        return self._core.on_segment

    @on_segment.setter
    def on_segment(self, call: Callable[[SegmentDone], None] | None) -> None:
        self._core.on_segment = call

    @property
    def device_name(self) -> str:
        """What the devices are called, such as `2 x NVIDIA H100`."""
        count, name = len(self.devices), self.device.name
        return name if count == 1 else f"{count} x {name}"

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made; a scheduler may change its learning rate."""
        return self._core.updates.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; `None` without clipping."""
        with self._core.guarded():
            self._core.updates.clipping.decided.wait()
        return self._core.updates.clipping.gradient_norm

    def step(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None = None
    ) -> float:
        """Run one optimizer step over the micro-batches; return their mean loss.

        Each micro-batch's loss is divided by their number before its backward, or multiplied by
        its part of all weights. Blocks until the loss is known; updates go on in the background and
        overlap the next step.

        Args:
            micro_batches: At least one.
            weights: How much each one counts, in any unit: if losses are means over targets, the
                numbers of targets, so that every target counts alike. One of weight 0 does not run.
                `None`, or the same for all: they count alike.

        Raises:
            ConfigError: no micro-batch, or one that lacks an input or has another shape; or weights
                that cannot be.
            DeviceMemoryError: a micro-batch larger than the example exceeded the budget.
            PlanError: more micro-batches or larger images than before, and no plan for them fits.
            DiskError: the disk failed to write in an earlier step; nothing of this one was done,
                and everything can still be read and saved.
            StreamError: a transfer or update failed, now or in an earlier step.
        """
        batches, counts = self._begin(micro_batches, weights)
        self._core.updates.require_disk()
        self._core.kept.check()
        self._core.whole.check()
        if self._core.whole.holds:
            self.synchronize()
        self._traced.ready(True, self._core.wait, self._hold)
        self._measure_larger_images(batches)
        self._measure_other_layers(batches[0])
        self._core.make_room(len(batches))
        started_s = time.perf_counter()
        for device in self.devices:
            device.reset_peak()
        with self._core.guarded(), self.device.computing():
            self._record = self.device.new_record() if self.recording else None
            with self._core.noting(self._record):
                losses = self._core.running.train(batches, counts.weights)
                loss = counts.mean(losses)
                del losses
        for device in self.devices:
            device.synchronize()
        step_s = time.perf_counter() - started_s
        uses = [device.allocator_use() for device in self.devices]
        self.last = StepReport(
            loss=loss,
            step_s=step_s,
            link_wait_s=max(device.take_wait_s() for device in self.devices),
            device_peak_bytes=max(use.peak_bytes for use in uses),
            device_reserved_bytes=max(use.reserved_peak_bytes for use in uses),
            allocation_retries=sum(use.retries for use in uses),
        )
        return loss

    @property
    def loss_scale(self) -> LossScale | None:
        """By what the loss is multiplied, and how many steps were skipped; `None` but in float16.

        Waits until the last step has decided; `LossScale.state` and `load_state` save and restore.
        """
        with self._core.guarded():
            self._core.updates.scale_of_loss()
        return self._core.updates.clipping.loss_scale

    def combine_gradients(self, combine: Combining) -> None:
        """Have something done to each block's gradient before its update, such as taking its mean
        over several hosts; with clipping it counts towards the norm as it is then.

        Args:
            combine: Called in each step once for each block, without waiting: takes the block's
                gradient (bytes on the host, to be changed in place) and the events after which it
                is complete, and returns the event after which it is what the update shall see.
                The order of blocks follows from the model alone, whatever the plan: the last
                layer's is first.

        Raises:
            ConfigError: there are several devices, blocks may be updated on the device, or
                gradients have no places of their own on the host.
        """
        self._core.combine_gradients(combine)

    def plan_by(
        self, measure: Callable[[Mapping[str, Any]], Profile], example: MicroBatch, faster: float
    ) -> bool:
        """Measure again, between two steps; return whether another plan is followed from now on.

        The next steps have the same bits as by the plan before.

        Args:
            measure: Takes the profile; gets the example by the chain's input names.
            example: A micro-batch.
            faster: How many times as fast another plan must be.

        Raises:
            ConfigError: `can_plan_again` is false.
        """
        if not self.can_plan_again:
            raise ConfigError("this engine keeps its plan; swap the model again for another one")
        inputs = self._traced.bind(example)
        return self._core.plan_by(lambda: measure(inputs), faster)

    @property
    def can_plan_again(self) -> bool:
        """Whether a new profile can be taken within the run: there is a device of its own, all
        parameters are in memory, and the example is like all micro-batches."""
        planner = self.planner
        return not (
            planner.one_memory
            or len(self.devices) > 1
            or planner.compiling.compiled
            or "parameters" in self.plan.on_disk
            or self._traced.larger is not None
        )

    def last_spans(self) -> tuple[Span, ...]:
        """Return what each stream did in the last step, in seconds from any common zero.

        Blocks until the step's updates are done. Empty unless `recording` was set before the step.
        """
        self.wait()
        return () if self._record is None else self._record.spans()

    def predicted_spans(self) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        return self.planner.spans(self.plan)

    @property
    def disk(self) -> DiskTraffic | None:
        """What went to and from the disk so far; `None` if nothing lies there."""
        disk = self._core.updates.disk
        return None if disk is None else disk.traffic

    def memory_map(self) -> list[Region]:
        """Return where the plan's memory goes, on host and device."""
        return self._state.memory_map()

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None = None
    ) -> float:
        """Return the mean loss over the micro-batches, in evaluation mode; nothing is updated.

        Args:
            micro_batches: At least one.
            weights: As in `step`.

        Raises:
            AnalysisError: what the model does in evaluation does not fit its layers in training.
        """
        batches, counts = self._begin(micro_batches, weights)
        self._core.kept.check()
        self._measure_larger_images(batches)
        with self._core.guarded():
            # Exporting what the model does in evaluation switches flags that all threads see, so
            # no optimizer may run meanwhile.
            self._core.updates.wait()
        with self._core.evaluating():
            self._traced.ready(False, self._core.wait, self._hold)
            with self._core.guarded(), self.device.computing():
                losses: list[Tensor] = []
                most = self.plan.micro_batches * len(self.devices)
                for first in range(0, len(batches), most):
                    losses += self._core.running.evaluate(batches[first : first + most])
                loss = counts.mean(losses)
                del losses
            for device in self.devices:
                device.take_wait_s()
            return loss

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        *,
        tokenizer: Any = None,
        on_host: bool = False,
        **wish: Any,
    ) -> Generated:
        """Return what the model writes behind each prompt, on the first device.

        Blocks of the model stay on the device as far as they fit, and are loaded for each token
        where they do not; the result is the same. In between the engine gives up its own device
        memory, and takes it again at the end: generate between many steps, not after each.

        Args:
            prompts: Token ids, or texts.
            tokenizer: With `encode` and `decode`; needed for texts, and to get some.
            on_host: Compute on the processor instead, where the whole model lies.
            wish: `max_new_tokens`, `temperature`, `seed`, `stop` and others of `Wish`.

        Raises:
            ConfigError: no or empty prompts, texts without a tokenizer, numbers that cannot be, or
                not a language model.
            PlanError: embedding, head and two blocks do not fit the budget.
            DeviceMemoryError: the prompts with their new tokens do not fit it.
            DataError: what the model gives is not a number.
        """
        ids, wanted = encoded(prompts, tokenizer), wish_of(wish)
        if on_host:
            self.synchronize()
            with self._core.evaluating(), closing(open_device("cpu")) as host:
                return decoded(generate(self.model, host, ids, wanted), tokenizer)
        with self._core.lending(), self._core.evaluating():
            return decoded(generate(self.model, self.device, ids, wanted), tokenizer)

    def synchronize(self) -> None:
        """Block until all updates are applied and the model on the host is current.

        What the caller then writes to its parameters is what the next step uses.

        Raises:
            StreamError: a transfer or update failed, or an earlier step did; then part of the
                model is a step ahead of the rest, and must not be taken for a model.
        """
        self._core.synchronize()
        self._core.wrote_blocks(range(self._core.store.layout.blocks))

    def wait(self) -> None:
        """Block until all updates that the steps began are done.

        For clocks; nothing may be written to the model without `synchronize`.

        Raises:
            StreamError: as of `synchronize`.
        """
        self._core.wait()

    def close(self) -> None:
        """Finish pending updates; give back device memory, gradients and threads, at once.

        The model stays usable, and so do `state_dict` and `optimizer_state`, unless part of the
        state lies on disk. Leaving a `with` block closes the engine.
        """
        self._core.close()

    def end_with(self, undo: ExitStack) -> None:
        """Close `undo` when the engine is closed, or forgotten."""
        self._core.undo.push(undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers under the model's own names.

        They share the host's memory, but for bfloat16 parameters with masters: of those it has the
        masters, as float32, which share memory or not as the optimizer keeps them. Read only.
        """
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace parameters (masters included) and buffers; names and shapes must match."""
        self._state.load_state_dict(state)

    def refresh_buffers(self) -> None:
        """Bring the model's buffers to the device again, after they were changed on the host."""
        self._state.refresh_buffers()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, such as `exp_avg`; shares memory.

        Masters are no part of it: `state_dict` has them.
        """
        return self._state.optimizer_state()

    def optimizer_counts(self) -> list[tuple[int, str, Any]]:
        """Return what the optimizer counts in its groups by itself: group's number, key, value."""
        self._core.synchronize()
        return [(number, key, value) for (number, key), value in self._core.counted.items()]

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer state by parameter name."""
        self._state.load_optimizer_state(state)

    def kept_plan(self) -> dict[str, Any]:
        """Return what fixes the plan, and what it was made for: plain JSON, for `Options(plan=...)`
        of who goes on from the state that is saved now."""
        core = self._core
        return kept_plan(core.planner, core.devices, core.plan).to_json()

    @property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return self._state.parameters

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state, wherever they lie.

        The state of an optimizer that does not tell is taken for two moments of the parameters'
        type.
        """
        return self._state.state_bytes

    def layers(self) -> dict[str, list[str]]:
        """Return the names of the parameters by layer; a shared weight is with its first layer."""
        return self._state.layers()

    def fragment_ranges(self) -> list[tuple[int, int]]:
        """Divide what is trained into fragments of whole layers, a few MB to 64 MB of float32 each.

        In elements the result depends only on the model, not on the type that it is computed in, so
        all peers of a run divide alike.

        Returns:
            Byte ranges of the host's gradients, in order and without gaps. Where nothing is frozen
            those of the parameters are the same.
        """
        return self._state.fragment_ranges()

    def fragment(self, start_bytes: int, stop_bytes: int) -> AbstractContextManager[Tensor]:
        """Give exclusive access to the trainable parameters of a range, between two steps.

        Yields:
            1-D float32; what is written there is what the next step uses. A view of the host store,
            or, for a model of bfloat16 or with frozen parameters, a copy that is written back at
            the end.

        Raises:
            ConfigError: the trainable parameters are not all float32, nor all bfloat16.
        """
        return self._state.fragment(start_bytes, stop_bytes)

    def fragment_places(self, start_bytes: int, stop_bytes: int) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters of a range of the host's parameters, each with its first element.

        Raises:
            ConfigError: the model's parameters are not all float32, nor all bfloat16.
        """
        return self._state.fragment_places(start_bytes, stop_bytes)

    @property
    def element_bytes(self) -> int:
        """Bytes of a trainable parameter in the host store: 4 of float32, 2 of bfloat16.

        Raises:
            ConfigError: the trainable parameters are not all of one of the two.
        """
        return self._state.element_bytes

    def _begin(
        self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None
    ) -> tuple[list[dict[str, Any]], Weighted]:
        if self._core.closed:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        self._core.check_whole()
        if isinstance(micro_batches, Tensor | Mapping) or len(micro_batches) == 0:
            raise ConfigError("give a list of at least one micro-batch: engine.step([batch])")
        counts = weighted(len(micro_batches), weights)
        return [self._traced.bind(each) for each in counts.of(micro_batches)], counts

    def _hold(self, limits: Sequence[Limit]) -> None:
        self.synchronize()
        self.masters.hold(limits)

    def _measure_larger_images(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Make a new plan if images are larger than those that the plan was made with."""
        larger = self._traced.larger
        largest = None if larger is None else larger.among(micro_batches)
        if larger is not None and largest is not None:
            with larger.as_example(largest):
                self._core.measure_again(largest)

    def _measure_other_layers(self, micro_batch: Mapping[str, Any]) -> None:
        """Make a new plan if layers that run by their own code draw random numbers or change
        buffers, and did not before: their recomputing has to know."""
        if self._as_measured is None or not self._as_measured.changes():
            return
        self._core.measure_random(micro_batch)
        self._as_measured = AsTraced(self.model)

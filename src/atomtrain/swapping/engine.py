"""The engine: runs the steps of a swapped model. `atomtrain.swap` opens it.

The caller's loop stays his own; parameters, gradients and optimizer state live on the host, and
the device holds no more than its budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.trace import MicroBatch
from atomtrain.errors import ConfigError
from atomtrain.planning.memory_map import Region, memory_map
from atomtrain.planning.several import further_gradients_bytes
from atomtrain.planning.timeline import Span
from atomtrain.swapping.disk_placement import DiskTraffic
from atomtrain.swapping.engine_state import EngineState
from atomtrain.swapping.loss_scale import LossScale
from atomtrain.swapping.tracing import Record
from atomtrain.swapping.updates import Combining


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step took."""

    loss: float
    step_s: float
    link_wait_s: float
    """Time that compute waited for the link or for host updates; the longest of several devices."""
    device_peak_bytes: int
    """The highest of several devices."""


class Engine(EngineState):
    """Trains a swapped model. Not thread-safe: one thread drives it.

    `optimizer` is the optimizer of all parameters, for schedulers: its hyperparameters are read
    when a step begins. Its state lives in the engine (`optimizer_state`).
    """

    last: StepReport | None = None
    """What the last step took."""
    recording = False
    """Whether steps note what each stream does, for `last_spans`."""
    _record: Record | None = None

    @property
    def device_name(self) -> str:
        """What the devices are called, such as `2 x NVIDIA H100`."""
        count, name = len(self.devices), self.device.name
        return name if count == 1 else f"{count} x {name}"

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made; a scheduler may change its learning rate."""
        return self._updates.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; `None` without clipping."""
        with self._guarded():
            self._updates.deciding.decided.wait()
        return self._updates.deciding.gradient_norm

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run one optimizer step over the micro-batches; return their mean loss.

        Each micro-batch's loss is divided by their number before its backward. Blocks until the
        loss is known; updates go on in the background and overlap the next step.

        Raises:
            ConfigError: no micro-batch, or one that lacks an input or has another shape.
            DeviceMemoryError: a micro-batch larger than the example exceeded the budget.
            PlanError: more micro-batches than before, and no plan for them fits.
            DiskError: the disk failed to write in an earlier step; nothing of this one was done,
                and everything can still be read and saved.
            StreamError: a transfer or update failed, now or in an earlier step.
        """
        batches = self._begin(micro_batches)
        self._updates.require_disk()
        self._traced.ready(True)
        self._make_room(len(batches))
        started_s = time.perf_counter()
        for device in self.devices:
            device.reset_peak()
        with self._guarded(), self.device.computing(), self._recorded():
            losses = self._running.train(batches)
            loss = _mean(losses)
            del losses
        for device in self.devices:
            device.synchronize()
        self.last = StepReport(
            loss=loss,
            step_s=time.perf_counter() - started_s,
            link_wait_s=max(device.take_wait_s() for device in self.devices),
            device_peak_bytes=max(device.peak_bytes() for device in self.devices),
        )
        return loss

    @property
    def loss_scale(self) -> LossScale | None:
        """By what the loss is multiplied, and how many steps were skipped; `None` but in float16.

        Waits until the last step has decided; `LossScale.state` and `load_state` save and restore.
        """
        with self._guarded():
            self._updates.scale_of_loss()
        return self._updates.deciding.loss_scale

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
        if len(self.devices) > 1:
            raise ConfigError(
                f"gradients of {len(self.devices)} devices are already added up by the engine; "
                "combine those of engines with one device each"
            )
        if self.planner.options.optimizer_on_device is not False:
            raise ConfigError(
                "gradients are combined on the host, where all blocks have to be updated; give "
                "Options(optimizer_on_device=False)"
            )
        if self.plan.spends:
            raise ConfigError(
                "gradients that share rooms on the host cannot wait there to be combined; leave "
                "out spend_gradients"
            )
        if not self._store.keeps_gradients:
            raise ConfigError(
                f"gradients are not gathered on the host where the device is {self.device.name!r}; "
                "choose one with memory of its own, such as 'emulated'"
            )
        self._updates.combining = combine

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
        disk = self._updates.disk
        return None if disk is None else disk.traffic

    def memory_map(self) -> list[Region]:
        """Return where the plan's memory goes, on host and device."""
        planner = self.planner
        layout, devices = self._store.layout, len(self.devices)
        state_bytes = self.state_bytes - layout.total_bytes - self._store.places.total_bytes
        state_bytes -= further_gradients_bytes(layout, devices)
        if self._updates.disk is not None:
            state_bytes -= self._updates.disk.use.saved_state_bytes
        return memory_map(planner.chain, self.plan, state_bytes, devices)

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
                most = self.plan.micro_batches * len(self.devices)
                for first in range(0, len(batches), most):
                    losses += self._running.evaluate(batches[first : first + most])
                loss = _mean(losses)
                del losses
            for device in self.devices:
                device.take_wait_s()
            return loss
        finally:
            for module, mode in training.items():
                module.training = mode

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        if self._closed:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        self._check_whole()
        if isinstance(micro_batches, Tensor | Mapping) or len(micro_batches) == 0:
            raise ConfigError("give a list of at least one micro-batch: engine.step([batch])")
        return [self._traced.bind(micro_batch) for micro_batch in micro_batches]

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Let the streams note what they do in this step, if that is wanted."""
        self._record = self.device.new_record() if self.recording else None
        device = self.device
        holders = (device.load, device.fetch, device.unload, device.save, *self._updates.streams)
        for holder in holders:
            holder.record = self._record
        self._running.record = self._record
        try:
            yield
        finally:
            for holder in holders:
                holder.record = None
            self._running.record = None


def _mean(losses: Sequence[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)

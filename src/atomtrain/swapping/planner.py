"""Makes plans for a model on a machine, whenever an engine needs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.planning.costing import spans_of
from atomtrain.planning.disk import DiskRequest, OnDisk, States, on_disk_up_to
from atomtrain.planning.machine import Machine
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.search import make_plan
from atomtrain.planning.timeline import Span
from atomtrain.swapping.options import Options
from atomtrain.swapping.updates import OptimizerBytes


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
    states: States | None = None
    """The optimizer's state of each parameter, if part of it may lie on disk."""
    one_memory: bool = False
    """Whether the device is the host: then nothing is resident and no layer apart."""

    def plan(self, micro_batches: int, on_disk: OnDisk | None = None) -> Plan:
        """Return the best plan for steps of so many micro-batches.

        `on_disk` says what lies on disk already; `None` leaves it to options and planner.
        """
        taken = self.optimizer_bytes
        if on_disk is None and self.options.on_disk is not None:
            on_disk = on_disk_up_to(self.options.on_disk)
        disk = None
        if self.states is not None:
            disk = DiskRequest(states=self.states, on_disk=on_disk)
        request = Request(
            micro_batches=micro_batches,
            segments=self.options.segments,
            slots=self.options.slots,
            gradient_buffers=self.options.gradient_buffers,
            host_layers=0 if self.one_memory else self.options.host_layers,
            resident=() if self.one_memory else None,
            activations=self.options.activations,
            optimizer_state_bytes=None if taken is None else sum(taken),
            disk=disk,
            clips=self.options.clip_norm is not None,
        )
        return make_plan(self.chain, self.costs, self.times, self.machine, request)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        spans = spans_of(
            plan.shape, self.chain, self.costs, self.times, self.machine, plan.micro_batches,
            self.states, plan.on_disk, self.options.clip_norm is not None,
        )  # fmt: skip
        return tuple(span for span in spans if span.end_s > span.start_s)

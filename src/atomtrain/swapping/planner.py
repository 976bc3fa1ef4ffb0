"""Makes plans for a model on a machine, whenever an engine needs one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.planning.costing import spans_of
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

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        shape, micro_batches = plan.shape, plan.micro_batches
        spans = spans_of(shape, self.chain, self.costs, self.times, self.machine, micro_batches)
        return tuple(span for span in spans if span.end_s > span.start_s)

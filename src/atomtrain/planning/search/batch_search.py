"""What a model would do on a machine: micro-batch size and count are chosen with the plan.

`make_plan` answers for one micro-batch. Here the micro-batch itself is open: every size is
analysed and planned, and the fastest in tokens per second wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import ConfigError, PlanError
from atomtrain.planning.cost.costing import Given, spans_of
from atomtrain.planning.cost.timeline import Span
from atomtrain.planning.plan.disk import (
    DiskRequest,
    States,
    on_disk_up_to,
    two_moments,
)
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.shape import Activation
from atomtrain.planning.plan.updating import UpdateModel, shared_updates
from atomtrain.planning.plan.updating import two_moments as updates_of_two_moments
from atomtrain.planning.search.search import TooSlowError, make_plan

LARGEST_MICRO_BATCH_TOKENS = 1 << 16
"""Far beyond the size from which a device's matrix units are busy."""
COMPUTE_SHARE = 0.95
"""Share of the step that compute should have, at least, where the tokens of a step are free."""
_HELPS = 1.01
"""A larger micro-batch must be faster by this factor: predictions are no better than that."""


class Analysis(NamedTuple):
    """A model for micro-batches of one size."""

    chain: Chain
    costs: ChainCosts
    updates: UpdateModel | None = None
    """What the optimizer takes; `None` is AdamW."""
    states: States | None = None
    """The tensors of its state, for what may lie on disk."""
    inputs: Mapping[str, Any] = MappingProxyType({})
    """The micro-batch by the chain's input names, where layers look at its data."""

    @property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return sum(parameter.numel() for parameter in self.chain.parameters)

    @property
    def update_work(self) -> float:
        """What the optimizer updates, in AdamW parameters of the host."""
        return self.parameters if self.updates is None else self.updates.host_work

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters, shared weights counted once."""
        return sum(p.numel() * p.element_size() for p in self.chain.parameters)

    @property
    def step_flops(self) -> int:
        """FLOPs of forward and backward for one micro-batch, nothing computed twice."""
        return sum(layer.forward_flops + layer.backward_flops for layer in self.costs.layers)


Analyse = Callable[[int], Analysis]
"""Gives the analysis for micro-batches of so many sequences."""


class Compute(NamedTuple):
    estimate: Callable[[Analysis], Mapping[str, LayerTime]]
    """Gives the seconds of each kind of layer for one micro-batch."""
    flops_per_s: float
    """The most that the estimate grants any layer."""
    peak_flops_per_s: float
    """Of the data sheet, or measured."""
    on_gpu: bool = False
    """Whether that is a GPU's."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    context_tokens: int
    """Tokens of a sequence."""
    tokens_per_step: int | None = None
    """A multiple of `context_tokens`; `None` is what lets compute cover the link."""
    micro_batch: int | None = None
    """Sequences of a micro-batch, or `None` for the fastest."""
    least_micro_batch: int = 1
    """Smaller ones are not tried."""
    disk: bool = False
    """Whether state may lie on the machine's disk."""
    activations: Activation | None = None
    """What all segments do with what forward saves; `None` is the planner's choice for each."""
    clips: bool = False
    """Whether no update begins before the norm of all gradients is known, as with clipping."""
    spends: bool = False
    """Whether gradients wait on the host for their own update only; not if it clips."""
    on_disk: str | None = None
    """Up to which kind of state it does then, or `None` for as little as host memory demands."""
    devices: int = 1
    """How many devices of the host divide a step's micro-batches among them."""

    def __post_init__(self) -> None:
        for name in (
            "context_tokens", "tokens_per_step", "micro_batch", "least_micro_batch", "devices"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        tokens, context = self.tokens_per_step, self.context_tokens
        if tokens is not None and tokens % context:
            below, above = tokens // context * context, -(-tokens // context) * context
            raise ConfigError(
                f"{tokens} tokens a step are no whole number of sequences of {context} tokens; "
                f"give {f'{below} or ' if below else ''}{above}"
            )
        if tokens is not None and self.micro_batch and tokens // context % self.micro_batch:
            raise ConfigError(
                f"micro-batches of {self.micro_batch} sequences do not divide the "
                f"{tokens // context} sequences of a step; give a divisor, or other tokens a step"
            )
        if self.on_disk is not None:
            on_disk_up_to(self.on_disk)
        each = (self.micro_batch or 1) * self.devices
        if tokens is not None and tokens // context % each:
            raise ConfigError(
                f"{tokens // context} sequences of a step cannot be divided equally among "
                f"{self.devices} devices; give a multiple of {each * context} tokens a step"
            )


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A plan with the micro-batch that it was made for."""

    plan: Plan
    machine: Machine
    analysis: Analysis
    times: Mapping[str, LayerTime]
    micro_batch: int
    """Sequences of a micro-batch."""
    context_tokens: int
    clips: bool = False
    """As in the workload."""
    devices: int = 1
    """How many run the plan, each on a share of the step."""

    @property
    def tokens_per_step(self) -> int:
        return self.devices * self.plan.micro_batches * self.micro_batch * self.context_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.plan.step_s

    @property
    def spans(self) -> list[Span]:
        """The predicted step on each stream, seconds from its beginning."""
        analysis = self.analysis
        given = Given(
            chain=analysis.chain, costs=analysis.costs, times=self.times, machine=self.machine
        )
        states = analysis.states or two_moments(analysis.chain)
        return spans_of(
            self.plan, given, states=states, clips=self.clips, updates=analysis.updates,
            devices=self.devices,
        )  # fmt: skip

    @property
    def flops_per_s(self) -> float:
        """Predicted useful FLOP/s of all devices: forward and backward, recomputing not counted."""
        micro_batches = self.devices * self.plan.micro_batches
        return self.analysis.step_flops * micro_batches / self.plan.step_s


def prospect(
    analyse: Analyse,
    compute: Compute,
    machine: Machine,
    workload: Workload,
    least_tokens_per_s: float = 0.0,
) -> Prospect:
    """Return the fastest plan over all sizes of micro-batches.

    Where the tokens of a step are free, they let compute cover the link and the disk, or are the
    most whose waiting values host memory can hold. With `least_tokens_per_s` slower plans are not
    looked for.

    Raises:
        PlanError: nothing fits, or nothing is so fast.
        ConfigError: a workload that cannot be.
    """
    analyse = _shared(analyse, workload.devices)

    def planned(tokens: int | None) -> Prospect:
        fixed = dataclasses.replace(workload, tokens_per_step=tokens)
        return _fastest(analyse, compute, machine, fixed, least_tokens_per_s)

    if workload.tokens_per_step is not None:
        return planned(workload.tokens_per_step)
    try:
        best = planned(None)
    except TooSlowError:
        raise
    except PlanError:
        micro_batch = workload.micro_batch or workload.least_micro_batch
        first = analyse(micro_batch)
        sequences = _sequences(first, compute.estimate(first), machine, workload)
        unit_tokens = workload.devices * workload.context_tokens
        if sequences <= micro_batch:
            raise
        shortest = planned(micro_batch * unit_tokens)
        return _longest(planned, shortest, sequences * unit_tokens)
    if best.plan.disk_s <= best.plan.compute_s:
        return best
    # Compute covers the link, but not the disk.
    more = math.ceil(best.plan.disk_s / (COMPUTE_SHARE * best.plan.compute_s))
    try:
        return planned(more * best.tokens_per_step)
    except PlanError:
        return _longest(planned, best, more * best.tokens_per_step)


def _longest(
    planned: Callable[[int], Prospect], shortest: Prospect, too_many_tokens: int
) -> Prospect:
    """Return the fastest of the plans seen while looking for the longest step that fits.

    Steps are those of `shortest`, which fits, times powers of two, which micro-batches divide.
    """
    best = shortest
    low, high = 0, math.ceil(math.log2(too_many_tokens / shortest.tokens_per_step))
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = planned(shortest.tokens_per_step << middle)
        except PlanError:
            high = middle
        else:
            low = middle
            best = max(best, found, key=lambda each: each.tokens_per_s)
    return best


def _fastest(
    analyse: Analyse,
    compute: Compute,
    machine: Machine,
    workload: Workload,
    least_tokens_per_s: float,
) -> Prospect:
    """Return the fastest plan over the sizes of micro-batches for one length of a step.

    Sizes grow until one does not fit, is not faster than the one before by 1%, or leaves less
    than that to gain: a larger micro-batch brings layers nearer to the device's rate, but moves
    no less through the link.
    """
    best: Prospect | None = None
    too_slow = 0
    first = analyse(workload.micro_batch or workload.least_micro_batch)
    sequences = _sequences(first, compute.estimate(first), machine, workload)
    for size in _sizes(workload, sequences):
        analysis = analyse(size)
        times = compute.estimate(analysis)
        request = Request(
            micro_batches=-(-sequences // size),
            updates=analysis.updates,
            disk=_disk_request(analysis, workload),
            activations=workload.activations,
            clips=workload.clips,
            devices=workload.devices,
            spends=workload.spends,
        )
        tokens = workload.devices * request.micro_batches * size * workload.context_tokens
        least = max(least_tokens_per_s, _HELPS * best.tokens_per_s if best else 0.0)
        below_s = tokens / least if least else math.inf
        try:
            plan = make_plan(analysis.chain, analysis.costs, times, machine, request, below_s)
        except TooSlowError:
            too_slow += 1
            if best is not None:
                break
            if too_slow > 1 or _most_to_gain(analysis.costs, times, compute.flops_per_s) < _HELPS:
                raise
            continue
        except PlanError:
            if best is None:
                raise
            break
        found = Prospect(
            plan=plan,
            machine=machine,
            analysis=analysis,
            times=times,
            micro_batch=size,
            context_tokens=workload.context_tokens,
            clips=workload.clips,
            devices=workload.devices,
        )
        if best is not None and found.tokens_per_s < _HELPS * best.tokens_per_s:
            break
        best = found
        if _most_to_gain(analysis.costs, times, compute.flops_per_s) < _HELPS:
            break
    if best is None:
        raise TooSlowError(f"no plan has more than {least_tokens_per_s:.3g} tokens a second")
    return best


def _shared(analyse: Analyse, devices: int) -> Analyse:
    if devices == 1:
        return analyse

    def analyse_shared(size: int) -> Analysis:
        analysis = analyse(size)
        updates = analysis.updates or updates_of_two_moments(analysis.chain)
        return analysis._replace(updates=shared_updates(updates, analysis.chain, devices))

    return analyse_shared


def _disk_request(analysis: Analysis, workload: Workload) -> DiskRequest | None:
    if not workload.disk:
        return None
    on_disk = None if workload.on_disk is None else on_disk_up_to(workload.on_disk)
    return DiskRequest(states=analysis.states or two_moments(analysis.chain), on_disk=on_disk)


def _most_to_gain(costs: ChainCosts, times: Mapping[str, LayerTime], flops_per_s: float) -> float:
    """Return how much slower the layers are than by their FLOPs alone, at the device's rate."""
    least_s = sum(2 * c.forward_flops + c.backward_flops for c in costs.layers) / flops_per_s
    return sum(sum(times[c.kind][:2]) for c in costs.layers) / least_s if least_s else math.inf


def covering_tokens(
    analysis: Analysis,
    times: Mapping[str, LayerTime],
    machine: Machine,
    micro_batch_tokens: int,
    *,
    clips: bool = False,
) -> int:
    """Return the least tokens of a step with which compute has 95% of it, by the lower bounds.

    With c seconds of compute a micro-batch, n of them take at least `max(n c_f, P / load)` for
    forward and `max(n c_b, P / load, P / unload, N / update)` for backward; P bytes and N
    parameters. Their sum is compared with `n (c_f + c_b)`. With clipping the updates are
    forward's to wait for.
    """
    forward_s = sum(times[layer.kind].forward_s for layer in analysis.costs.layers)
    backward_s = sum(times[layer.kind].backward_s for layer in analysis.costs.layers)
    if not (forward_s > 0 and backward_s > 0):
        return micro_batch_tokens
    load_s = analysis.parameter_bytes / machine.load_bytes_per_s
    back_s = max(load_s, analysis.parameter_bytes / machine.unload_bytes_per_s)
    update_s = analysis.update_work / machine.update_parameters_per_s
    ahead_s = max(load_s, update_s) if clips else load_s
    back_s = back_s if clips else max(back_s, update_s)

    def covered(n: float) -> bool:
        compute_s = n * (forward_s + backward_s)
        bound_s = max(n * forward_s, ahead_s) + max(n * backward_s, back_s)
        return compute_s >= COMPUTE_SHARE * bound_s

    # The share grows with n; both maxima have their kinks below `high`.
    low, high = 0.0, max(ahead_s / forward_s, back_s / backward_s)
    while high - low > 0.001 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if covered(middle) else (middle, high)
    return max(1, math.ceil(high * micro_batch_tokens))


def _sequences(
    analysis: Analysis, times: Mapping[str, LayerTime], machine: Machine, workload: Workload
) -> int:
    context = workload.context_tokens
    if workload.tokens_per_step is not None:
        return workload.tokens_per_step // context // workload.devices
    micro_batch = workload.micro_batch or workload.least_micro_batch
    each = micro_batch * context
    tokens = covering_tokens(analysis, times, machine, each, clips=workload.clips)
    sequences = -(-tokens // context)
    return -(-sequences // micro_batch) * micro_batch


def _sizes(workload: Workload, sequences: int) -> Iterator[int]:
    """Yield sizes of micro-batches, each at least twice the one before.

    They divide the step if its tokens are given; else the step is rounded up to a multiple.
    """
    if workload.micro_batch is not None:
        yield workload.micro_batch
        return
    next_size = workload.least_micro_batch
    for size in range(next_size, max(sequences, next_size) + 1):
        if size > workload.least_micro_batch and (
            size * workload.context_tokens > LARGEST_MICRO_BATCH_TOKENS
        ):
            return
        fits = workload.tokens_per_step is None or sequences % size == 0
        if size >= next_size and fits:
            yield size
            next_size = 2 * size

"""A short profile: each distinct layer really computes a few times on the device."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts, LayerCost, ValueSpec
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.errors import AnalysisError

PROFILE_S = 2.0
"""The whole profile takes about this long, and longer only where a few rounds do."""
_LEAST_ROUNDS = 3
"""Of layers that take less than `_SHORT_S`: of two measurements none can be told to be a hiccup."""
_SHORT_S = 0.1
LONGEST_S = 2.0
"""A layer that is expected to take longer is estimated from its FLOPs."""
_ROUNDS = 40
"""The most measurements of each layer."""
_HICCUP = 3.0
"""A measurement counts for at most so many medians: what is longer is not part of usual steps."""
_OVERHEAD_S = 2e-5
"""What an estimate adds for each pass of a layer: a few calls of torch."""

Synchronize = Callable[[], None]
"""Blocks until the device is idle."""
Computing = Callable[[], AbstractContextManager[Any]]
"""Gives the context in which the executor computes, for instance one that counts memory."""


class LayerTime(NamedTuple):
    """Seconds that one layer computes for one micro-batch."""

    forward_s: float
    """Without a graph."""
    backward_s: float
    """Forward with a graph (recomputing), then backward."""
    offload_forward_s: float | None = None
    """What forward takes more if what it saves goes to the host; `None`: not measured."""
    offload_backward_s: float | None = None
    """What backward takes more then, making again included; `None`: not measured."""
    send_forward_s: float | None = None
    """What forward takes more if all of it goes to the host and nothing is made again; `None`: not
    measured."""
    send_backward_s: float | None = None
    """What backward takes more then; `None`: not measured."""

    @property
    def known(self) -> list[float]:
        return [seconds for seconds in self if seconds is not None]

    def scaled(self, factor: float) -> LayerTime:
        """Return the same where everything takes `factor` times as long."""
        forward_s, backward_s, *offloading = self
        return LayerTime(
            factor * forward_s,
            factor * backward_s,
            *(None if seconds is None else factor * seconds for seconds in offloading),
        )

    def sending_all(self) -> LayerTime:
        """Return the same where offloading makes nothing again."""
        return self._replace(
            offload_forward_s=self.send_forward_s, offload_backward_s=self.send_backward_s
        )


def layer_times(
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    device: torch.device,
    synchronize: Synchronize,
    computing: Computing = contextlib.nullcontext,
    kinds: Sequence[str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, LayerTime]:
    """Return the seconds of each kind of layer, means of measurements on the device.

    A step adds many calls up, so it takes what they take on average. A median would leave out what
    other programs and the system take of the processor now and then.

    All kinds are measured once, then all again, and so on, so that a moment in which the machine
    is busy with something else spoils one measurement of several layers, not all of one.

    Args:
        chain: With real parameters, on the host or the device; they are not changed.
        costs: Of the chain.
        inputs: One micro-batch, by the chain's input names.
        device: Where to measure.
        synchronize: Blocks until the device is idle.
        computing: Context in which layers run, as in training.
        kinds: Which to measure; `None` is all.
        clock: What is read before and after a pass, in seconds.

    Raises:
        AnalysisError: a layer's time is not a number; names the layer.
        DeviceMemoryError: by `computing`, if a layer does not fit.
    """
    samples: dict[str, list[LayerTime]] = {}
    with computing():
        rate = flops_per_s(device, synchronize, compute_dtype(chain))
    estimates = estimated_times(costs, rate)
    timed = functools.partial(_timed, synchronize=synchronize, clock=clock)
    other = [] if device.type == "cpu" else [device]
    ends_s = time.perf_counter() + PROFILE_S
    with torch.random.fork_rng(other, device_type=device.type):
        for _ in range(_ROUNDS):
            for layer, cost in _distinct(chain, costs, kinds):
                if sum(estimates[cost.kind][:2]) > LONGEST_S:
                    samples[cost.kind] = [estimates[cost.kind]]
                    continue
                known = samples.setdefault(cost.kind, [])
                few = len(known) < _LEAST_ROUNDS and (not known or sum(known[0][:2]) < _SHORT_S)
                if time.perf_counter() > ends_s and not few:
                    continue
                with computing():
                    values = example_values(layer, costs, inputs, device)
                    known.append(_measure(layer, values, device, timed))
                del values
    times = {
        kind: LayerTime(
            usual_s([time.forward_s for time in known]),
            usual_s([time.backward_s for time in known]),
        )
        for kind, known in samples.items()
    }
    for layer, cost in _distinct(chain, costs, kinds):
        check_time(times[cost.kind], layer.name)
    return times


def usual_s(seconds: Sequence[float]) -> float:
    """Return the mean of measurements, in which none counts for more than three medians."""
    middle_s = statistics.median(seconds)
    most_s = max(middle_s, _HICCUP * middle_s)  # nonsense stays what it is, and is refused
    return statistics.fmean(min(each_s, most_s) for each_s in seconds)


def estimated_times(costs: ChainCosts, rate_flops_per_s: float) -> dict[str, LayerTime]:
    """Return the seconds of each kind of layer from its FLOPs alone."""
    return {
        cost.kind: LayerTime(
            _OVERHEAD_S + cost.forward_flops / rate_flops_per_s,
            3 * _OVERHEAD_S + (cost.forward_flops + cost.backward_flops) / rate_flops_per_s,
        )
        for cost in costs.layers
    }


def check_time(time: LayerTime, layer: str) -> None:
    """Check that a time can be planned with.

    Raises:
        AnalysisError: it is negative or not finite; names the layer.
    """
    for seconds in time.known:
        if not (isinstance(seconds, int | float) and seconds >= 0 and math.isfinite(seconds)):
            raise AnalysisError(
                f"the profile says that layer {layer!r} takes {seconds} s, not a duration; "
                "profile again, or go without a profile"
            )


def compute_dtype(chain: Chain) -> torch.dtype:
    """Return the type in which a chain mostly computes: that of most of its parameters."""
    elements: Counter[torch.dtype] = Counter({torch.float32: 0})
    for parameter in chain.parameters:
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=elements.__getitem__)


def measured_bytes(cost: LayerCost) -> int:
    """Return what measuring a layer takes on the device, beside what it reads: weights, their
    gradients, and its workspace."""
    work_bytes = max(cost.graph_bytes, cost.kept_bytes + cost.backward_bytes)
    return 2 * cost.parameter_bytes + cost.buffer_bytes + work_bytes


def flops_per_s(
    device: torch.device, synchronize: Synchronize, dtype: torch.dtype = torch.float32
) -> float:
    """Return the FLOP/s of a matrix product of moderate size; takes some milliseconds."""
    size = 512 if device.type == "cpu" else 2048
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(matrix, matrix)
    seconds = [_timed(lambda: torch.mm(matrix, matrix), synchronize) for _ in range(5)]
    return 2 * size**3 / statistics.median(seconds)


def _distinct(
    chain: Chain, costs: ChainCosts, kinds: Sequence[str] | None
) -> list[tuple[Layer, LayerCost]]:
    first: dict[str, tuple[Layer, LayerCost]] = {}
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        if kinds is None or cost.kind in kinds:
            first.setdefault(cost.kind, (layer, cost))
    return list(first.values())


def example_values(
    layer: Layer, costs: ChainCosts, inputs: Mapping[str, Any], device: torch.device
) -> list[Any]:
    """Return what a layer reads: of the micro-batch what it gets of that, else random numbers."""
    return [_value(name, costs.values[name], inputs, device) for name in layer.reads]


def _value(name: str, spec: ValueSpec, inputs: Mapping[str, Any], device: torch.device) -> Any:
    if name in inputs:
        value = inputs[name]
        return value.to(device) if isinstance(value, Tensor) else value
    if spec.dtype is None:
        return spec.constant
    if spec.dtype.is_floating_point:
        value = torch.randn(spec.shape, dtype=torch.float32, device=device).to(spec.dtype)
        if spec.strides is not None:
            value = value.view(-1).as_strided(spec.shape, spec.strides)
        return value.requires_grad_(spec.requires_grad)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _measure(
    layer: Layer,
    values: Sequence[Any],
    device: torch.device,
    timed: Callable[[Callable[[], Any]], float],
) -> LayerTime:
    tensors = tensors_of(layer, device)

    def forward() -> None:
        with torch.no_grad():
            layer.run(tensors, values)

    def both() -> None:
        with torch.enable_grad():
            written = layer.run(tensors, values)
            roots = [v for v in written if isinstance(v, Tensor) and v.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for value in values:
            if isinstance(value, Tensor):
                value.grad = None  # else the next backward would add to it

    # The first run of each kind chooses kernels and touches memory. A GPU has others without a
    # graph: on an H200 a block's first such forward took half a second.
    both()
    forward()
    return LayerTime(timed(forward), timed(both))


def tensors_of(layer: Layer, device: torch.device) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers on a device, as training has them there."""
    tensors = {
        name: parameter.detach().to(device).requires_grad_(parameter.requires_grad)
        for name, parameter in layer.parameters.items()
    }
    for tensor in tensors.values():
        if tensor.requires_grad:
            # As in training, where all but a step's first micro-batch add to what is there.
            tensor.grad = torch.zeros_like(tensor)
    # Clones, because running statistics must not change.
    tensors.update({name: b.detach().to(device).clone() for name, b in layer.buffers.items()})
    return tensors


def _timed(
    work: Callable[[], Any],
    synchronize: Synchronize,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    synchronize()
    started_s = clock()
    work()
    synchronize()
    return clock() - started_s

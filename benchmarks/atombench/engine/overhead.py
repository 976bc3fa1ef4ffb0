"""What the launching thread spends on a block: the engine's own work, where computing takes none.

A GPU computes while its host hands over the next operation. Where the host is slower the GPU waits,
however large it is. Here a Llama trains on a *null device*: tensors are so small that each
operation is over at once, copies take no time, and memory is not counted. What is left on the
calling thread is Python, PyTorch's dispatch and autograd, and the engine.

- *A block* is the difference between models of more and of fewer blocks, so that embedding, head
  and what a step does once do not count.
- *The thread's own processor time* counts, not the clock: streams and updates have threads of their
  own, which a busy machine starts late.
- `host_s_per_block` is that of blocks whose saved tensors wait on the host, made again where a
  cheap operation can. `parts` has the other ways, and `resident`: forward and backward of the same
  layers by PyTorch alone, nothing recomputed.
- `devices_s_per_block` is by the clock: how long a block and micro-batch of each device takes where
  one device trains, and where two do. Their threads take turns at Python, so what one launches the
  other waits for.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.analysis.layers.trace import chain_of
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.shape import ACTIVATIONS, Activation

K = TypeVar("K")
RESIDENT = "resident"
DEVICES = (1, 2)
_LINK_BYTES_PER_S = 1e6
"""What plans assume: so slow that what is cheap is made again, not sent."""


@dataclass(frozen=True, kw_only=True)
class OverheadSetup:
    """Inputs of the benchmark."""

    layers: tuple[int, int] = (2, 8)
    """Blocks of the two models that are compared."""
    micro_batches: int = 4
    """Of a step."""
    tokens: int = 4
    """Of a micro-batch: few, so that computing takes no time."""
    width: int = 32
    heads: int = 4
    steps: int = 20
    """Timed steps of each; the least counts."""
    warmup_steps: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)
        if not 0 < self.layers[0] < self.layers[1]:
            raise ConfigError(f"layers must be two growing numbers, not {self.layers}")


QUICK = OverheadSetup(layers=(2, 6), steps=5, warmup_steps=1)


class NullDevice(EmulatedDevice):
    """A device behind a link that takes no time, and that counts no memory."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


def run(options: BenchmarkOptions, setup: OverheadSetup | None = None) -> Result:
    """Measure; return the keys of the benchmarks' contract and the inputs.

    Raises:
        ConfigError: transformers, which has the Llama, is missing.
    """
    setup = setup or (QUICK if options.quick else OverheadSetup())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts, devices = _measured(setup), _of_devices(setup)
    finally:
        torch.set_num_threads(threads)
    return {
        "host_s_per_block": parts["offload"],
        "parts": parts,
        "devices_s_per_block": devices,
        "inputs": asdict(setup),
        **description(),
    }


def _measured(setup: OverheadSetup) -> dict[str, float]:
    """Return the thread's seconds on one block and micro-batch, by how it is trained.

    All take turns. Of each the least counts, since whatever else runs on the machine only adds.
    """
    data = _data(setup)
    steps: dict[tuple[str, int], Callable[[], object]] = {}
    with ExitStack() as stack:
        for layers in setup.layers:
            steps[RESIDENT, layers] = _resident(llama(setup, layers), data)
            for activations in ACTIVATIONS:
                engine = stack.enter_context(opened(setup, layers, activations))
                steps[activations, layers] = functools.partial(engine.step, data)
        least_s = _least_s(steps, setup, time.thread_time)
    fewer, more = setup.layers
    blocks = (more - fewer) * setup.micro_batches
    parts = {}
    for name in (RESIDENT, *ACTIVATIONS):
        parts[name] = (least_s[name, more] - least_s[name, fewer]) / blocks
        progress(f"{name}: {parts[name] * 1e6:.0f} us a block and micro-batch")
    return parts


def _least_s(
    steps: Mapping[K, Callable[[], object]], setup: OverheadSetup, clock: Callable[[], float]
) -> dict[K, float]:
    """Return the least time of each step by a clock; they take turns."""
    least_s: dict[K, float] = {}
    for turn in range(setup.warmup_steps + setup.steps):
        for key, step in steps.items():
            started_s = clock()
            step()
            taken_s = clock() - started_s
            if turn >= setup.warmup_steps:
                least_s[key] = min(taken_s, least_s.get(key, math.inf))
    return least_s


def _of_devices(setup: OverheadSetup) -> dict[str, float]:
    """Return the seconds that a block and micro-batch of each device takes, by how many train."""
    steps: dict[tuple[int, int], Callable[[], object]] = {}
    with ExitStack() as stack:
        for count, layers in itertools.product(DEVICES, setup.layers):
            engine = stack.enter_context(opened(setup, layers, "offload", count))
            steps[count, layers] = functools.partial(engine.step, _data(setup, count))
        least_s = _least_s(steps, setup, time.perf_counter)
    fewer, more = setup.layers
    blocks = (more - fewer) * setup.micro_batches
    found = {str(n): (least_s[n, more] - least_s[n, fewer]) / blocks for n in DEVICES}
    for devices, seconds in found.items():
        progress(f"{devices} devices: {seconds * 1e6:.0f} us a block and micro-batch of each")
    return found


def llama(setup: OverheadSetup, layers: int) -> nn.Module:
    """Return a Llama of so many blocks.

    Raises:
        ConfigError: transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise ConfigError("the Llama is of transformers: pip install 'atomtrain[hf]'") from error
    torch.manual_seed(setup.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=setup.width,
            intermediate_size=2 * setup.width,
            num_hidden_layers=layers,
            num_attention_heads=setup.heads,
            num_key_value_heads=setup.heads // 2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def opened(
    setup: OverheadSetup, layers: int, activations: Activation, devices: int = 1
) -> atomtrain.Engine:
    """Return an engine on null devices; each has a step's micro-batches of its own."""
    return atomtrain.swap(
        llama(setup, layers),
        _data(setup)[0],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        device=[NullDevice(1 << 30, _LINK_BYTES_PER_S) for _ in range(devices)],
        options=atomtrain.Options(
            micro_batches=devices * setup.micro_batches,
            segments=layers + 2,
            slots=2,
            gradient_buffers=2,
            activations=activations,
            host_layers=0,
            optimizer_on_device=False,
            profile=False,
        ),
    )


def _resident(model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
    """Return a step of the layers that the engine runs, without the engine."""
    traced = chain_of(model, data[0])

    def step() -> None:
        for parameter in traced.chain.parameters:
            parameter.grad = None
        for micro_batch in data:
            (traced.chain.loss_of(traced.bind(micro_batch)) / len(data)).backward()

    return step


def _data(setup: OverheadSetup, devices: int = 1) -> list[dict[str, Tensor]]:
    ids = torch.arange(setup.tokens).unsqueeze(0)
    return [{"input_ids": ids, "labels": ids} for _ in range(devices * setup.micro_batches)]

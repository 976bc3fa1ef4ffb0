"""Data parallelism of ATOM's own engine: swapped within the budget, averaged in every step.

What a user would do without a swarm: each peer's engine accumulates its gradients on its host, they
are averaged as float32 among all peers over Gloo, and only then updated. Averaging overlaps as much
as the method allows: a block's begins as soon as its gradient is on the host, while the layers
before it are still computed, and several are under way at once, as in `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import atomtrain
from atomtrain.benchmarks.network_model import Batch, ModelSetup, fused_adamw
from atomtrain.planning.shape import Layers
from atomtrain.swapping.engine import Engine
from atomtrain.swapping.parts import Part
from atomtrain.swapping.streams import Event, Stream


class SwappedParallel:
    """One rank's engine, whose gradients are the means of all ranks; a context that closes it."""

    def __init__(
        self,
        setup: ModelSetup,
        micro_batch: int,
        device_link_bytes_per_s: float,
        device_memory_bytes: int,
    ) -> None:
        """Open the engine; the process group must exist.

        Raises:
            PlanError: the model does not fit the budget.
        """
        example = setup.micro_batches(0, setup.sequences_per_peer, micro_batch)
        self._engine = atomtrain.swap(
            setup.model(),
            example[0],
            optimizer=lambda ps: fused_adamw(ps, setup.learning_rate),
            device=f"emulated:{int(device_link_bytes_per_s)}B/s",
            device_memory=device_memory_bytes,
            # What is updated on the device has no gradient on the host.
            options=atomtrain.Options(micro_batches=len(example), optimizer_on_device=False),
        )
        self._averaging = Averaging(self._engine)

    def __enter__(self) -> SwappedParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._averaging.close()

    def step(self, batches: Sequence[Batch]) -> float:
        """Run one step of all ranks; updates may go on. Return this rank's loss."""
        self._averaging.begin_step()
        return self._engine.step(batches)

    def wait(self) -> None:
        """Block until the last step's gradients are averaged and its updates done."""
        self._engine.wait()


class Averaging:
    """Stands between an engine's gradients and its updates: these wait for the means of all ranks.

    All ranks must average the same blocks in the same order, the last layer's first: whatever their
    plans are, backward makes them so.
    """

    def __init__(self, engine: Engine) -> None:
        """Average what the engine's steps make from now on."""
        updates, self._store = engine._updates, engine._store
        self._pass_on = updates.arrived
        # Collectives begin on the one and end on the other, so the next begins meanwhile.
        self._starting, self._ending = Stream("averaging"), Stream("averaged")
        self._works: dict[int, tuple[Any, torch.Tensor]] = {}
        self._last = self._store.layout.blocks
        updates.arrived = self._arrived  # type: ignore[method-assign]
        updates.divisible = _indivisible  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Expect the last block again."""
        self._last = self._store.layout.blocks

    def close(self) -> None:
        """End the threads; the engine must be closed."""
        self._starting.close()
        self._ending.close()

    def _arrived(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> None:
        """Average blocks once `event` is done, and have the engine wait for that instead."""
        for block in sorted(blocks, reverse=True):
            assert block < self._last, "ranks might average unlike blocks"
            self._last = block
            started = self._starting.submit(partial(self._start, block), [event])
            ended = self._ending.submit(partial(self._end, block), [started])
            self._pass_on(layers, [block], ended, touched)

    def _start(self, block: int) -> None:
        start, stop = self._store.layout.gradient_range(block)
        flat = self._store.gradients[start:stop].view(torch.float32)
        self._works[block] = dist.all_reduce(flat, async_op=True), flat

    def _end(self, block: int) -> None:
        work, flat = self._works.pop(block)
        work.wait()
        flat.div_(dist.get_world_size())


def _indivisible(block: int) -> Sequence[Part]:
    """Return no parts of a block: it is averaged, and so updated, as a whole."""
    return ()

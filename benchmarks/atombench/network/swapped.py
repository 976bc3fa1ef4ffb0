"""Data parallelism of ATOM's own engine: swapped within the budget, averaged in every step.

What a user would do without a swarm: each peer's engine accumulates its gradients on its host, they
are averaged as float32 among all peers over Gloo, and only then updated. Averaging overlaps as much
as the method allows: a block's begins as soon as its gradient is on the host, while the layers
before it are still computed, and several are under way at once, as in `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import atomtrain
from atombench.network.model import Batch, ModelSetup, fused_adamw
from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.engine.engine import Engine


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
        return self._engine.step(batches)

    def wait(self) -> None:
        """Block until the last step's gradients are averaged and its updates done."""
        self._engine.wait()


class Averaging:
    """Takes the mean of each block's gradients over all ranks, before the block's update."""

    def __init__(self, engine: Engine) -> None:
        """Average what the engine's steps make from now on."""
        # Collectives begin on the one and end on the other, so the next begins meanwhile.
        self._starting, self._ending = Stream("averaging"), Stream("averaged")
        engine.combine_gradients(self._combine)

    def close(self) -> None:
        """End the threads; the engine must be closed."""
        self._starting.close()
        self._ending.close()

    def _combine(self, gradient: torch.Tensor, complete: Sequence[Event]) -> Event:
        flat, works = gradient.view(torch.float32), list[Any]()

        def start() -> None:
            works.append(dist.all_reduce(flat, async_op=True))

        def end() -> None:
            works[0].wait()
            flat.div_(dist.get_world_size())

        return self._ending.submit(end, [self._starting.submit(start, complete)])

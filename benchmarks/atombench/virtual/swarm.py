"""Peers on a virtual clock and the network between them: whole services, trainers that are sums."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from atombench.virtual.clock import InlineThread
from atombench.virtual.network import MemoryDirectory, MemoryNetwork, MemoryTransport
from atomtrain.swarm import Endpoint, Manifest, Rules, SwarmConfig
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.node.entering import build_service

RUN = "sim"
ENDPOINT = Endpoint(connect_s=2.0, stall_s=3.0)
TIMES: dict[str, float] = {
    "expiry_s": 6.0, "round_floor_s": 2.0, "slowest_link_bytes_per_s": 1e4,
}  # fmt: skip
"""Settings of a peer's configuration: short ones, since seconds are simulated."""
_BORN_S = 1e9
_TOKENS_A_STEP = 10
PeerT = TypeVar("PeerT", bound="VirtualPeer")


def _of_the_loop_s() -> float:
    return _BORN_S + asyncio.get_running_loop().time()


class VirtualSwarm(Generic[PeerT]):
    """Peers, their network and their clock."""

    def __init__(
        self,
        elements: tuple[int, ...],
        seed: int,
        delay_s: float = 0.02,
        *,
        clock: Callable[[], float] | None = None,
        **rules: Any,
    ) -> None:
        """Have nobody yet. `clock`: the time that is the same for all peers, else the loop's.

        With that one everything that happens follows from the arguments and `seed`.
        """
        self.clock = clock or _of_the_loop_s
        self.random = random.Random(seed)
        self.network = MemoryNetwork(lambda: self.random.uniform(0, delay_s), stall_s=3.0)
        self.manifest = Manifest(
            RUN,
            elements,
            {},
            Rules(**{"wire": "float32", "local_steps_per_round": 4, "group_size": 0, **rules}),
            born_s=_BORN_S if clock is None else 0.0,
        )
        self.peers: dict[str, PeerT] = {}

    async def enter(self, peer: PeerT) -> PeerT:
        """Start a peer."""
        self.peers[peer.name] = peer
        await peer.start()
        return peer

    async def kill(self, name: str) -> None:
        """End a peer as a killed process ends."""
        peer = self.peers.pop(name)
        self.network.cut(name, lossy=self.random.random() < 0.5)
        await peer.stop_abruptly()

    async def settle(self, within_s: float) -> bool:
        """Stop training, and wait until all peers hold the same anchors."""
        for peer in self.peers.values():
            peer.training = False
        for _ in range(int(within_s)):
            await asyncio.sleep(1)
            if self.agree():
                return True
        return False

    def agree(self) -> bool:
        """Say whether all living peers hold the same anchors."""
        return (
            len({peer.service.context.mailbox.store.stamps() for peer in self.peers.values()}) == 1
        )


class VirtualPeer:
    """One peer and its trainer."""

    def __init__(
        self, simulation: VirtualSwarm[Any], name: str, step_s: float, config: SwarmConfig
    ) -> None:
        """Be ready to start; a step takes `step_s`."""
        self.simulation = simulation
        self.name = name
        self.step_s = step_s
        self.fragments = [torch.zeros(n) for n in simulation.manifest.fragment_elements]
        self.reports: list[RoundReport] = []
        self.training = True
        network = simulation.network
        self.service = build_service(
            config,
            simulation.manifest,
            MemoryTransport(network, name),
            MemoryDirectory(network, name, simulation.clock),
            InlineThread(),  # type: ignore[arg-type]
            simulation.clock,
            lambda: f"{simulation.random.getrandbits(32):08x}",
        )
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        """Lend a fragment."""
        yield self.fragments[index]

    async def start(self) -> None:
        """Found the run, if nobody else is there, or join it; then train."""
        store = self.service.context.mailbox.store
        first = len(self.simulation.peers) == 1
        if first:
            store.adopt_local(self)
        await self.service.start()
        if not first:
            for fragment in range(len(self.fragments)):
                anchor = await self.service.fetch(fragment, 30.0)
                self.fragments[fragment].copy_(anchor.values)
                store.place(fragment, anchor)
        self.service.set_training()
        self._task = asyncio.create_task(self._train())

    async def stop_abruptly(self) -> None:
        """Do nothing more."""
        self.training = False
        if self._task is not None:
            self._task.cancel()
        await self.service._tasks.cancel_all()

    def versions(self) -> list[int]:
        """Return those of the fragments; raises what a check in the trainer found wrong."""
        if self._task is not None and self._task.done():
            self._task.result()
        return [s.version for s in self.service.context.mailbox.store.stamps() if s is not None]

    def step(self) -> None:
        """Learn something: here random numbers, which are added up."""
        for fragment in self.fragments:
            fragment.add_(torch.rand(fragment.shape, generator=self._noise))

    async def _train(self) -> None:
        self._noise = torch.Generator().manual_seed(self.simulation.random.randrange(1 << 30))
        while True:
            await asyncio.sleep(self.step_s)
            if self.training:
                self.step()
            self.reports += self.service.context.mailbox.boundary(
                steps=int(self.training),
                tokens=_TOKENS_A_STEP if self.training else 0,
                tokens_per_s=_TOKENS_A_STEP / self.step_s,
                step_s=self.step_s,
                access=self,
            )

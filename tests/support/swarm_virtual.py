"""A whole swarm on a virtual clock: real services, a network in memory, trainers that are sums.

Every snapshot and every merge is recorded, so that a test can recompute each mean from what the
contributors had.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Merge, Part, Snapshot, joined_parts
from atomtrain.swarm.codecs.codec import Codec, codec_named, decode_span, encode_span
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.membership.config import Manifest
from atomtrain.swarm.membership.rules import Rules
from atomtrain.swarm.node.entering import build_service
from atomtrain.swarm.rounds.bases import stepped
from tests.support.memory_network import MemoryDirectory, MemoryNetwork, MemoryTransport
from tests.support.swarm_configs import swarm_config

ResultT = TypeVar("ResultT")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen any more"
            self.now_s += max(timeout, 0)
        return events


class _Timer(asyncio.TimerHandle):
    """One of several for the same moment: the one that was set first comes first.

    asyncio's own order among them is that of a heap, which also holds timers that were cancelled.
    """

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self._when, self.number) < (other._when, other.number)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds take no time, and on which everything has one order."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._numbers = itertools.count()
        super().__init__(self._jumping)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(work: Callable[[], Awaitable[ResultT]], loop: VirtualLoop | None = None) -> ResultT:
    """Run a coroutine on a virtual clock."""
    loop = loop or VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


class InlineThread:
    """Stands in for the network thread: everything on the one loop."""

    def post(self, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    async def offload(self, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return work(*args)


_BORN_S = 1e9


def _of_the_loop_s() -> float:
    return _BORN_S + asyncio.get_running_loop().time()


class Simulation:
    """Peers, their network, and a record of all that was averaged."""

    def __init__(
        self,
        elements: tuple[int, ...],
        seed: int,
        delay_s: float = 0.02,
        *,
        clock: Callable[[], float] | None = None,
        **rules: Any,
    ) -> None:
        """`clock`: the time that is the same for all peers, else the loop's.

        With that one everything that happens follows from the arguments and `seed`.
        """
        self.clock = clock or _of_the_loop_s
        self.random = random.Random(seed)
        self.network = MemoryNetwork(lambda: self.random.uniform(0, delay_s), stall_s=3.0)
        self.manifest = Manifest(
            "sim",
            elements,
            {},
            Rules(**{"wire": "float32", "local_steps_per_round": 4, "group_size": 0, **rules}),
            born_s=_BORN_S if clock is None else 0.0,
        )
        self.peers: dict[str, SimulatedPeer] = {}
        self.snapshots: dict[str, dict[str, Snapshot]] = defaultdict(dict)  # by round id, peer
        self.weights: dict[str, dict[str, int]] = {}  # by round id: what each member weighs
        self.merges: list[tuple[str, torch.Tensor, Merge]] = []  # peer, old anchor, merge

    async def add(
        self,
        name: str,
        step_s: float,
        step: Callable[[SimulatedPeer], None] | None = None,
        **config: Any,
    ) -> SimulatedPeer:
        """Start a peer; without `step` it adds a random vector per step."""
        peer = self.peers[name] = SimulatedPeer(self, name, step_s, step, **config)
        await peer.start()
        return peer

    async def kill(self, name: str) -> None:
        peer = self.peers.pop(name)
        self.network.cut(name, lossy=self.random.random() < 0.5)
        await peer.stop_abruptly()

    def check_means(self) -> int:
        """Recompute every averaged anchor from the contributors' snapshots; return how many."""
        checked = 0
        slices = self._slices()
        made: dict[str, set[str]] = defaultdict(set)
        for _, old, merge in self.merges:
            origin = merge.anchor.origin
            if merge.snapshot is None or not origin.round_id:
                continue
            everywhere = sum(part.span.elements for part in origin.parts) == old.numel()
            if everywhere or not merge.anchor.grouped:  # siblings keep what was not decided
                made[origin.round_id].add(merge.anchor.stamp.digest)
            assert merge.anchor.values.shape == old.shape
            expected = old.clone()
            parts = slices[origin.round_id, merge.anchor.stamp.digest]
            assert joined_parts(parts) == joined_parts(origin.parts)
            for span, contributors in parts:
                if not span.elements:
                    continue
                weights = self.weights[origin.round_id]
                taken = [
                    replace(self.snapshots[origin.round_id][peer], weight=weights[peer])
                    for peer in sorted(contributors)
                ]
                if merge.anchor.grouped:
                    unit = self._check_grouped(expected, span, taken, origin.round_id)
                else:
                    changes = {i: self._decoded(s.contribution(span)) for i, s in enumerate(taken)}
                    mean = self.manifest.rules.guard.mean_of(changes, [s.weight for s in taken])[0]
                    self._apply_outer(expected[span.start : span.stop], span, mean, taken)
                    # Random rounding moves a mean by less than one unit of its largest block.
                    unit = float(mean.abs().max()) * self._rounding(1 / 127)
                error = (merge.anchor.values - expected)[span.start : span.stop].abs()
                scale = 1 + expected[span.start : span.stop].abs()
                assert bool((error <= 1e-5 * scale + unit).all()), "a wrong mean"
            checked += 1
        assert all(len(digests) == 1 for digests in made.values()), "members committed differently"
        return checked

    def _slices(self) -> dict[tuple[str, str], tuple[Part, ...]]:
        """Return the parts that each anchor was made in, by its round and hash.

        Who fetches it is told neighbours as one; the wire encoded each for itself.
        """
        found: dict[tuple[str, str], tuple[Part, ...]] = {}
        for _, _, merge in self.merges:
            origin = merge.anchor.origin
            made = origin.round_id, merge.anchor.stamp.digest
            if len(origin.parts) >= len(found.get(made, ())):
                found[made] = origin.parts
        return found

    def _apply_outer(
        self, anchor: torch.Tensor, span: Span, mean: torch.Tensor, taken: list[Snapshot]
    ) -> None:
        """Move a span of an anchor by what the outer update makes of a mean."""
        update, old = self.manifest.rules.outer, taken[0].anchor
        velocity = torch.zeros_like(anchor) if update.rows else None
        if velocity is not None and old.velocity is not None:
            velocity = old.velocity[span.start : span.stop].clone()
        on_time = sum(s.weight for s in taken if not s.late) / sum(s.weight for s in taken)
        update.apply(anchor, mean, velocity, on_time)

    def _check_grouped(
        self, expected: torch.Tensor, span: Span, taken: list[Snapshot], round_id: str
    ) -> float:
        """Write what a group's mean should be; return how far low-bit wires may move it."""
        update = self.manifest.rules.outer
        led_to = [stepped(snapshot, update, span) for snapshot in taken]
        total = sum(s.weight for s in taken)
        expected[span.start : span.stop] = sum(
            y * (s.weight / total) for y, s in zip(led_to, taken, strict=True)
        )
        anchors = [s.anchor.values[slice(*span)] for s in self.snapshots[round_id].values()]
        farthest = max(float((y - a).abs().max()) for y in led_to for a in anchors)
        return farthest * self._rounding(1 / 6)

    def _rounding(self, low_bit: float) -> float:
        """Return by which share of the largest value the wire may change one."""
        return low_bit if self._codec.feedback else 0.0 if self._codec.exact else 1 / 500

    @property
    def _codec(self) -> Codec:
        return codec_named(self.manifest.rules.wire)

    def _decoded(self, contribution: torch.Tensor) -> torch.Tensor:
        """Return a contribution as its owner gets it."""
        out = torch.empty_like(contribution)
        decode_span(self._codec, encode_span(self._codec, contribution), out)
        return out

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


class SimulatedPeer:
    """One peer and its trainer."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        step_s: float,
        step: Callable[[SimulatedPeer], None] | None = None,
        **settings: Any,
    ) -> None:
        self._step = step
        self.simulation = simulation
        self.name = name
        self.step_s = step_s
        self.fragments = [torch.zeros(n) for n in simulation.manifest.fragment_elements]
        self.reports: list[Any] = []
        self.training = True
        config = swarm_config(
            run="sim", expiry_s=6.0, connect_s=2.0, stall_s=3.0, round_floor_s=2.0,
            slowest_link_bytes_per_s=1e4, **settings,
        )  # fmt: skip
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
        self._record()

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]

    async def start(self) -> None:
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
        self.training = False
        if self._task is not None:
            self._task.cancel()
        await self.service._tasks.cancel_all()

    def versions(self) -> list[int]:
        """Return those of the fragments; raises what a check in the trainer found wrong."""
        if self._task is not None and self._task.done():
            self._task.result()
        return [s.version for s in self.service.context.mailbox.store.stamps() if s is not None]

    async def _train(self) -> None:
        noise = torch.Generator().manual_seed(self.simulation.random.randrange(1 << 30))
        while True:
            await asyncio.sleep(self.step_s)
            if self.training and self._step is not None:
                self._step(self)
            elif self.training:
                for fragment in self.fragments:
                    fragment.add_(torch.rand(fragment.shape, generator=noise))
            self.reports += self.service.context.mailbox.boundary(
                steps=int(self.training),
                tokens=10 if self.training else 0,
                tokens_per_s=10 / self.step_s,
                step_s=self.step_s,
                access=self,
            )

    def _record(self) -> None:
        store = self.service.context.mailbox.store
        take, merge_into = store.snapshot, store.merge

        def snapshot(fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
            taken = take(fragment, local, into)
            round_id = self.service.context.agenda.running
            assert round_id is not None
            kept = replace(taken, values=taken.values.clone())  # its memory is used again
            self.simulation.snapshots[round_id][self.name] = kept
            return taken

        def merge(what: Merge, local: torch.Tensor) -> None:
            old = store.anchor(what.fragment)
            for one in self.service._rounds.groups():
                self.simulation.weights[one.invite.round_id] = dict(
                    zip(one.begin.members, one.begin.weights, strict=True)
                )
            assert what.anchor.stamp.beats(old.stamp), "an anchor must never go back"
            expected = _pending(store, what.fragment, local)
            if what.snapshot is not None:
                for span in what.contributed:
                    expected[span.start : span.stop] -= _applied(what, span)
            merge_into(what, local)
            # Nothing is lost, nothing counts twice: only what the anchor took is gone.
            pending = _pending(store, what.fragment, local)
            if what.restart:
                assert not pending.any()
                expected = pending
            torch.testing.assert_close(pending, expected, rtol=1e-4, atol=1e-3)
            self.simulation.merges.append((self.name, old.values, what))

        store.snapshot = snapshot  # type: ignore[method-assign]
        store.merge = merge  # type: ignore[method-assign]


def _pending(store: AnchorStore, fragment: int, local: torch.Tensor) -> torch.Tensor:
    """Return what a peer has learnt and no anchor contains."""
    pending = local - store.anchor(fragment).values
    residual = store.residual(fragment)
    return pending if residual is None else pending + residual


def _applied(merge: Merge, span: Span) -> torch.Tensor:
    """Return what of a peer's learning is in the new anchor."""
    snapshot = merge.snapshot
    assert snapshot is not None
    if merge.anchor.values is snapshot.values:  # alone: no codec, no residual
        return (snapshot.values - snapshot.anchor.values)[span.start : span.stop]
    contribution = snapshot.contribution(span)
    return contribution if snapshot.lost is None else contribution - snapshot.lost[slice(*span)]

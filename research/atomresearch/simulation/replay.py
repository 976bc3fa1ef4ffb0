"""A step of a pipeline in given orders, on ranks that share processor cores.

`pipeline` finds the orders, and has a core for each rank. Where processes are more than cores, an
operating system shares the cores evenly among those that compute, so each slows down while more
than `cores` of them do, and has a core to itself while the others wait for the network.

A rank in the middle of a chain has a connection to each neighbour. What is sent over both at once
shares its link, as TCP's connections do, so that neither message arrives as soon as it would if
they followed each other: that costs a step with few micro-batches in flight, which waits for each
of them, and next to nothing where more are in flight than the links hold. (`pipeline` has one
follow the other; its orders are as good.) What has left waits in front of the target's link.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence

from atomresearch.simulation.link import Lanes, PipelineLink, mean_step_s
from atomresearch.simulation.pipeline import Op, PipelineWork
from atomtrain.errors import ConfigError

_PIECES = 16
"""Of a message, in which connections take turns: with more the result is the same within 1%."""


def replay(
    work: PipelineWork, link: PipelineLink, orders: Sequence[Sequence[Op]], cores: float
) -> float:
    """Return the seconds of a step in which every rank keeps to its order.

    With BBR where packets get lost it is the mean of several steps over the same connections.

    Args:
        work: Times of operations on a core of their own; `in_flight` counts for nothing, the orders
            say how much is.
        link: As for `simulate_step`.
        orders: Each rank's operations, such as `simulate_step` returns them.
        cores: That the ranks share; above 0. With several pipelines alike side by side: the share
            of one of them.

    Raises:
        ConfigError: no cores, or not an order for each rank.
    """
    if cores <= 0 or len(orders) != work.ranks:
        raise ConfigError(
            f"{len(orders)} orders for {work.ranks} ranks on {cores:g} cores; give one for each "
            "rank, and more than 0 cores"
        )
    return mean_step_s(_Replay(work, link, orders, cores).run, link)


class _Replay:
    def __init__(
        self, work: PipelineWork, link: PipelineLink, orders: Sequence[Sequence[Op]], cores: float
    ) -> None:
        self.work, self.orders, self.cores = work, orders, cores
        self.lanes = Lanes(work.ranks, link)
        self.last = len(work.forward_s) - 1
        # Between two ranks a link carries one connection; with losses, connections know messages.
        whole = work.ranks <= 2 or bool(link.loss_share)
        self.piece_bytes = work.boundary_bytes / (1 if whole else _PIECES)
        self.now_s = 0.0
        self.place: list[int] = []
        self.left_s: list[float | None] = [None] * work.ranks
        """Of each rank's running operation, on a core of its own; `None`: it waits."""
        self.ready: set[Op] = set()
        self.queues: dict[tuple[int, int], deque[tuple[Op, float]]] = defaultdict(deque)
        """Of each connection: what its messages make possible, and what is left of them to send."""
        self.served: dict[tuple[int, int], int] = defaultdict(int)
        """When each connection had its turn last, counted in pieces."""
        self.pieces = 0
        self.arrivals: list[tuple[float, Op]] = []
        self.sent: list[float] = []
        """When transfers end: a link is free then."""

    def run(self) -> float:
        """Run one more step; return when it ends."""
        self.place = [0] * self.work.ranks
        self.ready = {Op(False, 0, index) for index in range(self.work.micro_batches)}
        left = sum(len(order) for order in self.orders)
        while left:
            self._begin()
            self._send()
            left -= self._pass()
        return self.now_s

    def _begin(self) -> None:
        for rank, order in enumerate(self.orders):
            if self.left_s[rank] is None and self.place[rank] < len(order):
                op = order[self.place[rank]]
                if op in self.ready:
                    times_s = self.work.backward_s if op.backward else self.work.forward_s
                    self.left_s[rank] = times_s[op.chunk]

    def _send(self) -> None:
        """Start what the senders' links are free for, in turns of their connections."""
        for source, target in sorted(self.queues, key=lambda pair: self.served[pair]):
            waiting = self.queues[source, target]
            while waiting and self.lanes.up_free_s(source) <= self.now_s:
                op, left_bytes = waiting[0]
                piece_bytes = min(self.piece_bytes, left_bytes)
                sent = self.lanes.send_piece(source, target, piece_bytes, self.now_s)
                self.pieces += 1
                self.served[source, target] = self.pieces
                heapq.heappush(self.sent, sent.left_s)
                if left_bytes > piece_bytes:
                    waiting[0] = op, left_bytes - piece_bytes
                else:
                    waiting.popleft()
                    heapq.heappush(self.arrivals, (sent.arrived_s, op))

    def _pass(self) -> int:
        """Let time pass until something ends; return how many operations did."""
        running = [rank for rank, left_s in enumerate(self.left_s) if left_s is not None]
        speed = min(1.0, self.cores / len(running)) if running else 1.0
        least_s = min((left_s for left_s in self.left_s if left_s is not None), default=math.inf)
        network_s = min(
            self.sent[0] if self.sent else math.inf,
            self.arrivals[0][0] if self.arrivals else math.inf,
        )
        if self.now_s + least_s / speed <= network_s:
            # Not by way of the clock, whose rounding would leave crumbs of an operation.
            passed_s = least_s
            self.now_s += least_s / speed
        else:
            passed_s, self.now_s = (network_s - self.now_s) * speed, network_s
        assert math.isfinite(self.now_s), "ranks wait for each other"
        ended = 0
        for rank in running:
            left_s = self.left_s[rank]
            assert left_s is not None
            self.left_s[rank] = left_s - passed_s
            if left_s <= passed_s:
                self.left_s[rank] = None
                self._end(rank)
                ended += 1
        while self.sent and self.sent[0] <= self.now_s:
            heapq.heappop(self.sent)
        while self.arrivals and self.arrivals[0][0] <= self.now_s:
            self.ready.add(heapq.heappop(self.arrivals)[1])
        return ended

    def _end(self, rank: int) -> None:
        op = self.orders[rank][self.place[rank]]
        self.place[rank] += 1
        if not op.backward and op.chunk == self.last:
            self.ready.add(Op(True, op.chunk, op.micro_batch))
        elif not op.backward or op.chunk > 0:
            after = Op(op.backward, op.chunk + (-1 if op.backward else 1), op.micro_batch)
            target = after.chunk % self.work.ranks
            if target == rank:
                self.ready.add(after)
            else:
                self.queues[rank, target].append((after, float(self.work.boundary_bytes)))

"""One step of a pipeline over links, event by event: the order of its operations and their times.

The same function plans the order that real stages follow and predicts how long they take.

Words: a *chunk* is a run of layers; rank r holds chunks r, r + K, r + 2K, ... of K ranks. An
operation is the forward or the backward of one chunk for one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atomresearch.simulation.link import Lanes, PipelineLink
from atomtrain.errors import ConfigError


class Op(NamedTuple):
    """One operation."""

    backward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """What a step consists of."""

    ranks: int
    """At least 1."""
    forward_s: Sequence[float]
    """Seconds of each chunk's forward for one micro-batch; a multiple of `ranks` chunks."""
    backward_s: Sequence[float]
    """As `forward_s`."""
    micro_batches: int
    """Micro-batches in a step; at least 1."""
    in_flight: int
    """Micro-batches between the start of their first forward and the end of their last backward,
    at most; `ranks` is what 1F1B has, `micro_batches` is GPipe's."""
    boundary_bytes: int
    """Bytes of one micro-batch between two chunks, each way."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that do not fit each other."""
        chunks = len(self.forward_s)
        if self.ranks < 1 or chunks == 0 or chunks % self.ranks or chunks != len(self.backward_s):
            raise ConfigError(
                f"{chunks} forward and {len(self.backward_s)} backward times for {self.ranks} "
                "ranks; give both for each chunk, and as many chunks on every rank"
            )
        if self.micro_batches < 1 or self.in_flight < 1:
            raise ConfigError(
                f"{self.micro_batches} micro-batches with {self.in_flight} in flight; both must be "
                "at least 1"
            )


class PipelineStep(NamedTuple):
    """What comes of a step."""

    orders: list[list[Op]]
    """Each rank's operations, in order."""
    step_s: float
    """From the first start to the last end."""
    busy_s: list[float]
    """Seconds that each rank computes."""


def simulate_step(work: PipelineWork, link: PipelineLink) -> PipelineStep:
    """Run a step by list scheduling: backward first, then deeper chunks, then older micro-batches.

    Transfers overlap computation; those that share a direction of a rank's link follow each other.
    The orders cannot deadlock, whatever the real times: they are those of a run that ended.
    """
    return _Run(work, link).run()


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return `parts + 1` bounds of contiguous, non-empty parts whose largest cost is least."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    for part in range(parts):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (worst, bounds) in best[-1].items():
            for stop in range(start + 1, count - (parts - part - 1) + 1):
                value = max(worst, sums[stop] - sums[start])
                if stop not in after or value < after[stop][0]:
                    after[stop] = value, [*bounds, stop]
        best.append(after)
    return best[-1][count][1]


class _Transfer(NamedTuple):
    ready_s: float
    source: int
    target: int
    op: Op
    """What it makes possible."""


class _Run:
    def __init__(self, work: PipelineWork, link: PipelineLink) -> None:
        self.work, self.lanes = work, Lanes(work.ranks, link)
        self.last = len(work.forward_s) - 1
        self.orders: list[list[Op]] = [[] for _ in range(work.ranks)]
        self.free_s = [0.0] * work.ranks
        self.busy_s = [0.0] * work.ranks
        self.waiting: list[dict[Op, float]] = [{} for _ in range(work.ranks)]
        """Each rank's operations whose inputs will have arrived, and when."""
        self.transfers: list[_Transfer] = []
        self.entered = 0
        self.active = [0] * work.ranks
        """Micro-batches whose forward has run on a rank and whose backward has not."""
        self.most_active = [work.in_flight * len(work.forward_s)] * work.ranks
        if len(work.forward_s) == work.ranks:
            # Later ranks keep fewer, as in 1F1B: the more ahead, the later its first backward.
            left = range(work.ranks, 0, -1)
            self.most_active = [-(-work.in_flight * n // work.ranks) for n in left]

    def run(self) -> PipelineStep:
        for _ in range(min(self.work.in_flight, self.work.micro_batches)):
            self._enter(0.0)
        left = 2 * self.work.micro_batches * (self.last + 1)
        # Whatever starts next, operation or transfer, so that nothing starts in another's past.
        while left:
            transfer, sends_s = self._next_transfer()
            rank, op, start_s = self._next()
            if transfer is not None and sends_s <= start_s:
                self._send(transfer, sends_s)
            else:
                assert op is not None, "operations are left, but none can ever start"
                del self.waiting[rank][op]
                self._finish(rank, op, start_s)
                left -= 1
        return PipelineStep(self.orders, max(self.free_s), self.busy_s)

    def _enter(self, now_s: float) -> None:
        if self.entered < self.work.micro_batches:
            self.waiting[0][Op(False, 0, self.entered)] = now_s
            self.entered += 1

    def _next(self) -> tuple[int, Op | None, float]:
        best: tuple[tuple[float, bool, int, int], int, Op | None] = (
            (math.inf, True, 0, 0),
            0,
            None,
        )
        for rank, waiting in enumerate(self.waiting):
            full = self.active[rank] >= self.most_active[rank]
            for op, ready_s in waiting.items():
                if full and not op.backward:
                    continue
                start_s = max(ready_s, self.free_s[rank])
                key = (start_s, not op.backward, -op.chunk, op.micro_batch)
                if key < best[0]:
                    best = key, rank, op
        return best[1], best[2], best[0][0]

    def _next_transfer(self) -> tuple[_Transfer | None, float]:
        best: tuple[_Transfer | None, float] = None, math.inf
        for transfer in self.transfers:
            start_s = max(transfer.ready_s, self.lanes.free_s(transfer.source, transfer.target))
            if start_s < best[1]:
                best = transfer, start_s
        return best

    def _finish(self, rank: int, op: Op, start_s: float) -> None:
        duration_s = (self.work.backward_s if op.backward else self.work.forward_s)[op.chunk]
        end_s = start_s + duration_s
        self.free_s[rank] = end_s
        self.busy_s[rank] += duration_s
        self.orders[rank].append(op)
        self.active[rank] += -1 if op.backward else 1
        if not op.backward and op.chunk == self.last:
            self.waiting[rank][Op(True, op.chunk, op.micro_batch)] = end_s
        elif op.backward and op.chunk == 0:
            self._enter(end_s)
        else:
            chunk = op.chunk + (-1 if op.backward else 1)
            target = chunk % self.work.ranks
            after = Op(op.backward, chunk, op.micro_batch)
            if target == rank:
                self.waiting[rank][after] = end_s
            else:
                self.transfers.append(_Transfer(end_s, rank, target, after))

    def _send(self, transfer: _Transfer, start_s: float) -> None:
        self.transfers.remove(transfer)
        sent = self.lanes.send(transfer.source, transfer.target, self.work.boundary_bytes, start_s)
        self.waiting[transfer.target][transfer.op] = sent.arrived_s

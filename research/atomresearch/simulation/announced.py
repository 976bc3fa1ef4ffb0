"""A step of PyTorch's 1F1B over Gloo, event by event: ranks that wait for their transfers.

`pipeline` simulates ranks whose transfers never stop them. Here a rank does one thing after the
other: it computes, or it hands over sends and receives and waits for all of them. And Gloo sends
nothing before the other side has announced that it receives, so an announcement goes the other way
first, behind all data that is queued on its link already. On slow links that is what halves the
schedule's rate: the announcement of a backward follows the activations that go forward.

Interleaved 1F1B has several chunks a rank. The order of a rank's operations is that of Narayanan et
al. 2021 (arXiv 2104.04473, section 2.2) as `torch.distributed.pipelining.ScheduleInterleaved1F1B`
has it; what a transfer waits for is that of 1F1B. Here a rank waits only for what it receives, when
it needs it: sends run by themselves until the step ends. Receives are posted in the order in which
the senders send, each as early as a turn of all ranks allows, so that no two ranks wait for each
other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atomresearch.simulation.link import Lanes, PipelineLink, mean_step_s
from atomresearch.simulation.pipeline import Op
from atomtrain.errors import ConfigError

_ANNOUNCEMENT_BYTES = 120
"""48 of Gloo's header, the rest those of TCP, IP and Ethernet."""


class Action(NamedTuple):
    """What a rank does before it goes on: compute, then hand over and wait."""

    compute_s: float = 0.0
    sends: tuple[Op, ...] = ()
    """What they make possible at their receivers."""
    receives: tuple[Op, ...] = ()
    awaits: tuple[Op, ...] = ()
    """Of the sends and receives handed over so far."""


@dataclass(frozen=True, kw_only=True)
class AnnouncedWork:
    """What a step consists of."""

    forward_s: Sequence[float]
    """Seconds of each chunk's forward for one micro-batch."""
    backward_s: Sequence[float]
    micro_batches: int
    boundary_bytes: int
    """Bytes of one micro-batch between two chunks, each way."""


def simulate_1f1b(work: AnnouncedWork, link: PipelineLink) -> float:
    """Return the seconds of a step: from the first start to the last end."""
    ranks = range(len(work.forward_s))
    return run_programs([actions_1f1b(work, rank) for rank in ranks], work.boundary_bytes, link)


def run_programs(
    programs: Sequence[Sequence[Action]], boundary_bytes: int, link: PipelineLink
) -> float:
    """Return the seconds until all ranks have done what their programs say; rank r holds chunks
    r, r + K, ... of K ranks."""
    return mean_step_s(_Run(programs, boundary_bytes, link).run, link)


def actions_1f1b(work: AnnouncedWork, rank: int) -> list[Action]:
    """Return what a rank does, in the order of `torch.distributed.pipelining.Schedule1F1B`.

    Forwards until the pipeline is full; then backward and forward in turns, each exchanged in one
    go with what the other produced; then the backwards that are left.
    """
    count, last = work.micro_batches, len(work.forward_s) - 1

    def into_forward(index: int) -> tuple[Op, ...]:
        return (Op(False, rank, index),) if rank > 0 else ()

    def into_backward(index: int) -> tuple[Op, ...]:
        return (Op(True, rank, index),) if rank < last else ()

    def from_forward(index: int) -> tuple[Op, ...]:
        return (Op(False, rank + 1, index),) if rank < last else ()

    def from_backward(index: int) -> tuple[Op, ...]:
        return (Op(True, rank - 1, index),) if rank > 0 else ()

    def together(sends: tuple[Op, ...], receives: tuple[Op, ...]) -> Action:
        return Action(sends=sends, receives=receives, awaits=sends + receives)

    forward, backward = Action(work.forward_s[rank]), Action(work.backward_s[rank])
    ahead = min(count, last + 1 - rank)
    actions: list[Action] = []
    for index in range(ahead):
        actions += [together((), into_forward(index)), forward]
        if index > 0:
            actions.append(Action(awaits=from_forward(index - 1)))
        if index < ahead - 1:
            actions.append(Action(sends=from_forward(index)))
    forwards = ahead
    for index in range(count):
        sends = from_forward(forwards - 1) if index <= count - ahead else ()
        actions += [together(sends, into_backward(index)), backward]
        if forwards < count:
            actions += [together(from_backward(index), into_forward(forwards)), forward]
            forwards += 1
        else:
            if index > count - ahead:
                actions.append(Action(awaits=from_backward(index - 1)))
            actions.append(Action(sends=from_backward(index)))
    return [*actions, Action(awaits=from_backward(count - 1))]


class _Run:
    def __init__(
        self, programs: Sequence[Sequence[Action]], boundary_bytes: int, link: PipelineLink
    ) -> None:
        self.programs, self.boundary_bytes = programs, boundary_bytes
        self.lanes = Lanes(len(programs), link)
        self.place: list[int] = []
        self.posted: set[Op] = set()
        self.announced: set[Op] = set()
        self.sent: set[Op] = set()
        self.arrived: set[Op] = set()
        self.awaited: list[set[Op]] = [set() for _ in programs]
        self.events: list[tuple[float, int, str, int, Op | None]] = []
        self.made = 0
        self.end_s = 0.0

    def run(self) -> float:
        """Run one more step; return when it ends."""
        self.place = [0] * len(self.programs)
        for known in (self.posted, self.announced, self.sent, self.arrived):
            known.clear()
        for rank in range(len(self.programs)):
            self._later(self.end_s, "go", rank)
        while self.events:
            now_s, _, what, rank, op = heapq.heappop(self.events)
            if what == "go":
                self._go(rank, now_s)
            elif what == "announced":
                assert op is not None
                self.announced.add(op)
                self._start(op, now_s)
            else:
                assert op is not None
                self.arrived.add(op)
                self._wake(rank, op, now_s)
        assert all(
            place == len(program) for place, program in zip(self.place, self.programs, strict=True)
        ), "ranks wait for each other"
        return self.end_s

    def _later(self, at_s: float, what: str, rank: int, op: Op | None = None) -> None:
        self.made += 1  # what is due at the same time comes in the order in which it was made
        heapq.heappush(self.events, (at_s, self.made, what, rank, op))

    def _go(self, rank: int, now_s: float) -> None:
        """Go on until something takes time."""
        program = self.programs[rank]
        while self.place[rank] < len(program):
            action = program[self.place[rank]]
            self.place[rank] += 1
            for op in action.sends:
                self.posted.add(op)
                self._start(op, now_s)
            for op in action.receives:
                self._announce(op, now_s)
            waiting = {op for op in action.awaits if not self._done(rank, op)}
            self.awaited[rank] = waiting
            if waiting:
                return
            if action.compute_s > 0:
                self._later(now_s + action.compute_s, "go", rank)
                return
        self.end_s = max(self.end_s, now_s)

    def _done(self, rank: int, op: Op) -> bool:
        return op in (self.arrived if self._receiver(op) == rank else self.sent)

    def _receiver(self, op: Op) -> int:
        return op.chunk % len(self.programs)

    def _sender(self, op: Op) -> int:
        return (op.chunk + (1 if op.backward else -1)) % len(self.programs)

    def _wake(self, rank: int, op: Op, now_s: float) -> None:
        if op in self.awaited[rank]:
            self.awaited[rank].discard(op)
            if not self.awaited[rank]:
                self._go(rank, now_s)

    def _announce(self, op: Op, now_s: float) -> None:
        """Tell the sender, over the receiver's own link, that it may send."""
        rank, sender = self._receiver(op), self._sender(op)
        told = self.lanes.send(rank, sender, _ANNOUNCEMENT_BYTES, now_s)
        self._later(told.arrived_s, "announced", sender, op)

    def _start(self, op: Op, now_s: float) -> None:
        """Send what is posted and announced; the sender need not wait for the wire."""
        if op not in self.posted or op not in self.announced or op in self.sent:
            return
        sender, receiver = self._sender(op), self._receiver(op)
        sent = self.lanes.send(sender, receiver, self.boundary_bytes, now_s)
        self.sent.add(op)
        self._later(sent.arrived_s, "arrived", receiver, op)
        self._wake(sender, op, now_s)


class _Posted(NamedTuple):
    """A receive's place among a rank's operations."""

    op: Op


def simulate_interleaved(work: AnnouncedWork, ranks: int, link: PipelineLink) -> float:
    """Return the seconds of a step, of chunk c on rank c mod `ranks`.

    Raises:
        ConfigError: chunks or micro-batches that do not spread over the ranks.
    """
    return run_programs(actions_interleaved(work, ranks), work.boundary_bytes, link)


def actions_interleaved(work: AnnouncedWork, ranks: int) -> list[list[Action]]:
    """Return what each rank does, in order; see `simulate_interleaved`."""
    last = len(work.forward_s) - 1
    programs: list[list[Action]] = []
    for order in _with_receives(operations(len(work.forward_s), ranks, work.micro_batches), ranks):
        actions: list[Action] = []
        sent: list[Op] = []
        received: set[Op] = set()
        for item in order:
            if isinstance(item, _Posted):
                actions.append(Action(receives=(item.op,)))
                received.add(item.op)
                continue
            if item in received:
                actions.append(Action(awaits=(item,)))
            took_s = (work.backward_s if item.backward else work.forward_s)[item.chunk]
            actions.append(Action(took_s))
            after = _after(item, last)
            if after is not None and after.chunk % ranks != item.chunk % ranks:
                actions.append(Action(sends=(after,)))
                sent.append(after)
        programs.append([*actions, Action(awaits=tuple(sent))])
    return programs


def operations(chunks: int, ranks: int, micro_batches: int) -> list[list[Op]]:
    """Return each rank's operations: forwards until the pipeline is full, both in turns, backwards.

    Raises:
        ConfigError: chunks or micro-batches that do not spread over the ranks.
    """
    turns = max(1, micro_batches // ranks)
    if chunks % ranks or micro_batches % turns:
        raise ConfigError(
            f"{chunks} chunks and {micro_batches} micro-batches for {ranks} ranks; give as many "
            "chunks to each rank, and micro-batches in whole turns of all ranks"
        )
    each, turn = chunks // ranks, micro_batches // turns
    total = each * micro_batches

    def place(number: int) -> tuple[int, int]:
        """Return the chunk of a rank's own, and the micro-batch, of its `number`-th operation."""
        return number // turn % each, number // (turn * each) * turn + number % turn

    orders = []
    for rank in range(ranks):
        ahead = min((each - 1) * turn + 2 * (ranks - 1 - rank), total)
        order: list[Op] = []
        for step in range(total + ahead):
            if step < total:
                local, index = place(step)
                order.append(Op(False, local * ranks + rank, index))
            if step >= ahead:
                local, index = place(step - ahead)
                order.append(Op(True, (each - 1 - local) * ranks + rank, index))
        orders.append(order)
    return orders


def _with_receives(orders: Sequence[Sequence[Op]], ranks: int) -> list[list[Op | _Posted]]:
    """Return the orders with receives put where a turn of all ranks brings them about."""
    last = max(op.chunk for order in orders for op in order)
    found: list[list[Op | _Posted]] = [[] for _ in orders]
    ready: set[Op] = {op for order in orders for op in order if op.chunk == 0 and not op.backward}
    done = [0] * ranks
    while any(place < len(order) for place, order in zip(done, orders, strict=True)):
        before = list(done)
        for rank, order in enumerate(orders):
            if done[rank] == len(order) or order[done[rank]] not in ready:
                continue
            op = order[done[rank]]
            found[rank].append(op)
            done[rank] += 1
            after = _after(op, last)
            if after is not None:
                ready.add(after)
                if after.chunk % ranks != rank:
                    found[after.chunk % ranks].append(_Posted(after))
            elif not op.backward:
                ready.add(Op(True, last, op.micro_batch))
        assert done != before, "ranks wait for each other"
    return found


def _after(op: Op, last: int) -> Op | None:
    """Return what an operation makes possible on another chunk."""
    chunk = op.chunk + (-1 if op.backward else 1)
    return Op(op.backward, chunk, op.micro_batch) if 0 <= chunk <= last else None

"""A step of PyTorch's interleaved 1F1B over Gloo: several chunks a rank, transfers announced.

The order of a rank's operations is that of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2)
as `torch.distributed.pipelining.ScheduleInterleaved1F1B` has it; what a transfer waits for is that
of `announced`. Here a rank waits only for what it receives, when it needs it: sends run by
themselves until the step ends. Receives are posted in the order in which the senders send, each as
early as a turn of all ranks allows, so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atomresearch.simulation.announced import Action, AnnouncedWork, run_programs
from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline import Op
from atomtrain.errors import ConfigError


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

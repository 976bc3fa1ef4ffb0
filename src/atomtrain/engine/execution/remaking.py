"""How a layer's backward makes a saved storage again: a list of operations, found out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from atomtrain.analysis.costs.rematerialization import (
    RematerializedOperation,
    Standing,
    Step,
    replaced,
)
from atomtrain.analysis.costs.storages import View, seen_as
from atomtrain.analysis.layers.direct_calls import direct


class Run(Protocol):
    """One run of a layer, which has what is made from."""

    def place(self, number: int) -> Tensor:
        """Return a parameter in the slot."""
        ...

    def storage_as(self, number: int, view: View) -> Tensor:
        """Return a view of a storage."""
        ...


class InSlot(NamedTuple):
    """A parameter in the segment's slot, by the number of its place."""

    place: int

    def of(self, run: Run, _registers: Sequence[Any]) -> Any:
        """Return it."""
        return run.place(self.place)


class Argument(NamedTuple):
    """A saved tensor, by the number of its storage."""

    number: int
    view: View

    def of(self, run: Run, _registers: Sequence[Any]) -> Any:
        """Return it."""
        return run.storage_as(self.number, self.view)


class _Register(NamedTuple):
    """What an earlier operation made."""

    register: int
    view: View

    def of(self, _run: Run, registers: Sequence[Any]) -> Any:
        """Return it."""
        return seen_as(registers[self.register], self.view)


class _Constant(NamedTuple):
    """What is always the same."""

    value: Any

    def of(self, _run: Run, _registers: Sequence[Any]) -> Any:
        """Return it."""
        return self.value


_VALUES = (InSlot, Argument, _Register, _Constant)


class _Call(NamedTuple):
    """One operation of a plan."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    nested: bool
    """Whether there are tensors in lists, or by name."""
    several: bool
    """Whether it has several results."""
    results: Sequence[tuple[int, int]]
    """Of each that is used: its position and register."""
    storages: Sequence[tuple[int, int]]
    """Of each that is a saved storage: its number and register."""
    spent: Sequence[int]
    """Registers that nobody reads any more."""

    def do(self, run: Run, registers: list[Any]) -> None:
        """Do the operation."""
        if self.nested:
            args, kwargs = replaced(
                (self.args, self.kwargs), lambda value: value.of(run, registers), _VALUES
            )
            made = self.function(*args, **kwargs)
        else:
            made = self.function(*[v.of(run, registers) for v in self.args], **self.kwargs)
        for position, register in self.results:
            registers[register] = made[position] if self.several else made


class Plan:
    """Operations that lead to a storage."""

    def __init__(self, calls: Sequence[_Call], registers: int) -> None:
        self._calls, self._registers = calls, registers

    def run(self, run: Run) -> Iterator[tuple[int, Tensor]]:
        """Do the operations; yield each storage that they make, with its number."""
        registers: list[Any] = [None] * self._registers
        for call in self._calls:
            call.do(run, registers)
            for number, register in call.storages:
                yield number, registers[register]
            for register in call.spent:
                registers[register] = None


_Result = tuple[RematerializedOperation, int]


def planned(made: Mapping[int, _Result], number: int, there: int) -> Plan:
    """Return how to make a storage.

    Each operation is done once, however many ways lead from it, and what it made is let go of
    after its last use.

    Args:
        made: What makes each storage that is made again, by number; arguments are of this module.
        number: Which one.
        there: Those that have been made already, a bit each.
    """
    number_of = {result: one for one, result in made.items()}

    def is_there(result: _Result) -> bool:
        return result in number_of and bool(there >> number_of[result] & 1)

    order: dict[RematerializedOperation, None] = {}

    def add(operation: RematerializedOperation) -> None:
        for step in operation.steps:
            if not is_there(step.result) and step.operation not in order:
                add(step.operation)
        order[operation] = None

    add(made[number][0])
    last: dict[_Result, RematerializedOperation] = {}
    for operation in order:
        for step in operation.steps:
            last[step.result] = operation
    registers: dict[_Result, int] = {}

    def value(packed: Any) -> Any:
        if not isinstance(packed, Step):
            return packed if isinstance(packed, InSlot | Argument) else _Constant(packed)
        if is_there(packed.result):
            return Argument(number_of[packed.result], packed.view)
        return _Register(registers[packed.result], packed.view)

    calls = []
    for operation in order:
        args: Any
        if operation.nested:
            args, kwargs = replaced((operation.args, operation.kwargs), value, Standing)
        else:
            args = [
                value(one.packed) if type(one) is Standing else _Constant(one)
                for one in operation.args
            ]
            kwargs = operation.kwargs
        spent = [registers[r] for r, user in last.items() if user is operation and r in registers]
        mine = [r for r in dict.fromkeys([*last, *number_of]) if r[0] is operation]
        for result in mine:
            registers[result] = len(registers)
            if result not in last:
                spent.append(registers[result])
        calls.append(
            _Call(
                function=direct(operation.func),
                args=args,
                kwargs=kwargs,
                nested=operation.nested,
                several=operation.several,
                results=[(result[1], registers[result]) for result in mine],
                storages=[(number_of[r], registers[r]) for r in mine if r in number_of],
                spent=spent,
            )
        )
    return Plan(calls, len(registers))

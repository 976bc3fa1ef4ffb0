"""What a run by a program sends to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Layer
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.execution.offload import Offload
from atomtrain.engine.execution.program_runs import Known, OffloadedRun, ProgramRun, SegmentRun
from atomtrain.engine.execution.programs import LayerProgram, like, program_of
from atomtrain.engine.state.gradients import Collector


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(1 << 30, 1e12)
    yield device
    device.close()


def known_of(program: LayerProgram, reads: tuple[str, ...], strides: tuple[int, ...]) -> Known:
    layer = Layer("layer", nn.Identity(), reads, ("result",))
    return Known(layer, program, "result", strides, dict.fromkeys(reads, strides), (), {})


def test_values_in_one_storage_are_sent_once(device: EmulatedDevice) -> None:
    """As the sines and cosines that all blocks read."""
    offload = Offload(device, pool := HostPool(device), 1 << 20)
    table = torch.randn(2, 100)
    value = torch.randn(100)

    def run(given: Sequence[Any]) -> Sequence[Any]:
        return ((given[0] * given[1]).sin() * given[2],)

    given = [value, table[0], table[1]]
    reads = [like(one, requires_grad=one is value) for one in given]
    program = program_of(run, [], reads, like(value, requires_grad=False), 0, remakes=True)
    assert program is not None
    with device.computing():
        parcel = offload.parcel(alone=True)
        known = known_of(program, ("value", "sine", "cosine"), (1,))
        one = OffloadedRun(known, [], Collector(device.hold), parcel)
        with torch.no_grad():
            one.forward(given)
            offload.turn([parcel])
            gradients = one.backward([], [torch.ones(100)])
        parcel.close()
        offload.drain()
    assert pool.total_bytes == value.nbytes + table.nbytes
    leaf = value.clone().requires_grad_()
    run([leaf, *given[1:]])[0].sum().backward()
    assert leaf.grad is not None
    assert torch.equal(gradients["value"], leaf.grad)


@pytest.mark.parametrize("other", [torch.empty((), device="meta"), torch.empty(3, 0)])
def test_what_has_no_place_on_the_host_is_kept(device: EmulatedDevice, other: Tensor) -> None:
    """As the seed of a mask, which attention leaves on the host."""
    offload = Offload(device, pool := HostPool(device), 1 << 20)
    found: list[Tensor] = []

    def forward(run: ProgramRun, value: Tensor) -> Sequence[Tensor]:
        run.send(0, value)
        run.send(1, other)
        return (value,)

    def backward(run: ProgramRun) -> Sequence[Tensor]:
        found.extend([run.take(1), run.take(0)])
        run.done(1)
        run.done(0)
        return (run.gradient(),)

    with device.computing():
        value = torch.randn(100)
        parcel = offload.parcel(alone=True)
        known = known_of(
            LayerProgram(tuple, forward, forward, backward, (0, 1), 1), ("value",), (1,)
        )
        run = OffloadedRun(known, [], Collector(device.hold), parcel)
        run.forward([value])
        offload.turn([parcel])
        run.backward([], [torch.ones(100)])
        parcel.close()
        offload.drain()
    assert pool.total_bytes == value.nbytes
    assert found[0] is other
    assert torch.equal(found[1], value)


def test_again_leaves_out_what_the_last_layer_writes() -> None:
    """The layers before it write what the next one reads."""

    def twice(given: Sequence[Any]) -> Sequence[Any]:
        return (given[0].sin() * 2,)

    value, gradient = torch.randn(100), torch.ones(100)
    program = program_of(
        twice, [], [like(value, requires_grad=True)], like(gradient, requires_grad=False), 0,
        remakes=False,
    )  # fmt: skip
    assert program is not None
    first = known_of(program, ("value",), (1,))._replace(root="between")
    first = first._replace(layer=Layer("first", nn.Identity(), ("value",), ("between",)))
    last = known_of(program, ("between",), (1,))
    run = SegmentRun([first, last], [[], []], None, Collector(lambda _: None), again=True)
    [between] = run.layer([value])
    assert torch.equal(between, value.sin() * 2)
    assert run.layer([between]) == [None]
    found = run.backward([[], []], lambda _: True, lambda _: gradient)
    leaf = value.clone().requires_grad_()
    twice(twice([leaf]))[0].sum().backward()
    assert leaf.grad is not None
    assert torch.equal(found["value"], leaf.grad)

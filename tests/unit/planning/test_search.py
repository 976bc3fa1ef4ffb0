"""The search against brute force: every plan of the space, one by one, by the same predictor."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atomtrain.analysis import Chain, Layer, LayerCost, LayerTime
from atomtrain.analysis.costs.costs import ChainCosts, ValueSpec
from atomtrain.analysis.costs.saved import SavedCost
from atomtrain.errors import PlanError
from atomtrain.planning import Layout, Machine, Plan, Request, Shape, make_plan
from atomtrain.planning.cost.costing import Costing, Given, Steps
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.cost.segments import SavedTensors
from atomtrain.planning.plan.disk import KINDS, DiskRequest, OnDisk, choices, disk_use, two_moments
from atomtrain.planning.plan.kept import check_shape
from atomtrain.planning.plan.shape import Activation
from atomtrain.planning.search import choice as choice_module
from atomtrain.planning.search import search as search_module
from atomtrain.planning.search.activation_dp import ActivationDP
from atomtrain.planning.search.choice import AS_FAST, Choice, Mixing, fastest_of, leanest_of
from atomtrain.planning.search.memory_limit import least_device_bytes
from atomtrain.planning.search.space import Space

MOST_KINDS = 4


class Kind(NamedTuple):
    """Costs of one kind of layer."""

    parameters: int
    forward_s: float
    backward_s: float
    out_bytes: int
    work_bytes: int
    kept_bytes: int
    saved: tuple[bool, bool]
    """Whether backward needs what the layer reads, and what it writes."""
    movable: bool
    sent_share: float = 1.0
    """Of `kept_bytes`, what goes to the host if the layer is offloaded."""
    remade_traffic_bytes: int = 0


class Problem(NamedTuple):
    """A small model on a machine."""

    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    """The kind of each layer."""
    shared: tuple[tuple[int, int, int], ...]
    """Elements and two users of each shared weight."""
    micro_batches: int
    load_bytes_per_s: float
    unload_bytes_per_s: float
    update_parameters_per_s: float
    copy_cost: float
    memory_share: float
    """Between the least memory that works and plenty."""
    disk_bytes_per_s: tuple[float, float] = (1e5, 1e5)
    """Reads and writes."""
    on_disk: OnDisk = ()
    clips: bool = False
    offload_cost: tuple[float, float] = (0.0, 0.0)
    """Seconds of compute for each storage and each byte that is offloaded, each way."""


class Holder(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


KIND = st.builds(
    Kind,
    parameters=st.integers(0, 40).map(lambda n: 64 * n),
    forward_s=st.floats(0.01, 1.0),
    backward_s=st.floats(0.01, 4.0),
    out_bytes=st.integers(1, 30).map(lambda n: 64 * n),
    work_bytes=st.integers(0, 20).map(lambda n: 64 * n),
    kept_bytes=st.integers(0, 20).map(lambda n: 64 * n),
    saved=st.tuples(st.booleans(), st.booleans()),
    movable=st.sampled_from([True, True, True, False]),
    sent_share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    remade_traffic_bytes=st.sampled_from([0, 0, 50_000]),
)


@st.composite
def problems(draw: st.DrawFn, most_layers: int = 5) -> Problem:
    count = draw(st.integers(1, most_layers))
    shared = draw(st.integers(0, 1)) if count > 1 else 0
    pairs = [tuple(sorted(draw(st.permutations(range(count)))[:2])) for _ in range(shared)]
    return Problem(
        kinds=tuple(draw(KIND) for _ in range(MOST_KINDS)),
        layers=tuple(draw(st.integers(0, MOST_KINDS - 1)) for _ in range(count)),
        shared=tuple((64 * draw(st.integers(1, 30)), a, b) for a, b in pairs),
        micro_batches=draw(st.integers(1, 3)),
        load_bytes_per_s=draw(st.floats(1e3, 1e5)),
        unload_bytes_per_s=draw(st.floats(1e3, 1e5)),
        update_parameters_per_s=draw(st.floats(3e2, 1e5)),
        copy_cost=draw(st.sampled_from([0.0, 1e-6])),
        memory_share=draw(st.floats(0.0, 1.0)),
        disk_bytes_per_s=(draw(st.floats(1e3, 1e6)), draw(st.floats(1e3, 1e6))),
        on_disk=KINDS[: draw(st.sampled_from([0, 0, 1, 3]))],
        clips=draw(st.booleans()),
        offload_cost=draw(st.sampled_from([(0.0, 0.0), (0.02, 0.0), (0.02, 1e-5)])),
    )


class Built(NamedTuple):
    """A problem as the planner takes it."""

    chain: Chain
    costs: ChainCosts
    times: dict[str, LayerTime]
    machine: Machine
    on_disk: OnDisk
    clips: bool

    def sending_all(self) -> Built:
        return self._replace(costs=self.costs.sending_all())

    def space(self, request: Request) -> Space:
        layout = Layout(self.chain)
        disk = disk_use(self.chain, layout, two_moments(self.chain), self.on_disk)
        count = request.micro_batches
        memory = MemoryModel(self.chain, self.costs, count)
        given = Given(chain=self.chain, costs=self.costs, times=self.times, machine=self.machine)
        steps = Steps(micro_batches=count, disk=disk, clips=self.clips)
        costing = Costing(given, steps)
        return Space(self.costs, memory, costing, request)


def build(problem: Problem) -> Built:
    held = [[nn.Parameter(torch.empty(problem.kinds[k].parameters))] for k in problem.layers]
    for elements, a, b in problem.shared:
        weight = nn.Parameter(torch.empty(elements))
        held[a].append(weight)
        held[b].append(weight)
    count = len(held)
    layers = tuple(
        Layer(str(i), Holder(ps), (f"v{i}",), (f"v{i + 1}",)) for i, ps in enumerate(held)
    )
    chain = Chain(layers, ("v0",), f"v{count}", {})
    costs = []
    values = {"v0": ValueSpec((16,), torch.uint8, False)}
    for index, number in enumerate(problem.layers):
        kind = problem.kinds[number]
        parameters = sum(p.numel() for p in held[index])
        costs.append(
            LayerCost(
                name=str(index), kind=str(number), parameters=parameters,
                parameter_bytes=4 * parameters, buffer_bytes=0, forward_flops=0, backward_flops=0,
                forward_bytes=kind.out_bytes + kind.work_bytes,
                kept_bytes=kind.out_bytes + kind.kept_bytes,
                graph_bytes=kind.out_bytes + kind.kept_bytes + kind.work_bytes,
                backward_bytes=2 * kind.work_bytes, changes_buffers=False, random=False,
                saved=SavedCost(
                    inner_bytes=kind.kept_bytes,
                    sent_bytes=int(kind.sent_share * kind.kept_bytes), sent=1,
                    reads=kind.saved[:1], writes=kind.saved[1:],
                    forward_bytes=kind.out_bytes + kind.work_bytes,
                    backward_bytes=2 * kind.work_bytes, movable=kind.movable,
                    remade_traffic_bytes=kind.remade_traffic_bytes,
                ),
                all_sent=None if kind.sent_share == 1 else SavedCost(
                    inner_bytes=kind.kept_bytes, sent_bytes=kind.kept_bytes, sent=2,
                    reads=kind.saved[:1], writes=kind.saved[1:],
                    forward_bytes=kind.out_bytes + kind.work_bytes,
                    backward_bytes=2 * kind.work_bytes, movable=kind.movable,
                ),
            )
        )  # fmt: skip
        values[f"v{index + 1}"] = ValueSpec((kind.out_bytes,), torch.uint8, True)
    times = {str(i): LayerTime(k.forward_s, k.backward_s) for i, k in enumerate(problem.kinds)}
    machine = Machine(
        name="test",
        load_bytes_per_s=problem.load_bytes_per_s,
        unload_bytes_per_s=problem.unload_bytes_per_s,
        update_parameters_per_s=problem.update_parameters_per_s,
        device_update_parameters_per_s=3 * problem.update_parameters_per_s,
        compute_s_per_copied_byte=problem.copy_cost,
        compute_s_per_offloaded_storage=problem.offload_cost[0],
        compute_s_per_offloaded_byte=problem.offload_cost[1],
        device_memory_bytes=1 << 40,
        host_memory_bytes=1 << 40,
        storage_read_bytes_per_s=problem.disk_bytes_per_s[0],
        storage_write_bytes_per_s=problem.disk_bytes_per_s[1],
        storage_both_ways_share=0.7,
    )
    return Built(
        chain, ChainCosts(tuple(costs), values), times, machine, problem.on_disk, problem.clips
    )


def compositions(layers: int) -> Iterator[tuple[int, ...]]:
    """Yield all bounds of a partition of so many layers."""
    if layers == 0:
        yield (0,)
        return
    for inner in itertools.product((False, True), repeat=layers - 1):
        yield (0, *(cut for cut, there in enumerate(inner, 1) if there), layers)


def all_shapes(space: Space, built: Built, request: Request) -> Iterator[Shape]:
    """Yield every plan of the space, written down without the search's own helpers."""
    count, layout = len(built.chain.layers), Layout(built.chain)
    for backward in compositions(count):
        if request.segments not in (None, len(backward) - 1):
            continue
        for forward in compositions(backward[-2]):
            for resident, there in space.residencies:
                slots = {min(k, len(forward)) for k in (1, 2)}
                if request.slots:
                    slots = {min(request.slots, len(forward))}
                buffers = {min(g, len(backward) - 1) for g in (1, 2)}
                if request.gradient_buffers:
                    buffers = {min(request.gradient_buffers, len(backward) - 1)}
                for k, g, boundary in itertools.product(slots, buffers, ("device", "host")):
                    for activations in all_activations(built, request, forward, backward):
                        where = resident, 0, activations, there
                        shape = Shape(forward, backward, k, g, boundary, *where)  # type: ignore[arg-type]
                        check_shape(shape, count, layout.blocks)
                        yield shape


def all_activations(
    built: Built, request: Request, forward: tuple[int, ...], backward: tuple[int, ...]
) -> Iterator[tuple[Activation, ...]]:
    """Yield what the segments of a pair of partitions may do with what they save."""
    below = len(backward) - 2
    pinned = request.activations
    if pinned in (None, "recompute") or not below:
        yield ("recompute",) * (below + 1)
    if pinned == "recompute" or not below or forward != backward[:-1]:
        return
    saved = SavedTensors(built.chain, built.costs)
    segments = [saved.of(start, stop) for start, stop in itertools.pairwise(forward)]
    most = request.micro_batches
    can_keep = [of.movable for of in segments]
    can_offload = [of.movable and most * of.sent_bytes >= saved.window_bytes for of in segments]
    if pinned is not None:
        can = can_keep if pinned == "keep" else can_offload
        how: tuple[Activation, ...] = tuple(pinned if here else "recompute" for here in can)
        if "keep" not in how or "recompute" not in how[how.index("keep") :]:
            yield (*how, "recompute")
        return
    for kept in range(below + 1):
        for chosen in itertools.product(("recompute", "offload"), repeat=below - kept):
            how = (*chosen, *("keep",) * kept)  # type: ignore[assignment]
            possible = all(can_keep[below - kept :]) and all(
                can_offload[i] for i, here in enumerate(how) if here == "offload"
            )
            if possible and set(how) != {"recompute"}:
                yield (*how, "recompute")


def rank_of(choice: Choice) -> tuple[str, bool]:
    return choice.shape.boundary, "offload" in choice.shape.activations


def choices_of(space: Space, built: Built, request: Request) -> list[Choice]:
    return [
        Choice(shape, space.costing.step(shape).step_s, space.memory.device_bytes(shape))
        for shape in all_shapes(space, built, request)
    ]


REQUESTS: list[dict[str, Any]] = [
    {}, {}, {}, {"segments": 1}, {"segments": 2}, {"segments": 3}, {"slots": 2}, {"slots": 1},
    {"activations": "recompute"}, {"activations": "keep"}, {"activations": "offload"},
]  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(problems(most_layers=4), st.sampled_from(REQUESTS))
def test_the_search_equals_brute_force(problem: Problem, fixed: dict[str, Any]) -> None:
    built = build(problem)
    request = Request(micro_batches=problem.micro_batches, **fixed)
    if (request.segments or 1) <= len(problem.layers):
        compare(problem, built, request)


@st.composite
def long_problems(draw: st.DrawFn) -> tuple[Problem, dict[str, Any]]:
    """Chains of five or six layers; what is resident is drawn, and so need not be enumerated."""
    problem = draw(problems(most_layers=6).filter(lambda p: len(p.layers) >= 5))
    blocks = range(len(problem.layers) + len(problem.shared))
    resident = draw(st.sets(st.sampled_from(blocks), max_size=4))
    there = draw(st.sets(st.sampled_from(sorted(resident)))) if resident else set()
    fixed: dict[str, Any] = {"resident": tuple(sorted(resident))}
    fixed["device_blocks"] = tuple(sorted(there))
    for name, counts in (("slots", (1, 2)), ("gradient_buffers", (1, 2))):
        fixed[name] = draw(st.sampled_from((None, *counts)))
    return problem, fixed


@pytest.mark.slow
@settings(deadline=None, max_examples=int(os.environ.get("ATOM_SEARCH_EXAMPLES", "4")))
@given(long_problems())
def test_the_search_equals_brute_force_on_six_layers(drawn: tuple[Problem, dict[str, Any]]) -> None:
    """`ATOM_SEARCH_EXAMPLES=300` draws more of them; a few minutes."""
    problem, fixed = drawn
    built = build(problem)
    compare(problem, built, Request(micro_batches=problem.micro_batches, **fixed))


def compare(problem: Problem, built: Built, request: Request) -> None:
    """Check the search's answers against those of all plans."""
    space = built.space(request)
    everything = choices_of(space, built, request)
    if not everything:  # nothing can be kept or offloaded
        assert fastest_of(space, 1 << 40) is None
        return
    least = min(choice.device_bytes for choice in everything)
    assert least_device_bytes(space) == least
    most = max(choice.device_bytes for choice in everything)
    budget = int(least + problem.memory_share * (most - least))
    fitting = [choice for choice in everything if choice.device_bytes <= budget]
    best_s = min(choice.step_s for choice in fitting)

    fastest = fastest_of(space, budget)
    assert fastest is not None
    assert fastest.step_s == pytest.approx(best_s, rel=1e-9)
    assert space.costing.step(fastest.shape).step_s == pytest.approx(fastest.step_s, rel=1e-9)
    assert fastest.device_bytes <= budget
    # Known beforehand to be fast enough, or too slow.
    enough = fastest_of(space, budget, best_s * (1 + 1e-6))
    assert enough is not None
    assert enough.step_s == pytest.approx(best_s, rel=1e-9)
    assert fastest_of(space, budget, best_s * (1 - 1e-6)) is None

    limit_s = 1.01 * fastest.step_s
    # A plan within rounding of the limit may fall on either side of it.
    if any(math.isclose(choice.step_s, limit_s, rel_tol=1e-9) for choice in fitting):
        return
    equal = [choice for choice in fitting if choice.step_s <= limit_s]
    rank = min(rank_of(choice) for choice in equal)
    if rank_of(fastest) == rank:
        limit_s = (1 + AS_FAST) * fastest.step_s
        if any(math.isclose(choice.step_s, limit_s, rel_tol=1e-9) for choice in fitting):
            return
        equal = [choice for choice in fitting if choice.step_s <= limit_s]
    leanest = leanest_of(space, fastest, limit_s, budget)
    assert rank_of(leanest) == rank
    expected = min(c.device_bytes for c in equal if rank_of(c) == rank)
    assert leanest.device_bytes == expected
    assert leanest.step_s <= limit_s
    assert fastest_of(space, least - 1) is None


@settings(deadline=None, max_examples=20)
@given(problems(most_layers=4))
def test_what_is_found_is_planned(problem: Problem) -> None:
    built = build(problem)
    request = Request(micro_batches=problem.micro_batches, host_layers=0)
    spaces = [one.space(request) for one in (built, built.sending_all())]
    least = min(map(least_device_bytes, spaces))
    machine = built.machine.__class__(
        **{**built.machine.to_json(), "device_memory_bytes": max(1, least)}
    )
    disk = DiskRequest(states=two_moments(built.chain), on_disk=problem.on_disk)
    request = dataclasses.replace(request, disk=disk, clips=problem.clips)
    made = make_plan(built.chain, built.costs, built.times, machine, request)
    assert made.on_disk == problem.on_disk
    assert made.device_peak_bytes == least
    assert made.step_s >= max(made.compute_s, made.load_s, made.unload_s, made.update_s) * 0.999


@settings(deadline=None, max_examples=30)
@given(problems(most_layers=3), st.sampled_from([None, "offload"]))
def test_all_is_sent_where_that_is_faster(problem: Problem, pinned: Activation | None) -> None:
    """Brute force over plans that make something again, and those that send it."""
    built = build(problem._replace(on_disk=(), clips=False))
    given: dict[str, Any] = {"resident": (), "device_blocks": (), "slots": 2}
    request = Request(micro_batches=problem.micro_batches, activations=pinned, **given)
    remaking, sending = (
        choices_of(one.space(request), one, request) for one in (built, built.sending_all())
    )
    sizes = sorted(choice.device_bytes for choice in (*remaking, *sending))
    if not sizes:
        return
    budget = int(sizes[0] + problem.memory_share * (sizes[-1] - sizes[0]))
    remaking_s, sending_s = (
        min((c.step_s for c in choices if c.device_bytes <= budget), default=math.inf)
        for choices in (remaking, sending)
    )
    sent_s = (1 + search_module.WORTH_SENDING) * sending_s
    if math.isclose(sent_s, remaking_s, rel_tol=1e-9):
        return
    machine = dataclasses.replace(built.machine, device_memory_bytes=budget)
    made = make_plan(built.chain, built.costs, built.times, machine, request)
    assert made.remakes is (sent_s > remaking_s)
    best_s = remaking_s if made.remakes else sending_s
    assert made.step_s <= 1.01 * best_s * (1 + 1e-9)
    assert made.device_peak_bytes <= budget


@pytest.mark.parametrize(("bytes_per_s", "remakes"), [(1e5, False), (4e3, True)])
def test_what_is_made_again_is_sent_where_the_link_has_room(
    bytes_per_s: float, remakes: bool
) -> None:
    """Making it again takes half as long as forward; so does sending it over the slow link."""
    kind = Kind(64, 0.1, 0.3, 64, 64, 640, (True, False), True, 0.5, 42_000)
    rates = bytes_per_s, bytes_per_s, 1e4
    built = build(Problem((kind,) * MOST_KINDS, (0, 1, 2, 3), (), 2, *rates, 0.0, 1.0))
    request = Request(micro_batches=2, activations="offload", segments=4, resident=())

    def made(host_memory_bytes: int = 1 << 40) -> Plan:
        machine = dataclasses.replace(built.machine, host_memory_bytes=host_memory_bytes)
        return make_plan(built.chain, built.costs, built.times, machine, request)

    free = made()
    assert "offload" in free.activations
    assert free.remakes is remakes
    if not remakes:  # nor where host memory has none
        again = made(free.host_bytes - 1)
        assert again.remakes
        assert again.host_bytes < free.host_bytes
        assert again.step_s > (1 + search_module.WORTH_SENDING) * free.step_s


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(problems(most_layers=3), st.floats(0.0, 1.0))
def test_as_little_is_on_disk_as_host_memory_demands(problem: Problem, share: float) -> None:
    """Brute force over what is on disk: the fastest choice that fits the host is taken.

    Slots and buffers are given, since they need no host memory.
    """
    built = build(problem)
    states = two_moments(built.chain)

    def planned(on_disk: OnDisk | None, host_memory_bytes: int) -> Plan:
        request = Request(
            micro_batches=problem.micro_batches,
            host_layers=0,
            slots=2,
            gradient_buffers=2,
            disk=DiskRequest(states=states, on_disk=on_disk),
        )
        machine = dataclasses.replace(built.machine, host_memory_bytes=host_memory_bytes)
        return make_plan(built.chain, built.costs, built.times, machine, request)

    every = [planned(on_disk, 1 << 40) for on_disk in choices(DiskRequest(states=states))]
    assert [plan.on_disk for plan in every] == [(), ("moments",), KINDS]
    sizes = sorted(plan.host_bytes for plan in every)
    budget = int(sizes[0] + share * (sizes[-1] - sizes[0]))
    best_s = min(plan.step_s for plan in every if plan.host_bytes <= budget)
    chosen = planned(None, budget)
    assert chosen.host_bytes <= budget
    # Plans that are 1% apart are equal to the search, and the one with the least memory is taken.
    assert chosen.step_s <= 1.01 * best_s * (1 + 1e-9)
    with pytest.raises(PlanError, match="with everything on disk that can be"):
        planned(None, sizes[0] - 1)


def test_a_step_lasts_as_long_as_the_disk_reads() -> None:
    """Even where all else is over sooner, and updates have memory to read ahead."""
    kind = Kind(1024, 0.6, 3.0, 256, 1152, 1088, (False, True), True)
    problem = Problem(
        (kind,) * MOST_KINDS, (0, 0, 0, 0), (), 1, 1e3, 1e3, 3e2, 0.0, 0.0,
        disk_bytes_per_s=(1e3, 3e5), on_disk=KINDS,
    )  # fmt: skip
    built = build(problem)
    fastest = fastest_of(built.space(Request(micro_batches=1)), 1 << 40)
    assert fastest is not None
    space = built.space(Request(micro_batches=1))
    disk = space.costing.disk_work()
    assert disk is not None
    assert fastest.step_s == pytest.approx(space.costing.step(fastest.shape).step_s)
    assert fastest.step_s >= disk.read_s


def test_what_the_disk_reads_during_forward_counts_once() -> None:
    """Clocks of backward begin at the turn; reading began with the step."""
    kind = Kind(64, 0.6240524660776324, 3.0, 64, 1024, 0, (False, False), True)
    problem = Problem(
        (kind,) * MOST_KINDS, (0, 0, 0, 0), (), 2, 1e3, 1e3, 3e2, 0.0, 0.0,
        disk_bytes_per_s=(1e3, 2436.0), on_disk=("moments",),
    )  # fmt: skip
    compare(problem, build(problem), Request(micro_batches=2))


def test_what_is_still_in_its_slot_is_loaded_in_no_bound() -> None:
    """Knowing what is possible beforehand changes nothing, also where the link decides."""
    one = Kind(1088, 0.265, 0.133, 1792, 0, 0, (False, True), True)
    two = one._replace(saved=(False, False))
    large = Kind(2176, 0.812, 3.569, 192, 0, 1280, (False, True), True)
    problem = Problem(
        (large, two, two, one), (3, 1, 1, 0, 3, 1), ((960, 0, 1),), 3, 1001.0, 86_400.0, 17_210.0,
        0.0, 1.0,
    )  # fmt: skip
    request = Request(micro_batches=3, resident=(), device_blocks=(), slots=2, gradient_buffers=1)
    space = build(problem).space(request)
    shape = Shape((0, 2, 4), (0, 2, 4, 6), 2, 1, activations=("keep", "keep", "recompute"))
    budget, step_s = space.memory.device_bytes(shape), space.costing.step(shape).step_s
    for below_s in (math.inf, step_s * (1 + 1e-6)):
        best = fastest_of(space, budget, below_s)
        assert best is not None
        assert best.step_s <= step_s * (1 + 1e-9)


def simple(micro_batches: int) -> Built:
    kind = Kind(64, 0.1, 0.3, 64, 64, 64, (True, False), True)
    return build(
        Problem((kind,) * MOST_KINDS, (0, 1, 0), (), micro_batches, 1e4, 1e4, 1e4, 0.0, 1.0)
    )


def test_nothing_is_searched_where_compute_alone_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = simple(2).space(Request(micro_batches=2))
    compute_s = sum(space.costing.layer_backward_s)

    def searched(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(choice_module, "_Solvers", searched)
    assert fastest_of(space, 1 << 40, compute_s) is None
    with pytest.raises(AssertionError):
        fastest_of(space, 1 << 40, compute_s * 1.01)


@pytest.mark.parametrize(("count", "boundaries"), [(1, {"device"}), (3, {"device", "host"})])
def test_values_may_wait_on_the_host_where_that_saves_memory(
    count: int, boundaries: set[str]
) -> None:
    space = simple(count).space(Request(micro_batches=count))
    assert {family.boundary for family in space.families} == boundaries


def test_nothing_of_a_search_waits_for_the_garbage_collector() -> None:
    """Tables of large models are large: no circle may hold them until it comes by."""
    built = simple(2)
    gc.disable()
    try:
        space = built.space(Request(micro_batches=2))
        budget = least_device_bytes(space) * 2
        fastest = fastest_of(space, budget)
        assert fastest is not None
        leanest_of(space, fastest, 1.01 * fastest.step_s, budget)
        costing = weakref.ref(space.costing)
        del space
        assert costing() is None
    finally:
        gc.enable()


def test_sizes_of_slots_are_left_out_by_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = tuple(Kind(64 * n, 0.3, 0.9, 64, 64, 1280, (True, False), True) for n in (7, 8, 9, 11))
    built = build(Problem(kinds, (0, 1, 2, 3) * 3, (), 2, 1e6, 1e6, 1e6, 0.0, 1.0))
    request = Request(
        micro_batches=2, resident=(), device_blocks=(), slots=2, gradient_buffers=2, offload=False
    )
    space = built.space(request)
    budget = 4 * least_device_bytes(space)
    (family,) = (f for f in space.families if not f.whole and f.boundary == "device")
    activation_dp = ActivationDP(space, family, offload=False)
    # With slots larger than the smallest ones there is less room for what is kept.
    sizes = space.slot_sizes_within(family, budget)[5:]
    monkeypatch.setattr(space, "slot_sizes_within", lambda *_: sizes)
    budgets = [activation_dp.budgets.budget([size], budget) for size in sizes]
    least_s = min(activation_dp.bound_s(budget) for budget in budgets)
    each = [activation_dp.best(budget, math.inf) for budget in budgets]
    best_s = min(found.step_s for found in each if found is not None)
    assert least_s <= best_s

    some = Mixing(space, family, activation_dp, budget)
    found = some.best(best_s * (1 + 1e-9))
    assert found is not None
    assert found.step_s == pytest.approx(best_s, rel=1e-9)
    assert some.loose_bound_s() < least_s
    assert some.bound_s() == pytest.approx(least_s, rel=1e-12)

    def searched(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(ActivationDP, "best", searched)
    assert some.best(least_s) is None
    with pytest.raises(AssertionError):
        some.best(least_s * 1.01)


def link_bound(load_bytes_per_s: float, layers: int = 8) -> Built:
    """A chain of equal layers that computes three times as long in backward as in forward."""
    kind = Kind(640, 1.0, 3.0, 64, 64, 640, (True, False), False)
    rates = load_bytes_per_s, load_bytes_per_s, 1e6
    return build(Problem((kind,) * MOST_KINDS, (0,) * layers, (), 1, *rates, 0.0, 1.0))


def planned(built: Built, budget: int, **fixed: Any) -> Plan:
    request = Request(micro_batches=1, **{"resident": (), "device_blocks": (), **fixed})
    machine = dataclasses.replace(built.machine, device_memory_bytes=budget)
    return make_plan(built.chain, built.costs, built.times, machine, request)


@pytest.mark.parametrize("load_bytes_per_s", [1e6, 2560 / 2])
def test_two_slots_are_enough(load_bytes_per_s: float) -> None:
    """Also where a layer loads for 2 s, and forward computes it for 1 s."""
    built = link_bound(load_bytes_per_s)
    assert planned(built, 1 << 20, segments=8).slots <= 2
    assert planned(built, 1 << 20, segments=8, slots=3).slots == 3


BAD = [-1.0, math.nan, math.inf]


@pytest.mark.parametrize("value", BAD)
def test_times_of_nonsense(value: float) -> None:
    kind = Kind(64, 0.1, 0.3, 64, 64, 64, (True, False), True)
    built = build(Problem((kind,) * MOST_KINDS, (0, 1), (), 1, 1e4, 1e4, 1e4, 0.0, 1.0))
    times = {**built.times, "1": LayerTime(0.1, value)}
    with pytest.raises(PlanError, match="time of layer '1'"):
        make_plan(built.chain, built.costs, times, built.machine, Request(micro_batches=1))
    del times["1"]
    with pytest.raises(PlanError, match="no time for layer '1'"):
        make_plan(built.chain, built.costs, times, built.machine, Request(micro_batches=1))

"""The whole protocol under random schedules: deaths, newcomers and cuts of the network, any time.

A few schedules here, thousands with `make interleavings`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import VirtualLoop, run_virtual
from atomtrain.swarm.codecs import slices
from atomtrain.swarm.rounds.auditor import Auditor
from atomtrain.swarm.rounds.audits import Claim
from atomtrain.swarm.rounds.owning import OwnedSlice
from tests.support.going_on import all_go_on
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_lying_owners import Unseen, larger

pytestmark = pytest.mark.slow

PEERS_MAX = 5
AGREE_S = 120
_EXAMPLES = "ATOM_SWARM_EXAMPLES"
_DONE: Counter[str] = Counter()


@dataclass(frozen=True)
class Event:
    """What happens to the swarm, and how long after the event before."""

    what: str
    whom: int
    after_s: float


EVENTS = st.builds(
    Event,
    what=st.sampled_from(["death", "death", "newcomer", "cut", "heal"]),
    whom=st.integers(0, 2**PEERS_MAX - 1),
    after_s=st.floats(0.05, 20.0),
)


@pytest.fixture(scope="module", autouse=True)
def _tell_what_was_done(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print at the end how much was tried, if more than usual was asked for."""
    yield
    if _EXAMPLES in os.environ:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            done = ", ".join(f"{n:,} {what}" for what, n in sorted(_DONE.items()))
            print(f"\n{done}", flush=True)


class _CountingLoop(VirtualLoop):
    """Counts the callbacks that it runs: the steps of all peers, in the order of the schedule."""

    def call_soon(self, *args: object, **kwargs: object) -> asyncio.Handle:
        _DONE["steps"] += 1
        return super().call_soon(*args, **kwargs)  # type: ignore[arg-type]

    def call_at(self, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        _DONE["steps"] += 1
        return super().call_at(*args, **kwargs)  # type: ignore[arg-type]


class _Schedule:
    """Does to a swarm what a list of events says."""

    def __init__(self, simulation: Simulation, steps_s: list[float]) -> None:
        self._simulation, self._steps_s = simulation, steps_s
        self._numbers = count()
        self._is_cut = False

    async def add(self) -> None:
        number = next(self._numbers)
        step_s = self._steps_s[number % len(self._steps_s)]
        await self._simulation.add(f"peer{number}", step_s)

    async def do(self, event: Event) -> None:
        await asyncio.sleep(event.after_s)
        simulation = self._simulation
        names = sorted(simulation.peers)
        if event.what == "death" and len(names) > 1:
            await simulation.kill(names[event.whom % len(names)])
        elif event.what == "newcomer" and len(names) < PEERS_MAX and not self._is_cut:
            await self.add()
        elif event.what == "cut" and not self._is_cut:
            some = {name for place, name in enumerate(names) if event.whom >> place & 1}
            if not 0 < len(some) < len(names):
                return
            simulation.network.split(some, set(names) - some)
            self._is_cut = True
        elif event.what == "heal" and self._is_cut:
            self.heal()
        else:
            return
        _DONE[f"{event.what}s"] += 1

    def heal(self) -> None:
        self._simulation.network.heal()
        self._is_cut = False


async def _run(
    simulation: Simulation,
    steps_s: list[float],
    events: list[Event],
    liars: frozenset[str] = frozenset(),
) -> None:
    schedule = _Schedule(simulation, steps_s)
    for _ in steps_s:
        await schedule.add()
    for event in events:
        await schedule.do(event)
    schedule.heal()
    for name in liars & set(simulation.peers):  # it has had its time; do the others agree?
        await simulation.kill(name)
    if not simulation.peers:
        return
    await all_go_on(simulation)
    if not simulation.manifest.rules.group_size:  # members of several groups have siblings
        assert await simulation.settle(AGREE_S), "survivors must agree"
    _DONE["means checked"] += simulation.check_means()
    _DONE["schedules"] += 1


def test_a_schedule_runs_the_same_way_again() -> None:
    """So what fails can be looked into."""
    events = [Event("death", 1, 7.0), Event("cut", 1, 3.0), Event("newcomer", 0, 9.0)]
    merged = []
    for _ in range(2):
        simulation = Simulation((30, 9), 5, 0.2, wire="int4")
        run_virtual(partial(_run, simulation, [0.3, 0.5, 1.1, 0.7], events))
        merged.append([(peer, merge.anchor.stamp) for peer, _, merge in simulation.merges])
    assert len(merged[0]) > 30
    assert merged[0] == merged[1]


def test_an_anchor_of_its_own_waits_when_a_doubt_is_settled() -> None:
    """A peer that was cut off in a round goes on alone, and finds what the round has made."""
    simulation = Simulation((2, 8, 21), 25082, 0.3399277088339928, wire="int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_ELEMENTS", 8)
        cut = Event("cut", 18, 10.179637432861266)
        run_virtual(partial(_run, simulation, [0.7, 1.4467285507431689, 1.4467285507431689], [cut]))


def test_survivors_go_on_from_lower_versions_that_more_tokens_went_into() -> None:
    """One peer that makes many small rounds alone meets two that make few large ones."""
    simulation = Simulation((37, 9, 30), 63944, 0.05)
    events = [
        Event("death", 5, 15.0),
        Event("newcomer", 7, 0.4),
        Event("heal", 30, 5.0315908002666605),
        Event("cut", 22, 11.491506018575802),
        Event("cut", 8, 12.62280082457942),
        Event("newcomer", 12, 0.2),
    ]
    run_virtual(partial(_run, simulation, [0.1, 0.9781548776219205, 2.2215400323407826], events))
    merges = [merge for name, _, merge in simulation.merges if name == "peer0"]
    lone = [merge.anchor.stamp for merge in merges if merge.fragment == 0]
    assert any(new.version < old.version and new.beats(old) for old, new in pairwise(lone))


def test_what_is_in_a_round_whenever_a_peer_looks_is_fetched_all_the_same() -> None:
    """Rounds, steps and membership records keep time with each other where nothing takes any."""
    simulation = Simulation((6, 6), 630, 0.0, wire="topk")
    events = [
        Event("death", 0, 0.378405796135778),
        Event("cut", 25, 9.021920927645679),
        Event("death", 25, 9.021920927645679),
    ]
    steps_s = [2.4428204952133936, 0.415458717310462, 2.2643733291665282, 0.1]
    run_virtual(partial(_run, simulation, steps_s, events))


@settings(
    max_examples=int(os.environ.get(_EXAMPLES, "25")),
    phases=(Phase.reuse, Phase.generate),  # a search for the shortest schedule takes too long
)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    steps_s=st.lists(st.floats(0.1, 3.0), min_size=2, max_size=PEERS_MAX),
    delay_s=st.floats(0.0, 0.4),
    events=st.lists(EVENTS, max_size=6),
    wire=st.sampled_from(["float32", "int8", "int4", "topk"]),
    several=st.booleans(),
)
def test_whatever_happens_when(
    seed: int,
    sizes: list[int],
    steps_s: list[float],
    delay_s: float,
    events: list[Event],
    wire: str,
    several: bool,
) -> None:
    """Means stay right, anchors never go back, nothing is lost; survivors go on and agree."""

    simulation = Simulation(tuple(sizes), seed, delay_s, wire=wire)
    with pytest.MonkeyPatch.context() as patch:
        if several:  # slices for each member, also of so small fragments
            patch.setattr(slices, "SLICE_ELEMENTS", 8)
        run_virtual(partial(_run, simulation, steps_s, events), _CountingLoop())


@settings(
    max_examples=max(8, int(os.environ.get(_EXAMPLES, "25")) // 3),
    phases=(Phase.reuse, Phase.generate),
)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(8, 40), min_size=1, max_size=3),
    steps_s=st.lists(st.floats(0.1, 3.0), min_size=4, max_size=PEERS_MAX),
    delay_s=st.floats(0.0, 0.4),
    events=st.lists(EVENTS, max_size=6),
    wire=st.sampled_from(["float32", "float16", "int8"]),
    liar=st.integers(0, 3),
    often=st.floats(0.1, 1.0),
    factor=st.sampled_from([-1.0, 3.0]),
    claims=st.booleans(),
)
def test_whatever_happens_when_and_whoever_lies(
    seed: int,
    sizes: list[int],
    steps_s: list[float],
    delay_s: float,
    events: list[Event],
    wire: str,
    liar: int,
    often: float,
    factor: float,
    claims: bool,
) -> None:
    """One member's means are false, as often as it likes: nobody merges one, all others agree.

    Of too long ones it may say that they are of larger contributions.
    """
    simulation = Simulation(tuple(sizes), seed, delay_s, wire=wire)
    name, encode, chance = f"peer{liar}", OwnedSlice._encode, random.Random(seed)

    def false(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        lies = self._begin.members[self._index] == name and chance.random() < often
        _DONE["lies"] += lies
        if lies and claims:
            self._commitments = larger(self._commitments)
        return encode(self, contributors, factor * mean if lies else mean)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnedSlice, "_encode", false)
        running = partial(_run, simulation, steps_s, events, frozenset({name}))
        run_virtual(running, _CountingLoop())


@settings(
    max_examples=max(5, int(os.environ.get(_EXAMPLES, "25")) // 5),
    phases=(Phase.reuse, Phase.generate),
)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(8, 40), min_size=1, max_size=3),
    steps_s=st.lists(st.floats(0.1, 2.0), min_size=4, max_size=PEERS_MAX),
    delay_s=st.floats(0.0, 0.1),
    wire=st.sampled_from(["float32", "float16", "int8"]),
    liar=st.integers(0, 3),
    often=st.floats(0.1, 1.0),
    group_size=st.sampled_from([0, 3]),
)
def test_whoever_alone_sees_a_lie(
    seed: int,
    sizes: list[int],
    steps_s: list[float],
    delay_s: float,
    wire: str,
    liar: int,
    often: float,
    group_size: int,
) -> None:
    """One honest member of each group sees it, another one each time: nobody merges it."""
    simulation = Simulation(tuple(sizes), seed, delay_s, wire=wire, group_size=group_size)
    name, encode, chance = f"peer{liar}", OwnedSlice._encode, random.Random(seed)
    claim, seers = Auditor.claim, dict[str, str]()

    def false(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        lies = self._begin.members[self._index] == name and chance.random() < often
        _DONE["lies"] += lies
        return encode(self, contributors, -mean if lies else mean)

    def claimed(self: Auditor, *what: Any) -> Claim:
        begin = self._begin
        honest = [member for member in begin.members if member != name]
        if begin.round_id not in seers:
            seers[begin.round_id] = chance.choice(honest)
        made = claim(self, *what)
        sees = self._setup.peer_id == seers[begin.round_id]
        return made if sees else Unseen(**made.__dict__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnedSlice, "_encode", false)
        patch.setattr(Auditor, "claim", claimed)
        time = [Event("heal", 0, 20.0)]
        run_virtual(partial(_run, simulation, steps_s, time, frozenset({name})), _CountingLoop())

"""A peer in a process of its own that "trains" small vectors towards its own target.

Reads its settings as one JSON object from the command line; writes one JSON object a line:
`ready`, then `round` for each round and `state` every now and then. Ends on end of file on
standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atombench.liars.misdeeds import CONTRIBUTIONS, claim, contribute, two_means
from atomtrain.errors import SwarmError
from atomtrain.swarm import Swarm
from atomtrain.swarm.rounds.owning import OwnedSlice
from tests.support.swarm_misdeeds import (
    MISDEEDS,
    NEARLY,
    Misdeed,
    conspire,
    drip,
    haunt,
    haunt_with,
    hoard,
    mute,
    raid,
    record,
    withhold,
)
from tests.support.swarm_problem import Line
from tests.support.swarm_vectors import Vectors, config_of, cross, daemon_pid, found, judge_of, say

_STOOD_STILL = (
    "no peer answers", "network daemon", "did not get ready", "membership records",
    "could not be fetched",
)  # fmt: skip
"""Parts of what a peer is told if others, or itself, stood still for too long: it tries again."""
_TRIES = 20


def enter(settings: dict[str, Any]) -> tuple[Swarm, Vectors]:
    """Found the run, or join it, as often as it takes on a machine that stands still at times."""
    for left in reversed(range(_TRIES)):
        try:
            return enter_once(settings)
        except SwarmError as error:
            if left == 0 or not any(text in str(error) for text in _STOOD_STILL):
                raise
            say("again", text=str(error))
            time.sleep(0.2)
    raise AssertionError("the last try ends")


def enter_once(settings: dict[str, Any]) -> tuple[Swarm, Vectors]:
    if not (settings.get("join") or settings.get("rejoin")):
        return found(settings)
    swarm = Swarm.join(config_of(settings))
    vectors = Vectors(swarm.manifest.fragment_elements)
    judge = judge_of(vectors, settings)
    if judge is not None:
        swarm.use_judge(judge)
    say("joined", address=swarm.address, daemon=daemon_pid(swarm))
    try:
        swarm.download(vectors)
    except SwarmError:
        swarm.leave(1.0)
        raise
    return swarm, vectors


def set_clock(off_s: float) -> None:
    """Have this process believe another time of day."""
    right = time.time
    if off_s:
        tell_time(lambda: right() + off_s)


def tell_time(now: Callable[[], float]) -> None:
    """Put a time of day in place of the machine's, also where it was imported before."""
    from atomtrain.swarm.transport.libp2p import import_hivemind

    time.time = now  # type: ignore[assignment]
    import_hivemind()
    from hivemind.dht import node, protocol, routing
    from hivemind.utils import timed_storage

    for module in (node, protocol, routing, timed_storage):
        module.get_dht_time = now


def follow_clocks(file: Path) -> None:
    """Have this process's clocks be ahead by what a file says, from moment to moment.

    It holds two float64, in seconds: of the time of day, and of the clock that nobody sets.
    """
    from atomtrain.swarm.membership import directory

    with file.open("rb") as opened:
        ahead_s = mmap.mmap(opened.fileno(), 16, prot=mmap.PROT_READ)
    day, steady = time.time, directory.steady_s  # type: ignore[attr-defined]
    tell_time(lambda: day() + struct.unpack("dd", ahead_s)[0])
    directory.steady_s = lambda: steady() + struct.unpack("dd", ahead_s)[1]  # type: ignore[attr-defined]


def misbehave(kind: str) -> None:
    """Have this process do harm to rounds, or to its own files, from now on."""
    from atomtrain.swarm.rounds.contributing import Contributions

    encode, own = Contributions.encode, OwnedSlice._encode
    kind, _, times = kind.partition(" times ")
    factor = float(times or 1e6)
    first: list[Any] = []

    def corrupt(self: Contributions, *what: Any, **how: Any) -> Any:
        encoded = encode(self, *what, **how)
        spoilt = memoryview(bytearray(random.randbytes(len(encoded.data))))
        return encoded._replace(data=spoilt)

    def replay(self: Contributions, *what: Any, **how: Any) -> Any:
        encoded = encode(self, *what, **how)
        first.append(encoded.data) if not first else None
        same = len(first[0]) == len(encoded.data)
        return encoded._replace(data=first[0] if same else encoded.data)

    def false_mean(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        return own(self, contributors, mean * factor)

    def false_number(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        false = mean.clone()
        false[-1] += factor * mean.norm()
        return own(self, contributors, false)

    if kind == "corrupt":
        Contributions.encode = corrupt  # type: ignore[method-assign]
    elif kind == "replay":
        Contributions.encode = replay  # type: ignore[method-assign]
    elif kind == "false mean":
        OwnedSlice._encode = false_mean  # type: ignore[method-assign]
    elif kind == "false number":
        OwnedSlice._encode = false_number  # type: ignore[method-assign]
    elif kind == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def see_nothing() -> None:
    """Have this process find no fault with any mean that it audits."""
    from atomtrain.swarm.rounds.audits import Claim

    for check in ("unproved", "impossible", "wrong"):
        assert hasattr(Claim, check), "renamed: this would blind nobody"
        setattr(Claim, check, lambda *_: "")


STAGES = (
    "invited", "contributing", "reducing", "answering", "exchanged", "deciding", "merging",
)  # fmt: skip
"""Moments of a round, in their order, at which `fall_at` has a process fall."""


CUT = """
add table inet cut
add chain inet cut in { type filter hook input priority 0; }
add chain inet cut out { type filter hook output priority 0; }
add rule inet cut in iifname eth0 drop
add rule inet cut out oifname eth0 drop
"""


def cut_off() -> None:
    """Have this host, a network namespace, hear and say nothing more: its cable is pulled out."""
    subprocess.run(["nft", "-f", "-"], input=CUT, text=True, check=True, timeout=20)
    say("cut off")


def fall_at(stage: str, happen: Callable[[], None], *, always: bool = False) -> None:
    """Have this process suffer something when it is at that point of a round; once, or `always`.

    It has been invited; is about to encode a contribution; has all contributions to a slice, and no
    mean; has sent a slice's mean to one member; has all means, and has not told the leader; leads,
    and has told its decision to one member; has heard the decision, and changed nothing.
    """
    from atomtrain.swarm.anchors.anchor_store import AnchorStore
    from atomtrain.swarm.membership.deadlines import RoundTiming
    from atomtrain.swarm.rounds.contributing import Contributions
    from atomtrain.swarm.rounds.leader_io import LeaderIO
    from atomtrain.swarm.rounds.round_member import RoundMember
    from atomtrain.swarm.transport.messages import Commit

    once = threading.Lock()
    answer, send = OwnedSlice.answer, LeaderIO._send

    def fall() -> None:
        if always or once.acquire(blocking=False):
            happen()

    async def fall_after_answer(self: OwnedSlice, channel: Any) -> None:
        await answer(self, channel)
        fall()

    async def fall_while_telling(self: LeaderIO, outgoing: Any) -> None:
        if any(isinstance(message, Commit) for _, message in outgoing):
            await send(self, outgoing[:1])
            fall()
            outgoing = outgoing[1:]
        await send(self, outgoing)

    if stage == "answering":
        OwnedSlice.answer = fall_after_answer  # type: ignore[method-assign]
    elif stage == "deciding":
        LeaderIO._send = fall_while_telling  # type: ignore[method-assign]
    else:
        owner, name = {
            "invited": (RoundMember, "_enter"),
            "contributing": (Contributions, "encode"),
            "reducing": (OwnedSlice, "_close"),
            "exchanged": (RoundTiming, "observe"),
            "merging": (AnchorStore, "merge"),
        }[stage]
        before = getattr(owner, name)
        setattr(owner, name, lambda *given: (fall(), before(*given))[1])


def flood(swarm: Swarm) -> None:
    """Open streams to all others as fast as can be, and say nothing on them."""
    context = swarm._service.context

    async def open_all() -> None:
        while True:
            for peer_id in list(context.roster.members):
                if peer_id != context.peer_id:
                    with contextlib.suppress(SwarmError):
                        await context.open(peer_id)
            await asyncio.sleep(0.001)

    swarm._thread.submit(open_all())


def begin(fault: str, swarm: Swarm, misdeed: Misdeed | None, file: Path) -> None:
    """Have a fault from now on; `kill`, `stop` and `cut at STAGE` are some, too.

    A misdeed is done as long as there is the file.
    """
    what, _, stage = fault.partition(" at ")
    store = swarm._service.context.mailbox.store
    if misdeed is not None:
        fall_at(stage, lambda: misdeed.arm() if file.exists() else None, always=True)
    elif stage:
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        fall_at(stage, cut_off if what == "cut" else partial(os.kill, os.getpid(), numbers[what]))
    elif fault in ("raid", "hoard"):
        (raid if fault == "raid" else hoard)(swarm)
    elif fault in ("flood", "haunt"):
        (flood if fault == "flood" else haunt)(swarm)
    elif fault.startswith("conspire with "):
        conspire(swarm, fault.removeprefix("conspire with "))
    elif fault.startswith("ghosts "):
        haunt_with(swarm, int(fault.removeprefix("ghosts ")))
    elif fault.startswith("other bytes to "):
        OwnedSlice.answer = two_means(  # type: ignore[method-assign]
            OwnedSlice.answer, OwnedSlice._encode,
            lambda _, channel: channel.remote == fault.removeprefix("other bytes to "),
        )  # fmt: skip
    elif fault == "drip":
        drip(swarm)
    elif fault == "mute":
        mute(swarm, file)
    elif fault.startswith("contribute "):
        contribute(store, CONTRIBUTIONS[fault.removeprefix("contribute ")])
    elif fault.startswith("withhold"):
        withhold(swarm, signed=fault == "withhold, signed")
    elif fault.startswith("lie nearly "):
        claim(store, fault.removeprefix("lie nearly "), near=NEARLY)
    elif fault.startswith("lie "):
        claim(store, fault.removeprefix("lie "))
    else:
        misbehave(fault)


def train(swarm: Swarm, vectors: Vectors, settings: dict[str, Any]) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    step_s = settings.get("step_s", 0.05)
    said_s = next_s = 0.0
    steps = 0
    store = swarm._service.context.mailbox.store
    if settings.get("blind"):
        see_nothing()
    if "barred_s" in settings:
        from atomtrain.swarm.membership import standing

        standing._BARRED_S = settings["barred_s"]
    fault, fault_file = settings.get("fault", ""), Path(settings.get("fault_file", "/"))
    what = fault.partition(" at ")
    misdeed = Misdeed(what[0], swarm) if what[2] and what[0] in MISDEEDS else None
    if settings.get("record"):
        record(swarm)
    moves = Path(settings.get("moves_file", "/none"))
    rests = Path(settings.get("rests_file", "/none"))
    line = Line(settings["learns"]) if "learns" in settings else None
    while not ended.is_set():
        if moves.exists():
            settings["target"] = settings["moves_to"]
        if fault and time.monotonic() >= next_s and fault_file.exists():
            say("fault", fault=fault)
            begin(fault, swarm, misdeed, fault_file)
            step_s, next_s = (20 * step_s if fault == "slow" else step_s), time.monotonic() + 2.0
            # A tie lasts until the next round, and there may be one under way.
            fault = fault if fault.endswith("the lower hash") else ""
        time.sleep(step_s)
        made = 0 if rests.exists() else 1  # without steps no round is due
        if made:
            vectors.step(settings["target"]) if line is None else line.step(vectors)
        steps += made
        reports = cross(swarm, vectors, step_s, made)
        for report in reports:
            say("round", **asdict(report))
        if reports or time.monotonic() - said_s > 0.25:
            said_s = time.monotonic()
            state = swarm.state_dict()
            say(
                "state",
                versions=state.meta["versions"],
                digests=state.meta["digests"],
                rounds=[
                    store.anchor(fragment).origin.round_id
                    for fragment in range(len(store.fragment_elements))
                ],
                means=vectors.means(),
                anchor_means=[
                    float(store.anchor(fragment).values.mean())
                    for fragment in range(len(store.fragment_elements))
                ],
                loss=None if line is None else line.loss(store.anchor(0).values),
                peers=[p.peer_id for p in swarm.peers()],
                relays={p.peer_id: p.relays for p in swarm.peers()},
                steps=steps,
            )


def linger(swarm: Swarm, for_s: float) -> None:
    """Say goodbye, but keep the streams open for a while."""
    swarm._service.state = "left"
    say("leaving")
    time.sleep(for_s)


def main() -> None:
    settings = json.loads(sys.argv[1])
    set_clock(settings.get("clock_off_s", 0.0))
    if "clocks" in settings:
        follow_clocks(Path(settings["clocks"]))
    logging.basicConfig(level=settings.get("log", "WARNING"))
    torch.set_num_threads(1)
    try:
        swarm, vectors = enter(settings)
    except SwarmError as error:
        say("error", text=str(error))
        sys.exit(2)
    say(
        "ready", peer_id=swarm.peer_id, address=swarm.address, daemon=daemon_pid(swarm),
        means=vectors.means(),
    )  # fmt: skip
    train(swarm, vectors, settings)
    if "linger_s" in settings:
        linger(swarm, settings["linger_s"])
    swarm.leave(3.0)
    say("left", known=list(swarm.known_addresses()))


if __name__ == "__main__":
    main()

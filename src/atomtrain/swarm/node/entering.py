"""How a peer gets into the network: its network side is put together, and all of it started.

Or nothing is left. What fails while a process stands still proves nothing: the answer may have come
in time and not been read, or the peer that was asked stood still as well, as all do on one machine.
So it is done again. So it is where the peer that let a newcomer in was lost before it could
introduce it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atomtrain.errors import SwarmError
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.stamps import RunAge
from atomtrain.swarm.anchors.trainer_mailbox import TrainerMailbox
from atomtrain.swarm.catchup.joining import connect_any
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.agenda import Agenda
from atomtrain.swarm.membership.claims import Certified, Claims
from atomtrain.swarm.membership.config import Manifest, SwarmConfig, admission_of
from atomtrain.swarm.membership.deadlines import LoopStalls, RoundTiming, Waits
from atomtrain.swarm.membership.directory import DhtDirectory, NobodyIntroduces, SwarmClock
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.membership.records import TRAINING
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.membership.routes import Routes
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.node.network_thread import LoopThread
from atomtrain.swarm.node.service import Service, beat_pause_s
from atomtrain.swarm.rounds.context import Context, opening_to
from atomtrain.swarm.transport.libp2p import Libp2pTransport
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.relaying import Relay
from atomtrain.swarm.transport.transport import Directory, Transport

_log = logging.getLogger("atomtrain.swarm")
TRY_S = 120.0
"""Longest time that one try may take: longer than all that it waits for."""
TRIES = 5
_STILL_S = 2.5
"""Whoever did not run for so long may have missed a deadline; the shortest are 3 s. To start the
daemon blocks the loop, too: for less, unless the machine is very busy."""
ResultT = TypeVar("ResultT")


async def found(
    config: SwarmConfig, manifest: Manifest, thread: LoopThread, prepare: Callable[[Service], None]
) -> Service:
    """Start a run; `prepare` gets the service before it starts."""
    transport = await Libp2pTransport.create(config.endpoint, config.expiry_s)

    async def assembled() -> Service:
        clock = SwarmClock()
        admission = admission_of(config, transport.peer_id)
        directory = await DhtDirectory.create(transport, admission, clock, (), config.expiry_s)
        service = build_service(config, manifest, transport, directory, thread, clock)
        prepare(service)
        return service

    return await _started(transport, assembled)


async def join(config: SwarmConfig, thread: LoopThread) -> Service:
    """Join a run through any address that leads to it."""
    transport = await Libp2pTransport.create(config.endpoint, config.expiry_s)

    async def assembled() -> Service:
        admission = admission_of(config, transport.peer_id)
        way = await connect_any(transport, config, admission)
        directory = await DhtDirectory.create(
            transport, admission, way.clock, way.through, config.expiry_s
        )
        return build_service(config, way.manifest, transport, directory, thread, way.clock)

    return await _started(transport, assembled)


async def _started(
    transport: Libp2pTransport, assembled: Callable[[], Awaitable[Service]]
) -> Service:
    try:
        service = await assembled()
    except BaseException:
        await transport.close()
        raise
    try:
        await service.start()
        await service.be_found()
    except BaseException:
        await service.stop(0.0)
        raise
    return service


async def persistently(enter: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Return what `enter` does; call it again where its failure proves nothing.

    Raises:
        SwarmError: it failed while this process ran all the time, or again and again.
    """
    for left in reversed(range(TRIES)):
        stalls = LoopStalls()
        stalls.look()
        watching = asyncio.create_task(stalls.watch(), name="stalls")
        try:
            async with asyncio.timeout(TRY_S):
                return await enter()
        except (SwarmError, TimeoutError) as error:
            still_s = stalls.look()
            if left and (isinstance(error, NobodyIntroduces) or still_s >= _STILL_S):
                _log.info("entering the run again, having stood still for %.1f s: %s",
                          still_s, error)  # fmt: skip
                continue
            if isinstance(error, SwarmError):
                raise
            raise SwarmError(
                "the network did not get ready in time; try again, or see the log for what it "
                "waited for"
            ) from error
        finally:
            watching.cancel()
    raise AssertionError("the last try ends")


def _random_id() -> str:
    return secrets.token_hex(4)


def build_service(
    config: SwarmConfig,
    manifest: Manifest,
    transport: Transport,
    directory: Directory,
    thread: LoopThread,
    clock: Callable[[], float] = time.time,
    random_id: Callable[[], str] = _random_id,
) -> Service:
    """Put a peer's network side together; it does nothing yet.

    `clock` returns the swarm's time, `random_id` what no two rounds have in common.

    Raises:
        ConfigError: the files with key or allowed peers cannot be used, or the run wants some.
    """
    admission = admission_of(config, transport.peer_id)
    rules = manifest.rules
    known = KnownPeers(config.run, config.peers_path)
    age = RunAge(manifest.born_s, clock)
    standing = Standing(config.run, config.standing_path)
    certified = Certified(
        f"{manifest.run} {manifest.born_s!r}", transport.peer_id, transport.identity.sign,
        transport.verify, standing,
    )  # fmt: skip
    claims = Claims(certified, clock, config.expiry_s)
    roster = Roster(
        admission, len(manifest.fragment_elements), manifest.digest[:16], rules.group_size, age,
        standing, claims,
    )  # fmt: skip
    roster.addresses.update(
        (peer_id, places) for peer_id, places in known.addresses.items()
        if peer_id != transport.peer_id
    )  # fmt: skip
    waits = _waits_of(config)
    services: list[Service] = []

    def on_boundary(steps: int, merges: int) -> None:
        thread.post(services[0].on_boundary, steps, merges)

    context = Context(
        config=config,
        manifest=manifest,
        transport=transport,
        directory=directory,
        mailbox=TrainerMailbox(_store_of(manifest), on_boundary),
        admission=admission,
        roster=roster,
        agenda=Agenda(
            fragments=len(manifest.fragment_elements),
            local_steps_per_round=rules.local_steps_per_round,
            target_tokens=rules.target_batch_tokens if rules.average == "gradient" else 0,
        ),
        timing=_timing_of(config, roster, waits),
        codec=codec_named(rules.wire),
        standing=standing,
        updates=[rules.outer],
        offload=thread.offload,
        random_id=random_id,
        clock=clock,
        age=age,
        certified=certified,
        claims=claims,
        known=known,
        pacer=Pacer(config.upload_limit_bytes_per_s),
        routes=_routes_of(config, transport, roster, admission, waits),
        waits=waits,
    )
    services.append(Service(context))
    context.mailbox.on_refusal = lambda refusal: thread.post(services[0].on_refusal, refusal)
    context.mailbox.on_merged = lambda anchor: thread.post(services[0].on_merged, anchor)
    return services[0]


def _store_of(manifest: Manifest) -> AnchorStore:
    rules = manifest.rules
    gradients = rules.average == "gradient"
    # AdamW's two moments; the step itself comes from whoever trains.
    rows = 2 if gradients else rules.outer.rows
    return AnchorStore(manifest.fragment_elements, rows, rules.overlap_weight, gradients=gradients)


def _waits_of(config: SwarmConfig) -> Waits:
    _, beat_s = beat_pause_s(config.expiry_s, 0.0)
    return Waits(
        answer_s=config.endpoint.connect_s,
        stall_s=config.endpoint.stall_s,
        floor_s=config.round_floor_s,
        beat_s=beat_s,
        life_s=config.expiry_s,
    )


def _timing_of(config: SwarmConfig, roster: Roster, waits: Waits) -> RoundTiming:
    def floor_s() -> float:
        others = (record.peer_id for record in roster.others if record.state == TRAINING)
        return waits.floor_s(others)

    return RoundTiming(
        floor_s=floor_s,
        ceiling_s=config.round_ceiling_s,
        slowest_bytes_per_s=config.slowest_link_bytes_per_s,
    )


def _routes_of(
    config: SwarmConfig,
    transport: Transport,
    roster: Roster,
    admission: Admission,
    waits: Waits,
) -> Routes:
    relay = Relay(
        config.relay_limit_bytes_per_s,
        waits.answer_s,
        idle_s=2 * config.round_ceiling_s,
        is_member=roster.sees,
        look_s=config.expiry_s,
    )
    return Routes(transport, roster, relay, lambda peer_id: opening_to(peer_id, admission), waits)

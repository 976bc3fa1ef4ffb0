"""How a peer gets into the network: all of it is started, or nothing is left.

What fails while a process stands still proves nothing: the answer may have come in time and not
been read, or the peer that was asked stood still as well, as all do on one machine. So it is done
again. So it is where the peer that let a newcomer in was lost before it could introduce it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atomtrain.errors import SwarmError
from atomtrain.swarm.catchup.joining import connect_any
from atomtrain.swarm.membership.config import Manifest, SwarmConfig
from atomtrain.swarm.membership.deadlines import LoopStalls
from atomtrain.swarm.membership.directory import DhtDirectory, NobodyIntroduces, SwarmClock
from atomtrain.swarm.node.assembly import admission_of, build_service
from atomtrain.swarm.node.network_thread import LoopThread
from atomtrain.swarm.node.service import Service
from atomtrain.swarm.transport.libp2p import Libp2pTransport

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
    transport = await Libp2pTransport.create(config)

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
    transport = await Libp2pTransport.create(config)

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

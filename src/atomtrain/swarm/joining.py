"""How a newcomer finds its way in: through whichever of the given addresses leads to its run."""

from __future__ import annotations

import asyncio

from atomtrain.errors import SwarmError
from atomtrain.swarm.admission import Admission
from atomtrain.swarm.config import PROTOCOL, Manifest, SwarmConfig
from atomtrain.swarm.libp2p import Libp2pTransport, peer_of
from atomtrain.swarm.messages import BadMessage
from atomtrain.swarm.transfer import NotAdmitted, ask_manifest
from atomtrain.swarm.transport import LinkLost, PeerRefused


async def connect_any(
    transport: Libp2pTransport, config: SwarmConfig, admission: Admission
) -> tuple[Manifest, tuple[str, ...]]:
    """Try all addresses at once; return the run's manifest and the addresses that led to the run.

    Raises:
        SwarmError: none did; one line that says for each address why.
    """
    answers = await asyncio.gather(*(_try(transport, config, admission, a) for a in config.join))
    found = [
        (answer, address)
        for answer, address in zip(answers, config.join, strict=True)
        if isinstance(answer, Manifest)
    ]
    if not found:
        raise SwarmError(f"cannot join run {config.run!r}: " + "; ".join(map(str, answers)))
    return found[0][0], tuple(address for _, address in found)


async def _try(
    transport: Libp2pTransport, config: SwarmConfig, admission: Admission, address: str
) -> Manifest | str:
    """Return the manifest, or why there is none at this address."""
    peer_id = peer_of(address)
    if peer_id == transport.peer_id:
        return f"{address} is this peer's own"
    transport.learn(peer_id, (address,))
    try:
        async with asyncio.timeout(config.connect_s):
            channel = await transport.open(peer_id)
        try:
            return await ask_manifest(channel, admission, config.connect_s)
        finally:
            channel.close()
    except PeerRefused as refusal:
        answer = refusal.answer
        if answer.protocol != PROTOCOL:
            return (
                f"the peer at {address} speaks protocol {answer.protocol}, this one {PROTOCOL}: "
                "install the same version of atomtrain"
            )
        if answer.run == config.run:
            return f"the peer at {address} turns this one away: {answer.reason}"
        return (
            f"the peer at {address} trains run {answer.run!r}; use that name, "
            f"or an address of a peer that trains {config.run!r}"
        )
    except NotAdmitted as error:
        return (
            f"the peer at {address} is none that this one admits, though it trains run "
            f"{config.run!r} ({error}); check the address, --run-key and --allow"
        )
    except BadMessage as error:
        return f"what answers at {address} is no ATOM peer of this version ({error})"
    except (LinkLost, TimeoutError):
        return (
            f"no peer answers at {address} within {config.connect_s:.0f} s; check that it runs, "
            "that address and port are right, and that no firewall is between"
        )

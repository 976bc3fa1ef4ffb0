"""Membership records in hivemind's hash table, which all peers of a run keep together.

Every node checks what it is asked to keep, and what it is told: only records of this run, signed by
the peer they speak of, and, where the run has a key, sealed with it. So nobody can put anything in
another peer's place, or fill the table with what is not a record.

Records expire by comparing times of different machines: by the swarm's time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.stamps import steady_s
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.records import RecordReader, sign_record
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.libp2p import Libp2pTransport, peer_of

_REPLICAS = 8
"""Nodes that keep the records: the nearest to their key."""
_READ = 3
"""Of them so many are read, others each time: all keep the same, and each tells all records."""
_START_S = 15.0
_ANSWER_S = 3.0
_GREETINGS = 3


class NobodyIntroduces(SwarmError):  # noqa: N818 - an event of every day, not an error of ours
    """Whoever let this peer in does not answer for the hash table: it is gone, or stands still."""


class DhtDirectory:
    """Membership records in the hash table."""

    def __init__(
        self,
        node: Any,
        identity: Identity,
        admission: Admission,
        clock: SwarmClock,
        reader: RecordReader,
    ) -> None:
        """Use a running node; see `create`."""
        from hivemind.dht.routing import DHTID

        self._node = node
        self._identity = identity
        self._admission = admission
        self._clock = clock
        self._reader = reader
        self._key = DHTID.generate(source=_key_of(admission.run))
        self._beside = DHTID(self._key ^ 1)
        self._keepers: dict[Any, Any] = {}

    @classmethod
    async def create(
        cls,
        transport: Libp2pTransport,
        admission: Admission,
        clock: SwarmClock,
        through: tuple[str, ...],
        expiry_s: float,
    ) -> DhtDirectory:
        """Join the hash table through the peers with these addresses, or start one without any.

        `expiry_s`: how long records live; nodes that do not answer for a tenth of it count as lost.

        Raises:
            NobodyIntroduces: none of them lets this peer in.
        """
        from hivemind.dht.node import DHTNode

        follow_clock(clock)
        reader = RecordReader(admission.run)
        try:
            async with asyncio.timeout(_START_S):
                node = await DHTNode.create(
                    p2p=transport.p2p,
                    initial_peers=list(through) or None,
                    num_replicas=_REPLICAS,
                    wait_timeout=max(_ANSWER_S, expiry_s / 10),
                    cache_locally=False,
                    cache_nearest=0,
                    record_validator=record_validator(admission, clock, reader),
                    # Whether others can dial this peer shows when they do: behind a NAT they
                    # cannot, and reach it through a relay.
                    strict=False,
                    ensure_bootstrap_success=False,
                )
        except (RuntimeError, TimeoutError, OSError) as error:
            raise NobodyIntroduces(
                f"no peer of run {admission.run!r} answered for the membership records: "
                f"{str(error)[:200] or type(error).__name__}; try again, or another peer's address"
            ) from error
        directory = cls(node, transport.identity, admission, clock, reader)
        if through and not await directory._met(through):
            raise NobodyIntroduces(
                f"no peer of run {admission.run!r} answered for the membership records; try again, "
                "or another peer's address"
            )
        return directory

    async def _met(self, through: tuple[str, ...]) -> bool:
        """Say whether a node at one of these addresses answers; on a busy machine not at once."""
        for _ in range(_GREETINGS):
            for address in through:
                if await self.introduce(peer_of(address)):
                    return True
        return False

    async def publish(self, record: bytes, expiry_s: float) -> None:
        """Store this peer's record."""
        expires_s = self._clock() + expiry_s
        signed = sign_record(self._identity, self._admission.run, record, expires_s)
        value = self._node.protocol.serializer.dumps(signed)
        self._keepers = keepers = await self._nearest()
        await asyncio.gather(
            *(self._store(*keeper, value, expires_s) for keeper in keepers.items())
        )

    async def records(self) -> dict[str, bytes]:
        """Return all peers' records, each signed by its peer and valid now."""
        key, own_node = self._key, self._node.node_id
        keepers = self._keepers or await self._nearest()
        others = [peer for node, peer in keepers.items() if node != own_node]
        random.shuffle(others)
        kept, told = [self._node.protocol.storage.get(key)], 0
        while others and told < _READ:
            asked, others = others[: _READ - told], others[_READ - told :]
            # As hivemind's own look-ups do: who did not answer is not asked again for a while.
            answers = await asyncio.gather(
                *(self._node._call_find_with_blacklist(peer, [key]) for peer in asked)
            )
            heard = [answer[key][0] for answer in answers if answer is not None]
            told += len(heard)
            kept += heard
        return self._opened(found.value for found in kept if found is not None)

    async def _nearest(self) -> dict[Any, Any]:
        """Return the peers that keep the records, by node.

        They are looked for by the key's neighbour, to which the same nodes are nearest, and of
        which none has anything to tell: else each would send all records on the way.
        """
        found = await self._node.find_nearest_nodes(
            [self._beside], k_nearest=_REPLICAS, beam_size=_REPLICAS
        )
        nearest: dict[Any, Any] = found[self._beside]
        return nearest

    async def _store(self, node: Any, keeper: Any, value: bytes, expires_s: float) -> None:
        protocol, peer_id = self._node.protocol, self._identity.peer_id
        if node == self._node.node_id:
            protocol.storage.store(self._key, value, expires_s, subkey=peer_id)
        else:
            await protocol.call_store(keeper, [self._key], [value], [expires_s], subkeys=[peer_id])

    def _opened(self, told: Iterable[Any]) -> dict[str, bytes]:
        """Return the records that are good, of each peer the latest."""
        latest: dict[str, tuple[float, bytes]] = {}
        entries = (
            entry for records in told if hasattr(records, "items") for entry in records.items()
        )
        for peer_id, (value, _) in entries:
            try:
                signed = self._node.protocol.serializer.loads(value)
                record, expires_s = self._reader.open(peer_id, signed, self._clock())
            except BadMessage:
                continue
            latest[peer_id] = max(latest.get(peer_id, (0.0, b"")), (expires_s, record))
        return {peer_id: record for peer_id, (_, record) in latest.items()}

    async def introduce(self, peer_id: str) -> bool:
        """Make this peer and another, to which there is a connection, know each other's tables."""
        from hivemind.p2p import PeerID

        return await self._node.protocol.call_ping(PeerID.from_base58(peer_id)) is not None


def record_validator(admission: Admission, clock: Callable[[], float], reader: RecordReader) -> Any:
    """Return what decides which records a node of the hash table keeps and believes."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.utils import MSGPackSerializer

    key = DHTID.generate(source=_key_of(admission.run)).to_bytes()

    class Validator(RecordValidatorBase):  # type: ignore[misc]
        """Keeps membership records of the run, and nothing else."""

        def validate(self, record: DHTRecord) -> bool:
            if record.key != key:
                return False
            try:
                peer_id = MSGPackSerializer.loads(record.subkey)
                value = MSGPackSerializer.loads(record.value)
                if not isinstance(peer_id, str):
                    return False
                body, expires_s = reader.open(peer_id, value, clock())
                admission.unseal(peer_id, body)
            except Exception:  # noqa: BLE001 - whatever strange bytes do to the decoder
                return False
            return bool(expires_s == record.expiration_time)

    return Validator()


def follow_clock(clock: SwarmClock) -> None:
    """Have hivemind's hash table reckon in the swarm's time.

    hivemind takes the time of day everywhere for the swarm's. That may be off, and somebody may
    set it while a run goes on: all records would expire at once. It gives no other way in. It
    counts for the whole process: all runs in it should be of one time.
    """
    from hivemind.dht import node, protocol, routing
    from hivemind.utils import timed_storage

    for module in (node, protocol, routing, timed_storage):
        assert hasattr(module, "get_dht_time")
        module.get_dht_time = clock


def _key_of(run: str) -> str:
    return f"atom/{run}/peers"


class SwarmClock:
    """The swarm's time, that of its founder, in seconds since 1970; call it to read it.

    A newcomer measures, when it asks for the manifest, how far its clock is from that of the peer
    it asks, and reckons in that peer's time from then on. The reckoning goes by a clock that nobody
    sets, and that goes on while a machine sleeps: correcting the time of day, or closing a laptop,
    does no harm.
    """

    def __init__(self, offset_s: float = 0.0, error_s: float = 0.0) -> None:
        """`offset_s`: by how much the swarm's time is ahead of this machine's, `error_s` at most
        more or less."""
        self.offset_s, self.error_s = offset_s, error_s
        self._base_s = time.time() + offset_s - steady_s()

    @classmethod
    def measured(cls, asked_s: float, told_s: float, answered_s: float) -> SwarmClock:
        """Return the clock of a peer that was asked for its time.

        Args:
            asked_s: This machine's time when the question left.
            told_s: The swarm's time in the answer. It is off by half the round trip at most.
            answered_s: This machine's time when the answer came.
        """
        return cls(told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)

    def __call__(self) -> float:
        """Return the swarm's time."""
        return self._base_s + steady_s()

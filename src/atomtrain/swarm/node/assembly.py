"""A peer's network side, put together from its parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.stamps import RunAge
from atomtrain.swarm.anchors.trainer_mailbox import Desk
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.membership.admission import Admission, read_allowed, read_key
from atomtrain.swarm.membership.agenda import Agenda
from atomtrain.swarm.membership.config import Manifest, SwarmConfig
from atomtrain.swarm.membership.deadlines import RoundTiming, Waits
from atomtrain.swarm.membership.guards import Standing
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.membership.reachability import Ways
from atomtrain.swarm.membership.records import TRAINING
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.node.network_thread import LoopThread
from atomtrain.swarm.node.service import Service, beat_pause_s
from atomtrain.swarm.rounds.context import Context, opening_to
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.relaying import Relay
from atomtrain.swarm.transport.transport import Directory, Transport


def _random_id() -> str:
    return secrets.token_hex(4)


def admission_of(config: SwarmConfig, peer_id: str) -> Admission:
    """Return a peer's rule of admission; reads the files that the configuration names.

    Raises:
        ConfigError: one of them cannot be used.
    """
    return Admission(
        run=config.run,
        peer_id=peer_id,
        key=None if config.key_path is None else read_key(config.key_path),
        allowed=None if config.allow_path is None else read_allowed(config.allow_path),
    )


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
        ConfigError: the files with key or allowed peers cannot be used.
    """
    admission = admission_of(config, transport.peer_id)
    rules = manifest.rules
    gradients = rules.average == "gradient"
    store = AnchorStore(
        manifest.fragment_elements,
        # AdamW's two moments; the step itself comes from whoever trains.
        2 if gradients else rules.outer.rows,
        rules.overlap_weight,
        gradients=gradients,
    )
    services: list[Service] = []
    known = KnownPeers(config.run, config.peers_path)
    age = RunAge(manifest.born_s, clock)
    roster = Roster(
        admission, len(manifest.fragment_elements), manifest.digest[:16], rules.group_size, age
    )
    roster.addresses.update(
        (peer_id, places) for peer_id, places in known.addresses.items()
        if peer_id != transport.peer_id
    )  # fmt: skip

    _, beat_s = beat_pause_s(config.expiry_s, 0.0)
    waits = Waits(
        answer_s=config.connect_s,
        stall_s=config.stall_s,
        floor_s=config.round_floor_s,
        beat_s=beat_s,
        life_s=config.expiry_s,
    )

    def floor_s() -> float:
        others = (record.peer_id for record in roster.others if record.state == TRAINING)
        return waits.floor_s(others)

    def on_boundary(steps: int, merges: int) -> None:
        thread.post(services[0].on_boundary, steps, merges)

    context = Context(
        config=config,
        manifest=manifest,
        transport=transport,
        directory=directory,
        desk=Desk(store, on_boundary),
        admission=admission,
        roster=roster,
        agenda=Agenda(
            fragments=len(manifest.fragment_elements),
            local_steps_per_round=manifest.rules.local_steps_per_round,
            target_tokens=rules.target_batch_tokens if gradients else 0,
        ),
        timing=RoundTiming(
            floor_s=floor_s,
            ceiling_s=config.round_ceiling_s,
            slowest_bytes_per_s=config.slowest_link_bytes_per_s,
        ),
        codec=codec_named(manifest.rules.wire),
        standing=Standing(),
        updates=[rules.outer],
        offload=thread.offload,
        random_id=random_id,
        clock=clock,
        age=age,
        known=known,
        pacer=Pacer(config.upload_limit_bytes_per_s),
        ways=Ways(
            transport,
            roster,
            Relay(
                config.relay_limit_bytes_per_s,
                waits.answer_s,
                idle_s=2 * config.round_ceiling_s,
                is_member=roster.sees,
                look_s=config.expiry_s,
            ),
            lambda peer_id: opening_to(peer_id, admission),
            waits,
        ),
        waits=waits,
    )
    services.append(Service(context))
    return services[0]

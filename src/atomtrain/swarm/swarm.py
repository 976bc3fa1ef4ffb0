"""The swarm as the training loop sees it: found or join, cross boundaries, leave.

All methods are called from the training thread. The network has a thread of its own; the two meet
at the `TrainerMailbox`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm.anchors.anchor_store import FragmentAccess
from atomtrain.swarm.anchors.losses import Judge
from atomtrain.swarm.anchors.stamps import best_of
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.anchors.updates import Update
from atomtrain.swarm.membership.config import PROTOCOL, Manifest, SwarmConfig, admission_of
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.membership.records import PeerStatus
from atomtrain.swarm.node import entering
from atomtrain.swarm.node.downloading import Downloading
from atomtrain.swarm.node.entering import TRIES, TRY_S, persistently
from atomtrain.swarm.node.network_thread import LoopThread
from atomtrain.swarm.node.service import Service
from atomtrain.swarm.node.settling import finish, settle
from atomtrain.swarm.transport.libp2p import import_hivemind

_log = logging.getLogger("atomtrain.swarm")
_START_S = TRIES * (TRY_S + 30.0)
"""Of all tries; each has its own deadlines."""
_CLOSE_S = 30.0
"""What closing everything may take after a leave's deadline, on a machine that stands still."""


@dataclass(frozen=True)
class Progress:
    """Where the swarm is."""

    round: int
    """Index of the next round."""
    tokens: int
    """Tokens that went into the anchors so far: the largest count of any fragment."""


class SwarmState(NamedTuple):
    """What a checkpoint keeps of the swarm."""

    tensors: dict[str, torch.Tensor]
    """Anchors, velocities and residuals, 1-D float32, by name; not to be changed."""
    meta: dict[str, Any]
    """Versions, token counts and round, JSON-able."""


class Swarm:
    """One peer's membership in one run.

    `found` or `join`; then `download` (newcomer) or `load_state_dict` and `rebase` (resumed peer);
    then `boundary` between steps; at last `leave`.
    """

    def __init__(self, config: SwarmConfig, thread: LoopThread, service: Service) -> None:
        """Use `found` or `join`."""
        self.config = config
        self.manifest = service.context.manifest
        self._thread = thread
        self._service = service
        self._mailbox = service.context.mailbox
        self._downloading = Downloading(thread, service)
        self._left = False
        self._told = False

    @classmethod
    def found(
        cls,
        config: SwarmConfig,
        manifest: Manifest,
        access: FragmentAccess,
        update: Update | None = None,
        born_s: float | None = None,
        judge: Judge | None = None,
    ) -> Swarm:
        """Start a run: the anchors are the current parameters, version 0.

        `update` is the step that gradients are for, where they are averaged: see `use_update`.
        `born_s` is when the run began, as `state_dict` has told it, if it is resumed. `judge` is
        as in `use_judge`.

        Raises:
            SwarmError: the port is in use, or the parameters do not fit the manifest.
        """
        if manifest.run != config.run:
            raise SwarmError(f"the manifest is of run {manifest.run!r}, not {config.run!r}")
        manifest = Manifest(
            manifest.run,
            manifest.fragment_elements,
            manifest.payload,
            config.rules,
            born_s=time.time() if born_s is None else born_s,
        )
        manifest.encode()

        def prepare(service: Service) -> None:
            if update is not None:
                service.context.updates[0] = update
            service.context.mailbox.store.adopt_local(access)
            service.set_training()

        swarm = cls._enter(config, lambda thread: entering.found(config, manifest, thread, prepare))
        if judge is not None:
            swarm.use_judge(judge)
        return swarm

    @classmethod
    def join(cls, config: SwarmConfig, judge: Judge | None = None) -> Swarm:
        """Join a run through any of `config.join`; afterwards `manifest` is known.

        The rules of averaging are the manifest's, whatever `config` says. `judge` is as in
        `use_judge`; who needs the manifest to make a model calls that later.

        Raises:
            SwarmError: no address leads to a peer of this run; says what each led to.
        """
        if not config.join and not KnownPeers(config.run, config.peers_path).addresses:
            raise SwarmError("no address to join; give at least one that a peer of the run prints")
        swarm = cls._enter(config, lambda thread: entering.join(config, thread))
        if judge is not None:
            swarm.use_judge(judge)
        return swarm

    @classmethod
    def _enter(
        cls, config: SwarmConfig, enter: Callable[[LoopThread], Awaitable[Service]]
    ) -> Swarm:
        admission_of(config, "")  # mistakes in its files are told before anything starts
        import_hivemind()  # on this thread, before any deadline runs
        thread = LoopThread()
        try:
            service = thread.call(persistently(lambda: enter(thread)), _START_S)
        except BaseException:
            thread.stop()
            raise
        return cls(config, thread, service)

    def use_update(self, update: Update) -> None:
        """Say what rounds apply, in a run that averages gradients; before `download`.

        It must compute the same bits on all peers.
        """
        self._service.context.updates[0] = update

    def use_judge(self, judge: Judge) -> None:
        """Have what others give judged by this peer's own loss; before `download` or `rebase`.

        `judge` returns the mean loss, nats per token, of the model as it is now, on a few sequences
        of this peer's own text: the same ones each time. It is called on the training thread,
        within `boundary`, `download`, `rebase`, `settle` and `finish`, and must change nothing.
        What makes that loss worse is undone. Without a judge the swarm is believed.
        """
        self._mailbox.use_judge(judge)

    @property
    def version(self) -> int:
        """Lowest version of any of this peer's anchors; with gradients, the steps made."""
        return min((s.version for s in self._mailbox.store.stamps() if s is not None), default=0)

    @property
    def fetched_bytes(self) -> int:
        """What came of anchors from other peers so far, cut-off transfers included."""
        return self._service.context.timing.fetched_bytes

    @property
    def awaited(self) -> bool:
        """A round that this peer has given its part to has not ended: with gradients, wait."""
        return self._service.busy

    def download(self, access: FragmentAccess) -> Progress:
        """Fetch all anchors, write them to the model, and take part in rounds from now on.

        Blocks until done. A donor that dies is replaced by another, and so is one whose model is
        worse than this peer's own before, if there is a judge.

        Raises:
            SwarmError: a fragment could not be had from anybody, or no model that is better.
        """
        self._downloading.download(access)
        self._thread.post(self._service.set_training)
        return self.progress()

    def rebase(self, access: FragmentAccess) -> Progress:
        """Bring a resumed peer, after `load_state_dict`, up to what the swarm holds now.

        Anchors that others have newer are fetched, and the parameters move by the difference: what
        this peer had learnt beyond its old anchors is kept; their residuals are dropped. Blocks
        until done.

        Raises:
            SwarmError: a fragment could not be had from anybody.
        """
        self._downloading.catch_up(access)
        self._thread.post(self._service.set_training)
        return self.progress()

    def boundary(
        self, *, steps: int, tokens: int, tokens_per_s: float, step_s: float, access: FragmentAccess
    ) -> list[RoundReport]:
        """Cross the boundary between two steps; does not wait for anybody.

        `steps` and `tokens` are those since the last call, this peer's own; `tokens_per_s` and
        `step_s` its present speed. Copies a fragment if a round asks for one, and merges what
        rounds have brought. Returns the rounds that ended since the last call.
        """
        if self._mailbox.trial is None and not self._told:
            self._told = True
            _log.warning("no judge was given: what other peers give is taken without a trial")
        return self._mailbox.boundary(
            steps=steps, tokens=tokens, tokens_per_s=tokens_per_s, step_s=step_s, access=access
        )

    def wait(self, within_s: float) -> bool:
        """Wait until the next boundary has something to copy, merge or report; say whether it has.

        For a trainer that has nothing to do until a round ends: crossing boundaries again and again
        takes the processor from the round.
        """
        return self._mailbox.wait(within_s)

    def settle(
        self, access: FragmentAccess, stop: Callable[[], bool] = lambda: False
    ) -> list[RoundReport]:
        """After the last step: have what this peer has learnt since its last rounds averaged, too.

        Rounds follow one another until every fragment has been in one, and its parameters are the
        anchor. Blocks until done, until no other peer takes part, until nothing has come of it for
        as long as two rounds may take, or until `stop` says so. Returns the rounds that ended.
        """
        self._thread.post(self._service.context.agenda.hasten)
        return settle(self._service.context, access, stop)

    def finish(self, access: FragmentAccess, within_s: float) -> list[RoundReport]:
        """Before leaving: end the round that this peer is in, enter no other, and say goodbye.

        So nobody waits for a peer that saves what it has. Blocks until done, `within_s` at most: a
        round that takes longer goes on until `leave`. Returns the rounds that ended.
        """
        self._thread.post(self._service.withdraw)
        reports = finish(self._service.context, access, lambda: self._service.in_rounds, within_s)
        self._thread.post(self._service.say_goodbye)
        return reports

    @property
    def address(self) -> str:
        """The line that others paste to join."""
        return self._service.context.transport.address

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self._service.context.peer_id

    def peers(self) -> list[PeerStatus]:
        """Return all members by their last records, this peer first."""
        return self._service.context.roster.statuses()

    def expelled(self) -> dict[str, str]:
        """Return whom this peer counts as gone for good, by id, and what each was shown to do."""
        return self._service.context.standing.all_expelled()

    def known_addresses(self) -> tuple[str, ...]:
        """Return the addresses of all other peers ever seen: keep them to be able to come back."""
        known = self._service.context.roster.addresses.copy()  # the loop's thread changes it
        return tuple(dict.fromkeys(a for addresses in known.values() for a in addresses))

    def progress(self) -> Progress:
        """Return where the swarm is, as far as this peer knows."""
        own = self._mailbox.store.stamps()
        best = self._service.context.roster.best()
        most = best_of((*own, *best))
        tokens = 0 if most is None else most.tokens
        return Progress(self._service.context.agenda.next_round, tokens)

    def limit_upload(self, bytes_per_s: float) -> None:
        """Send at most so many bytes of averages and state a second from now on.

        Args:
            bytes_per_s: Above 0; infinite for no limit.

        Raises:
            ConfigError: it is not.
        """
        config = replace(self.config, upload_limit_bytes_per_s=bytes_per_s)
        self._service.context.pacer.limit_bytes_per_s = config.upload_limit_bytes_per_s

    def state_dict(self) -> SwarmState:
        """Return what a checkpoint needs to resume; call between two boundaries."""
        meta = self._mailbox.store.meta()
        meta["protocol"] = PROTOCOL
        meta["run"] = self.config.run
        meta["rules"] = asdict(self.manifest.rules)
        meta["born_s"] = self.manifest.born_s
        meta["next_round"] = self._service.context.agenda.next_round
        meta["known_addresses"] = list(self.known_addresses())
        meta["certificates"] = self._service.context.certified.texts(self._mailbox.store.stamps())
        return SwarmState(self._mailbox.store.tensors(), meta)

    def load_state_dict(self, state: SwarmState) -> None:
        """Take back what `state_dict` returned; the model must hold the checkpoint's parameters.

        Raises:
            SwarmError: it is of another run or model.
        """
        if state.meta.get("run") != self.config.run:
            raise SwarmError(
                f"the checkpoint's swarm state is of run {state.meta.get('run')!r}, not "
                f"{self.config.run!r}; resume with that run's name"
            )
        present = asdict(self.manifest.rules)
        before = {
            key: state.meta.get("rules", {}).get(key, value) for key, value in present.items()
        }
        if before != present:
            _log.warning(
                "the run's rules have changed since the checkpoint: %s",
                ", ".join(f"{k} {before[k]} to {present[k]}" for k in before
                          if before[k] != present[k]),
            )  # fmt: skip
        self._mailbox.store.load(state.tensors, state.meta)
        texts = list(state.meta.get("certificates", ()))
        self._thread.post(self._service.context.certified.take_back, texts)
        self._thread.post(self._service.context.agenda.observe, int(state.meta["next_round"]))

    def leave(self, deadline_s: float = 10.0) -> None:
        """Say goodbye, finish or abandon the round under way, close everything; idempotent."""
        if self._left:
            return
        self._left = True
        try:
            self._thread.call(self._service.stop(deadline_s), deadline_s + _CLOSE_S)
        finally:
            self._thread.stop()


__all__ = ["Progress", "Swarm", "SwarmState"]

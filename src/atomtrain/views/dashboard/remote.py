"""A swarm seen from outside: asks its peers again and again what they know of each other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atomtrain.errors import SwarmError
from atomtrain.views.dashboard.source import Message, SwarmTable

if TYPE_CHECKING:
    from atomtrain.swarm import SwarmConfig

ASKED = "the swarm"
"""Stands where a peer's name is, for news of the asking itself."""
_INTERVAL_S = 0.8
_FIRST_S = 30.0
_MOST_ADDRESSES = 64


class SwarmSource:
    """Follows a swarm through any of its peers; when one goes, through those it told of."""

    def __init__(self, config: SwarmConfig, addresses: Sequence[str]) -> None:
        """Start to ask, on a thread of its own; returns when the first answer is there.

        Raises:
            SwarmError: nobody answered.
        """
        from atomtrain.swarm.transport.libp2p import import_hivemind

        import_hivemind()  # before any deadline runs

        self.title = config.run
        self._config, self._addresses = config, list(addresses)
        self._table = SwarmTable()
        self._lock = threading.Lock()
        self._answers: list[tuple[dict[str, Any] | None, float]] = []
        """What peers said, and when; `None`: nobody answered any more."""
        self._rounds: dict[tuple[int, int], dict[str, Any]] = {}
        self._news: list[Message] = []
        self._reason = "no answer"
        self._answered, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm watcher", daemon=True)
        self._thread.start()
        if not self._answered.wait(_FIRST_S):
            self.close()
            raise SwarmError(
                f"no peer of run {config.run!r} answered ({self._reason}); "
                "'atom swarm ping RUN@ADDRESS' says why"
            )

    def poll(self) -> list[Message]:
        with self._lock:
            answers, self._answers = self._answers, []
            news, self._news = self._news, []
        messages = list(news)
        for status, time_s in answers:
            if status is None:
                messages += map(self._of_run, self._table.lose(time_s))
                continue
            rows, asked = status.get("peers"), str(status.get("asked"))
            messages += map(self._of_run, self._table.replace(rows, time_s, asked))
            if rounds := self._new_rounds(status, time_s):
                messages.append(self._asked(rounds))
        return messages

    def snapshot(self) -> list[Message]:
        rounds = list(self._rounds.values())
        told = [self._asked(rounds)] if rounds else []
        return [*told, *map(self._of_run, self._table.snapshot())]

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except Exception as error:  # noqa: BLE001 - the thread's edge: the page must say why
            self._say(f"the swarm cannot be watched any more: {error}")

    async def _follow(self) -> None:
        from atomtrain.errors import BadMessage
        from atomtrain.swarm.node.probe import probing
        from atomtrain.swarm.transport.transport import LinkLost

        silent = False
        async with probing(self._config) as probe:
            while not self._stopped.is_set():
                for address in list(self._addresses):
                    try:
                        status = await probe.status(address)
                    except (LinkLost, BadMessage) as error:
                        self._reason = str(error)
                        continue
                    self._take(status, address)
                    silent = False
                    break
                else:
                    if not silent:
                        self._say(f"no peer of the swarm answers: {self._reason}")
                        with self._lock:
                            self._answers.append((None, time.time()))
                    silent = True
                await asyncio.sleep(_INTERVAL_S)

    def _take(self, status: dict[str, Any], address: str) -> None:
        peers = status.get("peers")
        told = [
            other
            for peer in (peers if isinstance(peers, list) else ())
            if isinstance(peer, dict) and isinstance(peer.get("addresses"), list)
            for other in peer["addresses"]
            if isinstance(other, str)
        ]
        # Who answered is asked first again; then those it told of, then those known before.
        self._addresses = list(dict.fromkeys((address, *told, *self._addresses)))[:_MOST_ADDRESSES]
        with self._lock:
            self._answers.append((status, time.time()))
        self._answered.set()

    def _say(self, message: str) -> None:
        event = {"event": "warning", "time_s": time.time(), "message": message}
        with self._lock:
            self._news.append(self._asked([event]))

    def _asked(self, events: list[dict[str, Any]]) -> Message:
        return self._of_run(Message("events", {"peer": ASKED, "events": events}))

    def _of_run(self, message: Message) -> Message:
        return message._replace(body={"run": self.title, **message.body})

    def _new_rounds(self, status: dict[str, Any], time_s: float) -> list[dict[str, Any]]:
        """Return the rounds of which there was no word yet, as events."""
        found = []
        try:
            names = {peer["peer_id"]: str(peer["name"]) for peer in status["peers"]}
            for entry in status["rounds"]:
                key = (int(entry["round"]), int(entry["fragment"]))
                members = [part["peer_id"] for part in entry["reduces"]]
                if key not in self._rounds:
                    self._rounds[key] = {
                        "event": "round",
                        "time_s": time_s,
                        "round": key[0],
                        "fragment": key[1],
                        "outcome": "seen",
                        "contributors": len(members),
                        "members": [names.get(member, str(member)[-8:]) for member in members],
                        "peer_ids": [str(member) for member in members],
                    }
                    found.append(self._rounds[key])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return found  # a status of another version: its rounds are not shown
        while len(self._rounds) > 200:
            del self._rounds[next(iter(self._rounds))]
        return found

"""Peers of `atom bench join` and `relay`: real swarm, real state, steps that only take time.

On a machine with a GPU a step leaves the processor to the network; here it is a wait, so that peers
which share the processor of one machine do not slow each other where real ones would not.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from atombench.links.peers import Reply
from atomtrain.swarm import Endpoint, Manifest, Rules, Swarm, SwarmConfig
from atomtrain.swarm.transport.libp2p import import_hivemind
from atomtrain.swarm.transport.messages import Ping, Pong
from atomtrain.swarm.transport.sealed import SealedChannel

_CHUNK_BYTES = 1 << 20


class JoinPeer:
    """What `atom bench join` tells a peer to do."""

    def __init__(self) -> None:
        """Do nothing yet."""
        self._fragments: list[torch.Tensor] = []
        self._swarm: Swarm | None = None
        self._steps: list[float] = []
        self._outcomes: list[str] = []
        self._ended = threading.Event()
        self._trainer: threading.Thread | None = None

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Return what it can be told, by name."""
        return {
            "warm": self.warm,
            "found": self.found,
            "join": self.join,
            "steps": self.steps,
            "leave": self.leave,
            "join_address": self.address,
            "tcp": self.tcp,
        }

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        """Lend a fragment to the swarm."""
        yield self._fragments[index]

    def warm(self, elements: list[int]) -> Reply:
        """Import what takes long, and have a model's memory: both are no part of joining."""
        import_hivemind()
        self._fragments = [torch.empty(n).fill_(0) for n in elements]
        return {}

    def found(self, host: str, elements: list[int], step_s: float, steps_per_round: int) -> Reply:
        """Found the run, and train."""
        noise = torch.Generator().manual_seed(0)
        self._fragments = [torch.rand(n, generator=noise) for n in elements]
        config = self._config(host, (), steps_per_round)
        self._swarm = Swarm.found(config, Manifest(config.run, tuple(elements)), self)
        self._train(step_s)
        return {"address": self._swarm.address}

    def join(self, host: str, address: str, step_s: float) -> Reply:
        """Join, fetch everything, and train."""
        started_s = time.monotonic()
        self._swarm = Swarm.join(self._config(host, (address,), 1))
        joined_s = time.monotonic()
        self._swarm.download(self)
        downloaded_s = time.monotonic()
        self._train(step_s)
        return {
            "join_s": joined_s - started_s,
            "download_s": downloaded_s - joined_s,
            "address": self._swarm.address,
        }

    def steps(self) -> Reply:
        """Return the times of the steps since the last call, and how rounds ended."""
        taken, self._steps = self._steps, []
        outcomes, self._outcomes = self._outcomes, []
        return {"steps_s": taken, "outcomes": outcomes}

    def leave(self) -> Reply:
        """End training and leave."""
        self._ended.set()
        if self._trainer is not None:
            self._trainer.join()
        if self._swarm is not None:
            self._swarm.leave(2.0)
        return {}

    def address(self) -> Reply:
        """Return where this peer can be joined."""
        assert self._swarm is not None
        return {"address": self._swarm.address}

    def tcp(self, role: str, host: str, port: int, bytes_count: int) -> Reply:
        """Take a part in moving plain bytes to `host`: `send`, `receive`, or `rest`."""
        if role == "send":
            time.sleep(0.5)  # the other one listens by then
            return _send(host, port, bytes_count)
        return _receive(host, port) if role == "receive" else {}

    def _config(self, host: str, join: tuple[str, ...], steps_per_round: int) -> SwarmConfig:
        return SwarmConfig(
            run="bench-join",
            rules=Rules(wire="int4", local_steps_per_round=steps_per_round),
            endpoint=Endpoint(listen_host=host),
            join=join,
            discoverable=False,
        )

    def _train(self, step_s: float) -> None:
        self._trainer = threading.Thread(target=self._run, args=(step_s,), daemon=True)
        self._trainer.start()

    def _run(self, step_s: float) -> None:
        assert self._swarm is not None
        before_s = time.monotonic()
        while not self._ended.is_set():
            time.sleep(step_s)
            for fragment in self._fragments:
                fragment[:1024].add_(1e-3)
            reports = self._swarm.boundary(
                steps=1, tokens=1000, tokens_per_s=1000 / step_s, step_s=step_s, access=self
            )
            self._outcomes += [report.outcome for report in reports]
            now_s = time.monotonic()
            self._steps.append(now_s - before_s)
            before_s = now_s


def _send(host: str, port: int, bytes_count: int) -> Reply:
    block = bytes(_CHUNK_BYTES)
    with socket.create_connection((host, port), 30) as link:
        for _ in range(bytes_count // _CHUNK_BYTES):
            link.sendall(block)
    return {}


def _receive(host: str, port: int) -> Reply:
    """Receive until the sender ends; return the rate from the first bytes on."""
    into = bytearray(_CHUNK_BYTES)
    with socket.create_server((host, port)) as listening:
        listening.settimeout(30)
        link, _ = listening.accept()
        with link:
            count = link.recv_into(into)
            started_s, total = time.monotonic(), 0
            while count:
                count = link.recv_into(into)
                total += count
            return {"bytes_per_s": total / (time.monotonic() - started_s)}


_OPEN_S = 30.0
_FETCH_S = 300.0


class RelayPeer(JoinPeer):
    """A peer of `atom bench relay`: it also fetches state from whom it is told."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Return what it can be told, by name."""
        return {**super().commands(), "members": self.members, "open": self.open,
                "fetch": self.fetch, "passed": self.passed}  # fmt: skip

    def members(self) -> Reply:
        """Return this peer's id, and by member through how many relays it is reached."""
        assert self._swarm is not None
        relays = {peer.peer_id: peer.relays for peer in self._swarm.peers()}
        return {"peer_id": self._swarm.peer_id, "relays": relays}

    def open(self, peer_id: str) -> Reply:
        """Open a stream to a member and have one answer; say how long, and through whom."""

        async def ask(context: Any) -> Reply:
            started_s = time.monotonic()
            channel = await context.open(peer_id)
            try:
                await channel.send(Ping(bytes_count=0))
                await channel.receive(Pong, _OPEN_S)
                through = channel.relay_id if isinstance(channel, SealedChannel) else None
                return {"open_s": time.monotonic() - started_s, "through": through}
            finally:
                channel.close()

        assert self._swarm is not None
        work = ask(self._swarm._service.context)
        return self._swarm._thread.call(work, _OPEN_S)

    def fetch(self, peer_id: str | None, fragment: int = 0) -> Reply:
        """Fetch a fragment from a member; return bytes and seconds, streams included.

        Without a member, do nothing.
        """
        if peer_id is None:
            return {}
        assert self._swarm is not None
        fetcher = self._swarm._service._repairer.fetcher
        started_s = time.monotonic()
        fetched = self._swarm._thread.call(fetcher.fetch_from(peer_id, fragment), _FETCH_S)
        return {
            "seconds": time.monotonic() - started_s,
            "bytes": fetched.anchor.values.nbytes,
        }

    def passed(self) -> Reply:
        """Return the bytes that this peer has passed on."""
        assert self._swarm is not None
        return {"passed_bytes": self._swarm._service.context.routes.relay.passed_bytes}

"""Peers of `atom bench averaging`: one that averages as ATOM does, one with hivemind's averager."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from atombench.averaging.costs import Costs
from atombench.averaging.floors import EncryptedMesh, Mesh
from atombench.links.peers import Reply
from atomtrain.swarm import Endpoint, Manifest, RoundReport, Rules, Swarm, SwarmConfig
from atomtrain.swarm.transport.libp2p import import_hivemind

_BOUNDARY_S = 0.05
"""At most from one boundary to the next, while the trainer waits for a round."""
_LEAVE_S = 3.0
_WARM_UP_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20
_FORMING_S = 3.0
_PATIENCE_S = 30.0
"""Deadlines of connections and rounds: a machine that stands still shall make them slow only."""


class AveragingPeer:
    """Averages one vector with the others, by rounds of a swarm."""

    def __init__(self) -> None:
        self._swarm: Swarm | None = None
        self._meshes: dict[str, Mesh] = {}

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        return {
            "hello": self.hello,
            "listen": self.listen,
            "probe": self.probe,
            "offer_mesh": self.offer_mesh,
            "join_mesh": self.join_mesh,
            "mesh": self.mesh,
            "enter": self.enter,
            "meet": self.meet,
            "round": self.round,
            "check": self.check,
            "leave": self.leave,
        }

    def hello(self) -> Reply:
        """Import what takes long."""
        import_hivemind()

        return {}

    def listen(self, address: str) -> Reply:
        """Take one raw TCP stream; return its port."""
        server = socket.create_server((address, 0))
        threading.Thread(target=_swallow, args=(server,), daemon=True).start()
        return {"port": server.getsockname()[1]}

    def probe(self, address: str, port: int, probe_bytes: int) -> Reply:
        """Return the rate of a raw TCP stream whose window is open already."""
        with socket.create_connection((address, port)) as stream:
            chunk = bytes(_CHUNK_BYTES)

            def send(count_bytes: int) -> float:
                started_s = time.monotonic()
                stream.sendall(count_bytes.to_bytes(8, "big"))
                for sent in range(0, count_bytes, _CHUNK_BYTES):
                    stream.sendall(chunk[: count_bytes - sent])
                stream.recv(1)
                return time.monotonic() - started_s

            way_s = min(send(1) for _ in range(3))
            send(_WARM_UP_BYTES)
            return {"bits_per_s": 8 * probe_bytes / max(send(probe_bytes) - way_s, 1e-9)}

    def offer_mesh(self, address: str, rank: int) -> Reply:
        """Be there for the others' streams, plain and encrypted; return the ports."""
        self._meshes = {"plain": Mesh(rank, address), "encrypted": EncryptedMesh(rank, address)}
        return {"ports": {kind: mesh.port for kind, mesh in self._meshes.items()}}

    def join_mesh(self, addresses: dict[str, list[tuple[str, int]]], elements: int) -> Reply:
        """Open streams to all others, as many as rounds of so many elements have."""
        for kind, mesh in self._meshes.items():
            mesh.connect(addresses[kind], elements)
        return {}

    def mesh(self, at_s: float, kind: str, moved_bytes: int) -> Reply:
        """Send and receive that much, at the same time as all others; return the seconds."""
        time.sleep(max(0.0, at_s - time.monotonic()))
        before_s = time.process_time()
        self._meshes[kind].exchange(moved_bytes)
        took_s = time.monotonic() - at_s
        return {"took_s": took_s, "processor_s": time.process_time() - before_s}

    def enter(
        self,
        address: str,
        join: str | None,
        elements: int,
        rank: int,
        wire: str,
        link_bytes_per_s: float,
    ) -> Reply:
        """Found a run on this host's address, or join one; return the address for others."""
        config = SwarmConfig(
            run="averaging",
            rules=Rules(local_steps_per_round=1, wire=wire),
            endpoint=Endpoint(listen_host=address, connect_s=_PATIENCE_S, stall_s=_PATIENCE_S),
            join=() if join is None else (join,),
            slowest_link_bytes_per_s=link_bytes_per_s,
            round_floor_s=_PATIENCE_S,
        )
        self._rank, self._values = rank, torch.zeros(elements)
        if join is None:
            self._swarm = Swarm.found(config, Manifest(config.run, (elements,)), self)
        else:
            self._swarm = Swarm.join(config)
            self._swarm.download(self)
        return {"address": self._swarm.address}

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        """Lend the vector to the swarm."""
        yield self._values

    def meet(self, peers: int, patience_s: float) -> Reply:
        """Wait until all peers are known to take part."""
        assert self._swarm is not None
        until_s = time.monotonic() + patience_s
        while sum(peer.state == "training" for peer in self._swarm.peers()) < peers:
            if time.monotonic() > until_s:
                raise TimeoutError("the peers did not find each other")
            self._boundary(0, 0)
            time.sleep(0.1)
        return {}

    def round(self, at_s: float, peers: int, patience_s: float, told_apart: bool = False) -> Reply:
        """Change the vector, and average it with all others from `at_s` (monotonic clock) on.

        Returns the seconds until the vector held the mean, the round's own and the processor's;
        `told_apart`: what the processor did, too, which takes a little time itself.
        """
        self._expected = float(self._values[0]) + (peers + 1) / 2
        self._values.add_(self._rank + 1.0)
        time.sleep(max(0.0, at_s - time.monotonic()))
        before_s = time.process_time()
        with contextlib.ExitStack() as clocks:
            costs = clocks.enter_context(Costs().of_round()) if told_apart else {}
            report = self._averaged(at_s + patience_s, peers)
            took_s = time.monotonic() - at_s
        return {
            "round_s": took_s,
            "exchange_s": report.duration_s,
            "processor_s": time.process_time() - before_s,
            "sent_bytes": report.bytes_sent,
            "costs": costs,
        }

    def _averaged(self, until_s: float, peers: int) -> RoundReport:
        steps, tokens = int(self._rank == 0), 1
        while time.monotonic() < until_s:
            for report in self._boundary(steps, tokens):
                if report.outcome != "averaged" or len(report.contributors) != peers:
                    raise RuntimeError(f"a round {report.outcome}: {report.reason}")
                return report
            steps, tokens = 0, 0
            assert self._swarm is not None
            self._swarm.wait(_BOUNDARY_S)
        raise TimeoutError("the round did not end")

    def check(self) -> Reply:
        """Return how far the vector is from the mean, and the hash of the swarm's.

        Apart from the round: who ends first would take the processor from those who have not.
        """
        assert self._swarm is not None
        return {
            "error": _largest_error(self._values, self._expected),
            "digest": self._swarm.state_dict().meta["digests"][0],
        }

    def leave(self) -> Reply:
        """Leave the run."""
        for mesh in self._meshes.values():
            mesh.close()
        self._meshes = {}
        if self._swarm is not None:
            self._swarm.leave(_LEAVE_S)
            self._swarm = None
        return {}

    def _boundary(self, steps: int, tokens: int) -> list[RoundReport]:
        assert self._swarm is not None
        return self._swarm.boundary(
            steps=steps, tokens=tokens, tokens_per_s=1.0, step_s=_BOUNDARY_S, access=self
        )


class HivemindPeer:
    """Averages one vector with the others by hivemind's own averager."""

    def __init__(self) -> None:
        self._averager: Any = None

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        return {
            "hello": self.hello,
            "enter": self.enter,
            "average": self.average,
            "assemble": self.assemble,
            "round": self.round,
            "check": self.check,
            "leave": self.leave,
        }

    def hello(self) -> Reply:
        """Import what takes long."""
        import hivemind  # noqa: F401

        return {}

    def enter(self, address: str, join: list[str]) -> Reply:
        """Start a node of the hash table; return its addresses."""
        import hivemind

        self._dht = hivemind.DHT(
            initial_peers=join, host_maddrs=[f"/ip4/{address}/tcp/0"], start=True
        )
        return {"addresses": [str(a) for a in self._dht.get_visible_maddrs()]}

    def average(self, elements: int, rank: int, peers: int, part_bytes: int) -> Reply:
        """Start an averager that sends parts of `part_bytes`, in place of any other."""
        import hivemind

        self._stop()
        self._rank = rank
        self._averager = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(elements)],
            self._dht,
            prefix=f"averaging-{part_bytes}",
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=_FORMING_S,
            part_size_bytes=part_bytes,
            start=True,
        )
        return {}

    def assemble(self, patience_s: float) -> Reply:
        """Change the vector, and find the group: both before time is taken."""
        from hivemind.averaging.control import AveragingStage
        from hivemind.utils import get_dht_time

        with self._averager.get_tensors() as (values,):
            self._expected = float(values[0])
            values.add_(self._rank + 1.0)
        self._control = self._averager.step(
            scheduled_time=get_dht_time() + _FORMING_S,
            timeout=patience_s,
            require_trigger=True,
            wait=False,
        )
        until_s = time.monotonic() + patience_s
        while self._control.stage != AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > until_s or self._control.done():
                raise TimeoutError("hivemind's averager found no group")
            time.sleep(0.01)
        return {}

    def round(self, at_s: float, peers: int, patience_s: float) -> Reply:
        """Average with the group; return the seconds."""
        self._expected += (peers + 1) / 2
        time.sleep(max(0.0, at_s - time.monotonic()))
        self._control.allow_allreduce()
        self._control.result(patience_s)
        return {"round_s": time.monotonic() - at_s}

    def check(self) -> Reply:
        """Return how far the vector is from the mean."""
        with self._averager.get_tensors() as (values,):
            return {"error": _largest_error(values, self._expected)}

    def leave(self) -> Reply:
        """End the helper processes."""
        self._stop()
        self._dht.shutdown()
        return {}

    def _stop(self) -> None:
        if self._averager is not None:
            self._averager.shutdown()
            self._averager = None


def _largest_error(values: torch.Tensor, expected: float) -> float:
    least, most = torch.aminmax(values)
    return max(abs(float(least) - expected), abs(float(most) - expected))


def _swallow(server: socket.socket) -> None:
    """Read announced numbers of bytes off one connection; answer each with one byte."""
    with server, server.accept()[0] as stream:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while True:
            head = stream.recv(8, socket.MSG_WAITALL)
            left = int.from_bytes(head, "big")
            if not left:
                return
            while left:
                left -= stream.recv_into(buffer[: min(left, _CHUNK_BYTES)])
            stream.sendall(b"k")

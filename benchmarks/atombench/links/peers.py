"""The benchmark's side of its peers: processes in namespaces, told what to do all at once."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from atombench.links.shaping import Network
from atomtrain.errors import AtomError

Reply = dict[str, Any]
"""What a peer answers: plain JSON values by name."""
_LOG_BYTES = 2000


class PeerError(AtomError, RuntimeError):
    """A peer of the benchmark failed, or did not answer in time."""

    exit_code = 1


class Peers:
    """One process of a method on each host; a context that ends them all.

    Each peer has one thread and, where there are as many cores as peers, a core of its own, which
    its helpers (Gloo's threads, libp2p's daemon, copy threads) share with it.
    """

    def __init__(
        self,
        method: str,
        network: Network | None,
        count: int,
        folder: Path,
        *,
        group: bool = False,
    ) -> None:
        """Start the processes; without a network they run on this host.

        Their standard error and temporary files go to `folder`. With `group` each leads a process
        group, and takes along what it has started when it ends.
        """
        self.method = method
        self._group = group
        self.failed = False
        """Whether a request failed: answers may be under way then, so no other can be made."""
        self._logs = [folder / f"{method}-{index}.log" for index in range(count)]
        self._processes: list[subprocess.Popen[str]] = []
        cores = sorted(os.sched_getaffinity(0))
        try:
            for index in range(count):
                core = cores[index] if count <= len(cores) else -1
                module = [sys.executable, "-m", "atombench.worker"]
                prefix = [] if network is None else network.entering(index)
                with self._logs[index].open("wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            [*prefix, *module, method, str(core)],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=log,
                            text=True,
                            start_new_session=group,
                            # Killed daemons leave their sockets; they go with the folder.
                            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
                        )
                    )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def tell_all(
        self, do: str, within_s: float, of: Callable[[int], dict[str, Any]] | None = None,
        **same: Any,
    ) -> list[Reply]:  # fmt: skip
        """Tell all peers at once; `of(index)` gives what differs. Returns their answers in order.

        Raises:
            PeerError: one failed, ended or did not answer within `within_s`; names it.
        """
        for index in range(len(self._processes)):
            self._write(index, do, {**same, **(of(index) if of else {})})
        return self._answers(range(len(self._processes)), do, within_s)

    def tell(self, index: int, do: str, within_s: float, **arguments: Any) -> Reply:
        """Tell one peer; see `tell_all`."""
        self._write(index, do, arguments)
        return self._answers([index], do, within_s)[0]

    def close(self) -> None:
        """End all processes; idempotent. What they started ends with them."""
        for process in self._processes:
            if self._group:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    _close(pipe)
        self._processes = []

    def _write(self, index: int, do: str, arguments: dict[str, Any]) -> None:
        pipe = self._processes[index].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure(index, do, "has ended") from None

    def _answers(self, indices: Sequence[int], do: str, within_s: float) -> list[Reply]:
        until_s = time.monotonic() + within_s
        found: dict[int, Reply] = {}
        with selectors.DefaultSelector() as selector:
            for index in indices:
                pipe = self._processes[index].stdout
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, index)
            while len(found) < len(indices):
                ready = selector.select(max(0.0, until_s - time.monotonic()))
                if not ready and time.monotonic() >= until_s:
                    late = next(index for index in indices if index not in found)
                    raise self._failure(late, do, f"did not answer within {within_s:.0f} s")
                for key, _ in ready:
                    # One answer to one request, and it is written whole: this cannot block long.
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    found[key.data] = self._checked(key.data, do, line)
                    selector.unregister(key.fileobj)
        return [found[index] for index in indices]

    def _checked(self, index: int, do: str, line: str) -> Reply:
        if not line:
            raise self._failure(index, do, "ended")
        answer = json.loads(line)
        if "error" in answer:
            raise self._failure(index, do, answer["error"])
        ok: Reply = answer["ok"]
        return ok

    def _failure(self, index: int, do: str, what: str) -> PeerError:
        self.failed = True
        log = self._logs[index].read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip()
        last = log.splitlines()[-1] if log else "nothing in its log"
        return PeerError(f"{self.method} peer {index} at {do!r}: {what} ({last})")


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was not yet written when it ended
        return

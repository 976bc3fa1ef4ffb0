"""What a round of `atom bench averaging` spends processor time on, at one peer.

Threads tell their own time: the event loop's, the workers' and the trainer's. Of the event loop's,
calls to sockets and the cipher are told apart by clocks around them; of the others', hashing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

from atomtrain.swarm.anchors.anchors import Digest
from atomtrain.swarm.transport.secure import SecureChannel

_LOOP, _WORKERS = "atom-swarm", "atom-swarm-worker"


class Costs:
    """Processor time by what it was spent on; may be told of by several threads."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._lock = threading.Lock()
        self._spent_s = {"sockets": 0.0, "encryption": 0.0, "hashing": 0.0}

    def timed(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` with a clock around it, whose time counts as `what`."""

        def run(*args: Any) -> Any:
            started_s = time.thread_time()
            try:
                return work(*args)
            finally:
                spent_s = time.thread_time() - started_s
                with self._lock:
                    self._spent_s[what] += spent_s

        return run

    @contextlib.contextmanager
    def of_round(self) -> Iterator[dict[str, float]]:
        """Fill what is yielded with the seconds of what runs inside, all threads together."""
        found: dict[str, float] = {}
        before, all_before_s = _threads_s(), time.process_time()
        hashing = patch.object(Digest, "update", self.timed("hashing", Digest.update))
        channels = patch(
            "atomtrain.swarm.transport.direct.SecureChannel", partial(_timed_channel, self)
        )
        with hashing, channels:
            yield found
        threads = {kind: now_s - before[kind] for kind, now_s in _threads_s().items()}
        spent_s, all_s = self._spent_s, time.process_time() - all_before_s
        found |= {
            **{f"{what}_s": one_s for what, one_s in spent_s.items()},
            "arithmetic_s": threads["workers"] + threads["trainer"] - spent_s["hashing"],
            "event_loop_s": threads["loop"] - spent_s["sockets"] - spent_s["encryption"],
            "other_threads_s": all_s - sum(threads.values()),
            "all_s": all_s,
        }


def _timed_channel(costs: Costs, *given: Any) -> SecureChannel:
    """Return a channel with clocks around what its socket and its ciphers are asked for."""
    channel: Any = SecureChannel(*given)
    channel._socket = _Timed(costs, "sockets", channel._socket, "send", "recv_into")
    channel._sealing = _Timed(costs, "encryption", channel._sealing, "encrypt_into")
    channel._opening = _Timed(costs, "encryption", channel._opening, "decrypt_into")
    return channel  # type: ignore[no-any-return]


class _Timed:
    """Something some of whose methods have a clock around them."""

    def __init__(self, costs: Costs, what: str, inner: Any, *methods: str) -> None:
        self._inner = inner
        for name in methods:
            setattr(self, name, costs.timed(what, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _threads_s() -> dict[str, float]:
    """Return the time so far of the threads that a round runs on; the trainer is the caller."""
    found = {"trainer": time.thread_time(), "loop": 0.0, "workers": 0.0}
    for thread in threading.enumerate():
        kind = "loop" if thread.name == _LOOP else "workers"
        if thread.name == _LOOP or thread.name.startswith(_WORKERS):
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            found[kind] += time.clock_gettime(clock)
    return found

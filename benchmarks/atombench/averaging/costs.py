"""What a peer spends of its processor's time: on a round, and on its wire format.

`Costs` is for `atom bench averaging`. Threads tell their own time: the event loop's, the workers'
and the trainer's. Of the event loop's, calls to sockets and the cipher are told apart by clocks
around them; of the others', hashing.

`CodecTime` is for `atom bench swarm`. Counted are encoding and decoding, contributions and means
alike, and error feedback: adding the residual to a contribution, and keeping what encoding lost.
Each thread tells its own time, so what other threads and programs do meanwhile does not count.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Digest, Snapshot
from atomtrain.swarm.codecs.codec import Codec, codec_named
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


_FEEDBACK = ((Snapshot, "_with_residual"), (AnchorStore, "_advance_residual"))


class CodecTime:
    """Seconds of all threads in codecs; may be told of by several threads."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` returns the seconds that the calling thread has had of a processor."""
        self._clock = clock
        self._lock = threading.Lock()
        self._here = threading.local()
        self.calls: Counter[str] = Counter()
        """How often each thing was done, those within others included."""
        self.spent_s = 0.0

    def timed(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` with a clock around it; what it calls that is timed, too, counts once."""

        def run(*args: Any) -> Any:
            outermost = not getattr(self._here, "inside", False)
            self._here.inside = True
            started_s = self._clock()
            try:
                return work(*args)
            finally:
                spent_s = self._clock() - started_s if outermost else 0.0
                self._here.inside = not outermost
                with self._lock:
                    self.calls[what] += 1
                    self.spent_s += spent_s

        return run

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what peers do that are made, and train, inside."""
        with contextlib.ExitStack() as watching:
            for owner, name in _FEEDBACK:
                timed = self.timed(name, getattr(owner, name))
                watching.enter_context(patch.object(owner, name, timed))
            watching.enter_context(
                patch(
                    "atomtrain.swarm.node.entering.codec_named",
                    lambda name: TimedCodec(codec_named(name), self),
                )
            )
            yield


class TimedCodec:
    """A codec with clocks around its work, and so are its means'."""

    def __init__(self, codec: Codec, costs: CodecTime) -> None:
        """Do as `codec` does, and tell `costs`."""
        self._codec, self._costs = codec, costs
        self.name, self.feedback, self.exact = codec.name, codec.feedback, codec.exact
        self.encoded_bytes, self.error = codec.encoded_bytes, codec.error
        self._encode = costs.timed("encode", codec.encode)
        self._decode = costs.timed("decode", codec.decode)

    def encode(
        self,
        values: torch.Tensor,
        sent: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> memoryview:
        """Return the bytes of `values`; write what they decode to, and what is lost."""
        data: memoryview = self._encode(values, sent, residual)
        return data

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values of `data` to `out`."""
        self._decode(data, out)

    def for_mean(self, contributors: int, seed: int) -> Codec:
        """Return the codec of a mean, timed like this one."""
        return TimedCodec(self._codec.for_mean(contributors, seed), self._costs)

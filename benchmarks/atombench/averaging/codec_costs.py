"""What a peer of `atom bench swarm` spends on its wire format, of its processor's time.

Counted are encoding and decoding, contributions and means alike, and error feedback: adding the
residual to a contribution, and keeping what encoding lost. Each thread tells its own time, so what
other threads and programs do meanwhile does not count.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Snapshot
from atomtrain.swarm.codecs.codec import Codec, codec_named
from atomtrain.swarm.rounds.exchange import Exchange

_FEEDBACK = (
    (Snapshot, "_with_residual"), (Exchange, "_keep_lost"), (AnchorStore, "_advance_residual"),
)  # fmt: skip


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
        self.encoded_bytes = codec.encoded_bytes
        self._encode = costs.timed("encode", codec.encode)
        self._decode = costs.timed("decode", codec.decode)

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return the bytes of `values`."""
        data: memoryview = self._encode(values)
        return data

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values of `data` to `out`."""
        self._decode(data, out)

    def for_mean(self, contributors: int, seed: int) -> Codec:
        """Return the codec of a mean, timed like this one."""
        return TimedCodec(self._codec.for_mean(contributors, seed), self._costs)

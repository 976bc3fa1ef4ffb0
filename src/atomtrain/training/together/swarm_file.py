"""What a peer knows of the others, as a file that views read: replaced as a whole, never torn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.files import replacing
from atomtrain.views.runs.files import SWARM_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atomtrain.swarm.membership.records import PeerStatus

_INTERVAL_S = 0.8
_MOST_SHARE = 0.01
"""Of the time may go into writing, also in a swarm of thousands."""


class SwarmFile:
    """Writes the table of peers into a peer's folder, not too often."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / SWARM_FILE
        self._clock = clock
        self._due_s = 0.0

    def update(self, peers: Callable[[], Sequence[PeerStatus]]) -> bool:
        """Write what `peers` returns if it is time to; return whether it was.

        A disk that is full costs views the table, not the run.
        """
        now_s = self._clock()
        if now_s < self._due_s:
            return False
        table = {
            "time_s": time.time(),
            "peers": [dataclasses.asdict(peer) for peer in peers()],
        }
        with contextlib.suppress(OSError), replacing(self._path) as temporary:
            temporary.write_text(json.dumps(table), encoding="utf-8")
        took_s = self._clock() - now_s
        self._due_s = now_s + max(_INTERVAL_S, took_s / _MOST_SHARE)
        return True

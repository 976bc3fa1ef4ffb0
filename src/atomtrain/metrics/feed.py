"""From the event stream to the writers, on a thread of its own: training never waits for them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from atomtrain.events import Event
from atomtrain.metrics.names import values_of
from atomtrain.metrics.targets import PeerLabels, Target
from atomtrain.metrics.writers import Writer, open_writer

_log = logging.getLogger("atomtrain.metrics")
_MOST_WAITING = 10_000
_CLOSE_S = 30.0


class MetricsFeed:
    """Gives each event's numbers to all writers, in order.

    A writer that fails is left out from then on, with one warning. If writers fall far behind,
    the newest events are dropped, not the run slowed.
    """

    def __init__(self, targets: Sequence[Target], labels: PeerLabels) -> None:
        """Open the writers.

        Raises:
            ConfigError: one of them cannot be opened; none stays open.
        """
        self._writers: list[tuple[str, Writer]] = []
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        self._step = 0
        try:
            for target in targets:
                self._writers.append((target.writer, open_writer(target, labels)))
        except BaseException:
            self._close_writers()
            raise
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def listen(self, event: Event) -> None:
        """Take in an event; never blocks."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is waiting, and close the writers; gives up on them after half a minute."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._dropped:
            _log.warning("%d events did not reach the metrics: writers were slow", self._dropped)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            if values := values_of(event):
                step = event.get("step")
                self._step = step if isinstance(step, int) else self._step
                self._write(values)
        self._close_writers()

    def _write(self, values: dict[str, float]) -> None:
        for entry in list(self._writers):
            name, writer = entry
            try:
                writer.write(self._step, values)
            except Exception as error:  # noqa: BLE001 - a writer must not end a training run
                _log.warning("metrics no longer go to %s: %s", name, error)
                self._writers.remove(entry)

    def _close_writers(self) -> None:
        for name, writer in self._writers:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 - nor keep it from ending
                _log.warning("metrics of %s may be incomplete: %s", name, error)
        self._writers.clear()

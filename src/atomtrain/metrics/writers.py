"""The writers: each takes numbers by name and step; a thread of its own brings them there.

Prometheus reads the newest numbers over HTTP. Format: "Prometheus exposition formats", text format
version 0.0.4 (prometheus.io): a HELP and a TYPE line for each metric, then
`name{label="value"} number`.
"""

from __future__ import annotations

import importlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from atomtrain.errors import ConfigError
from atomtrain.events import Event
from atomtrain.metrics.names import METRICS, PeerLabels, Target, require_packages, values_of

PREFIX = "atom_"
PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_IDLE_S = 10.0


class Writer(Protocol):
    """A place that numbers go to. One thread uses it; each call may block for a while."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers, by name, that were true after `step` steps."""

    def close(self) -> None:
        """Write what is pending, and let go."""


def open_writer(target: Target, labels: PeerLabels) -> Writer:
    """Return the writer of a target.

    Raises:
        ConfigError: its package is missing, its folder cannot be made, its port is in use.
    """
    require_packages([target])
    if target.writer == "prometheus":
        return Exposition(target.host, target.port, labels)
    kinds: dict[str, Callable[[str, PeerLabels], Writer]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "trackio": _Trackio,
    }
    return kinds[target.writer](target.place, labels)


class _TensorBoard:
    """Event files below FOLDER/RUN/PEER, or in the peer's own folder."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(place) / labels.run / labels.peer if place else labels.folder / "tensorboard"
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                f"--metrics tensorboard: {folder} cannot be written ({error.strerror}); name "
                "another folder, such as tensorboard:boards"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        wandb: Any = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=place,
                group=labels.run,
                name=f"{labels.run}/{labels.peer}",
                dir=str(labels.folder),
            )
        except wandb.errors.Error as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"--metrics wandb: {said}; log in with 'wandb login', or set WANDB_MODE=offline"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, kept on this machine; `trackio show` displays it."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(project=place, name=f"{labels.run}-{labels.peer}", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Exposition:
    """Serves the newest value of each metric at `http://HOST:PORT/metrics`."""

    def __init__(self, host: str, port: int, labels: PeerLabels) -> None:
        """Listen at once.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._labels = f'{{run="{_escaped(labels.run)}",peer="{_escaped(labels.peer)}"}}'
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigError(
                f"--metrics prometheus: cannot listen on {host}:{port} ({error.strerror}); choose "
                "another, such as prometheus:9101"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._values.update(values)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def text(self) -> str:
        with self._lock:
            values = dict(self._values)
        lines = []
        for metric in METRICS:
            if metric.name in values:
                name = PREFIX + metric.name
                kind = "counter" if metric.name.endswith("_total") else "gauge"
                lines += [
                    f"# HELP {name} {metric.about} Unit: {metric.unit}.",
                    f"# TYPE {name} {kind}",
                    f"{name}{self._labels} {_number(values[metric.name])}",
                ]
        return "\n".join((*lines, ""))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], exposition: Exposition) -> None:
        self.exposition = exposition
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_S

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, "metrics are at /metrics")
            return
        body = server.exposition.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: what is asked for is no news."""


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


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

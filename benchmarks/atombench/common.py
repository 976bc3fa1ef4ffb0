"""What all benchmarks share: options, checks, the machine they ran on, how a result is reported.

Results are for machines first: one JSON object of plain numbers, seconds and bytes. Standard
output carries the result only; progress goes to standard error. A benchmark that is ended before
its time ends the processes that it started, and keeps its results.
"""

from __future__ import annotations

import importlib.metadata
import json as json_format
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import atomtrain
from atomtrain.errors import ConfigError, choices
from atomtrain.files import replacing
from atomtrain.settings import check_counts
from atomtrain.topology import machine
from atomtrain.units import format_bytes, format_count, format_seconds, parse_bytes

Result = dict[str, Any]
LINKS = ("all", "plain", "stand-ins", "alone")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What every benchmark can be told."""

    quick: bool = False
    """Take under a minute, with smaller inputs; the numbers are rougher."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""
    out: Path | None = None
    """Also write the JSON object to this file."""
    peers: int | None = None
    """Number of peers, for benchmarks that let one choose."""
    links: str = "all"
    """Which links `network` measures: `all`, `plain` ones, `stand-ins` for a GPU's, or `alone`:
    100 and 10 Mbit/s without baselines, for what the swarm keeps of its peers' speed."""
    link: tuple[str, ...] = ()
    """The very links that `network` measures, in place of `links`; `parse_links` reads them."""
    kills: int | None = None
    """Peers to kill, for benchmarks that do."""
    at_once: int | None = None
    """Peers to kill at the same time."""
    device: str | None = None
    """`cpu` or `cuda`, for benchmarks that take it; `None` is the benchmark's choice."""
    device_memory: str | None = None
    """Budget on the device, such as `8GiB`."""
    case: tuple[int, ...] = ()
    """Numbers of the cases that `plan` runs, from 1; none: all."""
    costs: bool = False
    """Have `liars` measure what defences cost, and nothing else."""
    model: str | None = None
    """The preset that `large` trains, or the only family of `families`."""
    optimizer: str | None = None
    """By name, for `large`."""
    micro_batches: int | None = None
    """Of a step of `large`."""
    steps: int | None = None
    """Counted ones of `large`."""
    beside: Path | None = None
    """Another checkout, which `opening` measures as well."""

    def __post_init__(self) -> None:
        if self.links not in LINKS:
            raise ConfigError(
                f"--links {self.links!r} does not exist; choose {choices(self.links, LINKS)}"
            )
        if self.link and self.links not in ("all", "alone"):
            raise ConfigError(
                f"--link and --links {self.links} exclude each other; --link alone measures the "
                "given links, and with --links alone it measures ATOM only"
            )
        check_counts(self, "peers", "kills", "at_once", "micro_batches", "steps")
        if self.device_memory is not None:
            parse_bytes(self.device_memory, "--device-memory")
        if self.out is not None:
            _check_out(self.out)


def description() -> Result:
    """Return the keys that every result has: `machine` and `versions`."""
    return {
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "numpy": importlib.metadata.version("numpy"),
            "atomtrain": atomtrain.__version__,
        },
    }


def progress(text: str) -> None:
    """Tell a person how far the benchmark is."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def report(
    result: Mapping[str, Any],
    *,
    json: bool = False,
    out: Path | None = None,
    text: str | None = None,
) -> None:
    """Print a result, and write it to a file if one is given.

    Args:
        result: JSON values only.
        json: Print exactly one line with one JSON object; else a table for people.
        text: What people read in place of that table.
        out: Gets the JSON object, indented; an existing file is replaced at once or not at all.

    Raises:
        ConfigError: `out` cannot be written.
    """
    if json:
        sys.stdout.write(json_format.dumps(result, allow_nan=False) + "\n")
        sys.stdout.flush()
    elif text is not None:
        sys.stdout.write(text + "\n")
    else:
        _print_table(result)
    if out is not None:
        _write(out, json_format.dumps(result, allow_nan=False, indent=2) + "\n")


def keep_partial(result: Mapping[str, Any], out: Path | None) -> None:
    """Write what has been measured so far to `out`, if there is one; marked as not complete.

    A benchmark that is ended, or fails, leaves that; `report` replaces it.
    """
    if out is not None:
        text = json_format.dumps({**result, "complete": False}, allow_nan=False, indent=2)
        _write(out, text + "\n")


def _check_out(path: Path) -> None:
    """Complain before the measurement, not after it."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a directory; give the name of a file in it")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(
            f"--out {path}: {above} is not a directory that you may write to; choose another"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"cannot write the result to {path} ({error.strerror}); give --out a file in a "
            "directory that you may write to"
        ) from error


def _print_table(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in _flat(result):
        table.add_row(key, _readable(key, value))
    Console(file=sys.stdout).print(table)


def _flat(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in result.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows += _flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def _readable(key: str, value: Any) -> str:
    """Return a value in the unit that its key (or the mapping around it) names."""
    if isinstance(value, list | tuple):
        return ", ".join(_readable(key, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if any(part.endswith("bytes_per_s") for part in key.split(".")):
        return f"{format_bytes(value)}/s"
    if any(part.endswith("_bytes") for part in key.split(".")):
        return format_bytes(value)
    if any(part.endswith("_per_s") for part in key.split(".")):
        return f"{format_count(value)}/s"
    if any(part.endswith("_s") for part in key.split(".")):
        return format_seconds(value)
    if any(part.endswith("_share") for part in key.split(".")):
        return f"{100 * value:.1f}%"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def require_positive(setup: Any, but: Collection[str] = ("seed",)) -> None:
    """Check that the numbers of a setup are above 0, except for those named.

    Fields that are no numbers, truth values among them, are not looked at.

    Raises:
        ConfigError: names the field, and says what is allowed.
    """
    for name, value in vars(setup).items():
        if name in but or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not value > 0:  # nor NaN
            allowed = "at least 1" if isinstance(value, int) else "above 0"
            raise ConfigError(f"{name} must be {allowed}, not {value}")


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into the exception of Ctrl-C, so that what was started is ended as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def requests_noted() -> Iterator[Callable[[], bool]]:
    """Yield what says whether SIGINT or SIGTERM has come meanwhile.

    The first one does nothing else; the next one is a KeyboardInterrupt.
    """
    asked = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Runs the parts one after the other, each under its own time, and prints what came of them.

What a part leaves of its time the later ones share. One that is late is ended, with all that it
started; what it had found until then stays in its file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atombench.common import Result, progress
from atombench.first_hour.table import table
from atomtrain.cli.parsing import parse
from atomtrain.errors import AtomError, ConfigError, choices
from atomtrain.native.build import HERE, BuildError, build
from atomtrain.settings import option

ROOT = Path(__file__).resolve().parents[3]
SECONDS = {
    "machine": 30.0,
    "tests": 120.0,
    "memory": 50.0,
    "optimizers": 40.0,
    "timeline": 90.0,
    "large": 170.0,
    "offloaders": 70.0,
}
"""What each part may take of the whole, in their order; they are stretched to the limit."""
SIZES = ("full", "small")
DEVICES = ("cuda", "emulated")
TABLE = "table.txt"
_EXAMPLES = """\
  scripts/first-hour --out first-hour
  scripts/first-hour --device emulated --limit 600
  scripts/first-hour --only machine,large --limit 240"""
_TAIL_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class HourOptions:
    """What a user can say to `scripts/first-hour`."""

    out: Path = option(Path("first-hour"), "Folder for what is found: at most 8 files.", "FOLDER")
    limit: float = option(570.0, "Seconds that all parts may take together.", "SECONDS")
    device: str = option("cuda", "cuda, or emulated to rehearse without a GPU.", "DEVICE")
    size: str | None = option(None, "full or small. Default: full on cuda, else small.", "SIZE")
    only: str | None = option(
        None, f"Parts, with commas between them: {', '.join(SECONDS)}. Default: all.", "PARTS"
    )

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ConfigError(f"--limit must be above 0 seconds, not {self.limit}")
        for name, given, allowed in (
            ("device", (self.device,), DEVICES),
            ("size", () if self.size is None else (self.size,), SIZES),
            ("only", self.parts, tuple(SECONDS)),
        ):
            for one in given:
                if one not in allowed:
                    raise ConfigError(f"--{name} {one!r} does not exist; {choices(one, allowed)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """Those that were asked for."""
        return tuple(SECONDS) if self.only is None else tuple(self.only.split(","))


def run(options: HourOptions, say: Callable[[str], None] = progress) -> list[Result]:
    """Run the parts; return the row of each, as it is in the table.

    Raises:
        ConfigError: there is no CUDA device, or the folder cannot be written to.
    """
    _require_device(options.device)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be made: {error.strerror}") from error
    started_s = time.monotonic()
    core = _build_core()
    say(core)
    parts = [part for part in SECONDS if part in options.parts]
    rows: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="atom-first-hour-") as cache:
        for index, part in enumerate(parts):
            left_s = options.limit - (time.monotonic() - started_s)
            left_s *= SECONDS[part] / sum(SECONDS[other] for other in parts[index:])
            say(f"{part}: up to {left_s:.0f} s")
            rows.append(_run_part(part, options, left_s, cache))
            text = table(rows, core)
            (options.out / TABLE).write_text(text + "\n", encoding="utf-8")
    return rows


def _run_part(part: str, options: HourOptions, limit_s: float, cache: str) -> Result:
    """Run one part in a process group of its own; return its row and complete its file."""
    out = options.out / f"{part}.json"
    out.unlink(missing_ok=True)
    size = options.size or ("full" if options.device == "cuda" else "small")
    order = {"part": part, "device": options.device, "size": size, "out": str(out.absolute())}
    started_s = time.monotonic()
    state, failure = "ok", ""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "atombench.first_hour.parts", json.dumps(order)],
            stdout=subprocess.DEVNULL,
            stderr=said,
            stdin=subprocess.DEVNULL,
            # Profiles are measured here, and nobody's are changed.
            env={**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": _search_path()},
            start_new_session=True,
        )
        try:
            code = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            state, failure = "late", f"ended after {time.monotonic() - started_s:.0f} s"
        else:
            if code:
                state = "failed"
        finally:
            _end(process)
        seconds = time.monotonic() - started_s
        said.seek(0)
        text = said.read()[-_TAIL_CHARACTERS:]
    if state == "failed":
        failure = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
    found: Result = {}
    with contextlib.suppress(OSError, ValueError):  # nothing was kept before it ended
        found = json.loads(out.read_text(encoding="utf-8"))
    row = {"part": part, "state": state, "seconds": seconds, "failure": failure, **found}
    row |= {"complete": state == "ok", "said": text}
    out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return row


def _search_path() -> str:
    """Return where this tree's packages are, before what a user's Python searches besides."""
    folders = [str(ROOT / folder) for folder in ("src", "benchmarks", "research", ".")]
    return os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))


def _end(process: subprocess.Popen[Any]) -> None:
    """End a part and whatever it started that is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _require_device(device: str) -> None:
    from atomtrain.engine.devices.cuda import CUDA

    if device == "cuda" and not CUDA.count():
        raise ConfigError(
            f"there is no CUDA device: {CUDA.why_none()}. Without a GPU rehearse: "
            "scripts/first-hour --device emulated"
        )


def _build_core() -> str:
    """Compile the core where there is a compiler; return how updates are measured."""
    from atomtrain.native.library import level, load

    try:
        if load(HERE)[0] is None:
            build(only=[level()])
    except (BuildError, OSError) as error:
        return f"without the compiled core: {str(error).splitlines()[0]}"
    return "with the compiled core"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code, 1 where a part was late or failed."""
    try:
        options = parse(
            HourOptions,
            arguments,
            prog="first-hour",
            about="Measure a GPU that nobody has had yet. Nothing is installed or fetched.",
            examples=_EXAMPLES,
        )
        rows = run(options)
    except AtomError as error:
        sys.stderr.write(f"first-hour: {error}\n")
        return error.exit_code
    sys.stdout.write((options.out / TABLE).read_text(encoding="utf-8"))
    return 0 if all(row["state"] == "ok" for row in rows) else 1

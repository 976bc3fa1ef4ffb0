"""ATOM against other ways of training what does not fit: DeepSpeed ZeRO-3 and PyTorch's FSDP2.

All train the same GPT on the same tokens in float32 with AdamW, alternating in rounds, each in a
process of its own. One row more, `atom-bf16-int8`, is ATOM in bfloat16 with 8-bit moments: other
arithmetic, half of the memory.

- *Each at its best.* Before, each contender tries a few settings (`SETTINGS`, listed in the
  result); the fastest one is measured, or where others are within 2% of it, which is no more than
  steps differ by themselves, the one of them that takes the least host memory. On the CPU its
  settings take turns, since a machine has slower minutes; on a GPU, whose memory is short, they
  follow one another.
- *Same heap.* All processes keep what they free, as ATOM's engine has it on the CPU: a system that
  takes pages back and fills them with zeros anew would decide who is fast.
- *Same work.* Losses are compared with those of resident training; `loss_difference` is the
  largest relative one.
- *Same clock.* A turn ends when all work is done, updates in the background included. It begins
  with a step that is not counted: caches are another contender's then.
- *Memory.* `host_peak_bytes` is the growth of a process's resident set (with a GPU: of the
  machine's used memory) after something tiny was trained in the same way. So what libraries
  themselves take is charged to nobody.
- *Other load.* `processor_s` is a step's processor time, all threads added. It says more than
  `step_s` on a machine that is not quiet, as long as there is no GPU.
- Without a GPU there is no link: all run on the CPU. The resident row tells what is lost at all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.offloaders.contenders import CASE, CUDA_CASE, QUICK, OffloadCase
from atomtrain.errors import ConfigError

_AS_FAST = 1.02


class Setting(NamedTuple):
    """One way to run a contender."""

    micro_batches: int
    settings: Mapping[str, Any]


SETTINGS: dict[str, list[Setting]] = {
    "atom": [Setting(1, {}), Setting(2, {}), Setting(4, {})],
    "atom-bf16-int8": [Setting(1, {}), Setting(2, {}), Setting(4, {})],
    "deepspeed": [
        Setting(1, {}),
        Setting(2, {}),
        Setting(4, {}),
        Setting(1, {"overlap_comm": False, "stage3_param_persistence_threshold": 10**6}),
    ],
    "fsdp2": [
        Setting(1, {}),
        Setting(2, {}),
        Setting(4, {}),
        Setting(1, {"reshard_after_forward": False}),
        Setting(2, {"reshard_after_forward": False}),
    ],
    "resident": [Setting(1, {}), Setting(2, {}), Setting(4, {})],
}
"""What each contender tries: micro-batches a step, and its library's own settings."""
_DEADLINE_S = 1800.0
"""Longest wait for an answer; DeepSpeed's first run compiles for minutes on a slow machine."""
NEEDED = {"deepspeed": "pip install -e 'benchmarks[offloaders]'"}
"""How to get a package that is not there, by its name."""


class WorkerError(Exception):
    """A contender did not do what it was asked."""


class _Worker:
    """A contender's process."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  see close
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atombench.offloaders.worker", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def answer(self) -> Result:
        """Return the next answer.

        Raises:
            WorkerError: the contender failed, or its process died.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(_DEADLINE_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise self._ended()
        result: Result = json.loads(line)
        if "failed" in result:
            raise WorkerError(result["failed"])
        return result

    def ask(self, line: object) -> Result:
        """Give an order; return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self.answer()

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._said.seek(0)
        said = [line.strip() for line in self._said if line.strip()]
        return WorkerError(f"its process ended with code {code}: {''.join(said[-1:])}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                pipe.close()


@dataclass
class _Row:
    """What became of a contender."""

    name: str
    tried: list[Result] = field(default_factory=list)
    best: Setting | None = None
    failure: str | None = None
    turns_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: Result = field(default_factory=dict)

    def keys(self, resident: _Row) -> Result:
        """Return the row of the result."""
        if self.failure is not None:
            return {"name": self.name, "failure": self.failure, "tried": self.tried}
        assert self.best is not None
        return {
            "name": self.name,
            "step_s": statistics.median(self.turns_s),
            "processor_s": statistics.median(self.processor_s),
            "device_peak_bytes": self.memory["device_peak_bytes"],
            "host_peak_bytes": self.memory["host_peak_bytes"],
            "loss_difference": _largest_difference(self.losses, resident.losses),
            "micro_batches": self.best.micro_batches,
            "settings": dict(self.best.settings),
            "turns_s": self.turns_s,
            "tried": self.tried,
        }


def run(options: BenchmarkOptions, case: OffloadCase | None = None) -> Result:
    """Measure; return the keys of the benchmarks' contract and the inputs.

    Raises:
        ConfigError: a device that the contenders cannot run on.
    """
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not cpu or cuda, where all contenders run")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device; leave out --device to compare on the CPU")
    if case is None:
        case = QUICK if options.quick else CUDA_CASE if device == "cuda" else CASE
    place = {"device": device, "device_memory": options.device_memory}
    rows = [_Row(name) for name in SETTINGS]
    for row in rows:
        _choose(row, case, place, options.quick)
    _alternate([row for row in rows if row.failure is None], case, place)
    resident = next(row for row in rows if row.name == "resident")
    found = description()
    for package in ("deepspeed",):
        if importlib.util.find_spec(package) is not None:
            found["versions"][package] = importlib.metadata.version(package)
    return {
        "rows": [row.keys(resident) for row in rows],
        "tokens_per_step": case.tokens_per_step,
        "threads": torch.get_num_threads(),
        "inputs": {**asdict(case), **place},
        **found,
    }


def _choose(row: _Row, case: OffloadCase, place: Mapping[str, Any], quick: bool) -> None:
    """Try a contender's settings; keep the smallest of the fastest."""
    if row.name in NEEDED and importlib.util.find_spec(row.name) is None:
        row.failure = f"{row.name} is not installed; {NEEDED[row.name]}"
        return
    settings = SETTINGS[row.name][: 1 if quick else None]
    together = [settings] if place["device"] == "cpu" else [[setting] for setting in settings]
    able = [found for some in together for found in _try(row, some, case, place)]
    if not able:
        row.failure = row.tried[0]["failure"]
        return
    within_s = _AS_FAST * min(tried["step_s"] for tried, _ in able)
    fast = [(t["host_peak_bytes"], setting) for t, setting in able if t["step_s"] <= within_s]
    row.best = min(fast, key=lambda each: each[0])[1]


def _try(
    row: _Row, settings: list[Setting], case: OffloadCase, place: Mapping[str, Any]
) -> list[tuple[Result, Setting]]:
    """Let settings of a contender take turns; return what was found of each that works."""
    with ExitStack() as stack:
        workers = list[tuple[Result, Setting, _Worker]]()
        for setting in settings:
            tried: Result = {
                "micro_batches": setting.micro_batches,
                "settings": dict(setting.settings),
            }
            row.tried.append(tried)
            try:
                worker = stack.enter_context(opened(row.name, setting, case, place))
            except WorkerError as error:
                tried["failure"] = str(error)
            else:
                tried["steps_s"] = []
                workers.append((tried, setting, worker))
        for _ in range(case.search_turns):
            for tried, _, worker in workers:
                if "failure" not in tried:
                    try:
                        worker.ask(1)  # not counted: caches were another one's
                        tried["steps_s"].append(worker.ask(1)["step_s"])
                    except WorkerError as error:
                        tried["failure"] = str(error)
        able = list[tuple[Result, Setting]]()
        for tried, setting, worker in workers:
            if "failure" not in tried:
                tried["step_s"] = statistics.median(tried["steps_s"])
                tried.update(worker.ask("end"))
                able.append((tried, setting))
    for tried in row.tried[-len(settings) :]:
        progress(f"{row.name}: {tried}")
    return able


def _alternate(rows: list[_Row], case: OffloadCase, place: Mapping[str, Any]) -> None:
    """Let the contenders take turns; who begins changes from round to round."""
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        for row in rows:
            assert row.best is not None
            try:
                worker = stack.enter_context(opened(row.name, row.best, case, place))
                row.losses += worker.ask(1)["losses"]
                workers[row.name] = worker
            except WorkerError as error:
                row.failure = str(error)
        for turn in range(case.rounds):
            for row in (*rows[turn % len(rows) :], *rows[: turn % len(rows)]):
                if row.failure is not None:
                    continue
                try:
                    row.losses += workers[row.name].ask(1)["losses"]
                    result = workers[row.name].ask(case.turn_steps)
                except WorkerError as error:
                    row.failure = str(error)
                    continue
                row.turns_s.append(result["step_s"])
                row.processor_s.append(result["processor_s"])
                row.losses += result["losses"]
            latest = ", ".join(f"{r.name} {r.turns_s[-1]:.3f} s" for r in rows if r.turns_s)
            progress(f"round {turn + 1} of {case.rounds}: {latest}")
        for row in rows:
            if row.failure is None:
                row.memory = workers[row.name].ask("end")


@contextmanager
def opened(
    name: str, setting: Setting, case: OffloadCase, place: Mapping[str, Any]
) -> Iterator[_Worker]:
    """Yield a contender's process, ready to train."""
    worker = _Worker(
        {
            "name": name,
            "case": asdict(case),
            "threads": torch.get_num_threads(),
            **setting._asdict(),
            **place,
        }
    )
    try:
        worker.answer()
        yield worker
    finally:
        worker.close()


def _largest_difference(losses: list[float], expected: list[float]) -> float | None:
    if not expected:
        return None
    pairs = zip(losses, expected, strict=True)
    return max(abs(loss - true) / abs(true) for loss, true in pairs)

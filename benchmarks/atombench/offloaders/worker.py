"""One contender of the benchmark `offloaders`, in a process of its own.

`python -m atombench.offloaders.worker JSON` opens the contender and then obeys lines on
standard input: a number trains so many steps, `end` ends. Each is answered by one JSON line. What
libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from atombench.common import Result
from atombench.offloaders.contenders import OPEN, Contender, OffloadCase, Order
from atomtrain.engine.devices.host_memory import keep_freed
from atomtrain.errors import ConfigError
from atomtrain.units import parse_bytes

_TINY = OffloadCase(layers=2, width=64, vocabulary=64, sequence_tokens=16, sequences=8)
_SAMPLE_S = 0.02


class HostPeak:
    """The most host memory that was taken since it was made.

    Without a GPU that is the growth of this process's resident set. With one it is the growth of
    the machine's memory in use, since memory that the driver pins need not be in a resident set.
    """

    def __init__(self, machine: bool) -> None:
        self._machine = machine
        self._ended = threading.Event()
        self._most_bytes = self._before_bytes = self._used_bytes()
        if machine:
            threading.Thread(target=self._sample, daemon=True).start()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts a new peak

    def bytes(self) -> int:
        """Return the growth in bytes."""
        if not self._machine:
            self._most_bytes = _kernel_bytes("/proc/self/status", "VmHWM")
        return self._most_bytes - self._before_bytes

    def _used_bytes(self) -> int:
        if not self._machine:
            return _kernel_bytes("/proc/self/status", "VmRSS")
        there = _kernel_bytes("/proc/meminfo", "MemTotal")
        return there - _kernel_bytes("/proc/meminfo", "MemAvailable")

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._most_bytes = max(self._most_bytes, self._used_bytes())


def train(contender: Contender, order: Order, first: int, steps: int) -> Result:
    """Run and time steps, counted from `first`; all their work is done when the clock stops."""
    data = [order.data(first + step) for step in range(steps)]
    started_s, used_s = time.perf_counter(), time.process_time()
    losses = [contender.step(micro_batches) for micro_batches in data]
    contender.finish()
    step_s, processor_s = time.perf_counter() - started_s, time.process_time() - used_s
    return {"step_s": step_s / steps, "processor_s": processor_s / steps, "losses": losses}


def main() -> None:
    """Obey."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(result: Result) -> None:
        answers.write(json.dumps(result) + "\n")
        answers.flush()

    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(asked.pop("threads"))
    keep_freed()
    name = asked.pop("name")
    order = Order(**{**asked, "case": OffloadCase(**asked["case"])})
    try:
        _prepare(name, order)
        peak = HostPeak(machine=order.device == "cuda")
        contender = OPEN[name](order)
        done = 0
        answer({"ready": True})
        for line in sys.stdin:
            if line.strip() == "end":
                break
            steps = int(line)
            answer(train(contender, order, done, steps))
            done += steps
        device_bytes = torch.cuda.max_memory_allocated() if order.device == "cuda" else 0
        answer({"host_peak_bytes": peak.bytes(), "device_peak_bytes": device_bytes})
    except Exception as error:  # noqa: BLE001  the row says why; the others go on
        answer({"failed": _reason(error)})
    os._exit(0)  # libraries' threads and exit hooks are of no interest


def _prepare(name: str, order: Order) -> None:
    """Give a GPU its budget, and train something tiny: what libraries keep is there afterwards."""
    if name == "deepspeed":
        os.environ["DS_ACCELERATOR"] = order.device
    if order.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.init()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        if order.device_memory is not None and name != "resident":
            share = parse_bytes(order.device_memory, "device memory") / total_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    tiny = order._replace(case=_TINY)
    contender = OPEN[name](tiny)
    train(contender, tiny, 0, 2)
    del contender
    gc.collect()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or repr(error)
    return f"{type(error).__name__}: {text[:300]}"


def _kernel_bytes(file: str, field: str) -> int:
    for line in Path(file).read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{file} has no {field}; this benchmark needs Linux")


if __name__ == "__main__":
    main()

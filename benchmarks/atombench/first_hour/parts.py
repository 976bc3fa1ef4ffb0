"""What the first hour measures, one function a part, each run in a process of its own.

`python -m atombench.first_hour.parts JSON` runs one part and leaves what it found in a file, also
what was found before a part failed or was ended. What lacks a package is told in `skipped`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atombench.common import BenchmarkOptions, Result, description, progress, report
from atombench.engine import large, optimizer
from atombench.first_hour import failures
from atombench.first_hour.sizes import NEEDED, SIZES, PartOrder
from atombench.first_hour.trials import memory, timeline
from atombench.offloaders.offloaders import Setting, WorkerError, opened
from atomtrain.engine.calibration.probes import link_rates
from atomtrain.engine.devices.devices import open_device
from atomtrain.errors import ConfigError
from atomtrain.native.library import core

ROOT = Path(__file__).resolve().parents[3]
_REPEATS = 10
_OFFLOAD_STEPS = 2
_OFFLOAD_SETTING = Setting(4, {})


def machine(order: PartOrder) -> Result:
    """Facts, the link each way and both at once, pinning, and a product in bfloat16."""
    result: Result = {
        **description(),
        "torch_cuda": torch.version.cuda,
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "compiled_core": core() is not None,
        "skipped": {name: what for name, what in NEEDED.items() if not _there(name)},
    }
    device = open_device(order.device, None if order.device == "cuda" else "1GiB")
    try:
        result |= {"device": device.name, "device_budget_bytes": device.memory_bytes}
        if order.device == "cuda":
            facts = torch.cuda.get_device_properties(0)
            result["device_bytes"] = facts.total_memory
            result["compute_capability"] = f"{facts.major}.{facts.minor}"
            result["processors"] = facts.multi_processor_count
        order.keep(result)
        for kind, pinned in (("pinned", True), ("pageable", False)):
            rates = link_rates(device, pinned=pinned)
            result[kind] = rates._asdict()
            order.keep(result)
        result["product_flops_per_s"] = _product_flops_per_s(device, order.size.product)
        order.keep(result)
        result["pinning"] = []
        for n_bytes in order.size.pinned_bytes:
            started_s = time.perf_counter()
            memory = device.host_empty(n_bytes)
            taken_s = time.perf_counter() - started_s
            del memory
            freed_s = time.perf_counter() - started_s - taken_s
            result["pinning"].append({"bytes": n_bytes, "pin_s": taken_s, "unpin_s": freed_s})
            order.keep(result)
    finally:
        device.close()
    return result


def _product_flops_per_s(device: Any, rows: int) -> float:
    """Return the FLOPs a second of a product of random bfloat16 matrices."""
    with device.computing():
        there = {"dtype": torch.bfloat16, "device": device.torch_device}
        left, right = (torch.randn(rows, rows, **there) for _ in range(2))
        for repeats in (3, _REPEATS):  # the first ones warm up
            device.synchronize()
            started_s = time.perf_counter()
            for _ in range(repeats):
                torch.mm(left, right)
            device.synchronize()
            taken_s = (time.perf_counter() - started_s) / repeats
    return 2 * rows**3 / taken_s


_OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_TEST = re.compile(rf"^(?:tests/\S+?::.*? |\[gw\d+\] \[ *\d+%\] )({_OUTCOMES})\b")
"""A line of `pytest -v`, alone or with pytest-xdist."""
_PROCESSES = 6


def tests(order: PartOrder) -> Result:
    """The tests of the GPU, up to ten failures; several at a time where pytest-xdist is."""
    result: Result = {"counts": {}, "failed": [], "skipped": {}}
    if not _there("pytest"):
        result["skipped"]["pytest"] = NEEDED["pytest"]
        return result
    options = ["-m", "gpu", "--maxfail=10", "-v", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-p", failures.__name__]
    processes = min(_PROCESSES, len(os.sched_getaffinity(0)) // 2)
    if processes > 1 and _there("xdist"):
        options += ["-n", str(processes)]
    # The folder that `hour` gives each hour to itself: what is left of a part that is ended goes.
    told = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"told-{os.getpid()}"
    told.write_text("", encoding="utf-8")
    counts = Counter[str]()
    tail: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "tests", *options, "--durations=5"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, failures.FILE: str(told)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[-400:], line.rstrip()]
            found = _TEST.match(line)
            if found is None:
                continue
            counts[found[1].lower()] += 1
            result["counts"] = dict(counts)
            result["failed"] = [json.loads(each) for each in told.read_text("utf-8").splitlines()]
            order.keep(result)
    told.unlink()
    result |= {"exit_code": process.returncode, "output": tail[-200:]}
    if process.returncode:
        order.keep(result)
        raise ConfigError(f"pytest ended with {process.returncode}: {tail[-1] if tail else ''}")
    return result


def optimizers(order: PartOrder) -> Result:
    """Host optimizers on few and on many threads."""
    cores = len(os.sched_getaffinity(0))
    result: Result = {"cores": cores, "threads": {}, "compiled_core": core() is not None}
    for threads in order.size.threads:
        if threads > cores:
            progress(f"{threads} threads are left out: there are {cores} cores")
            continue
        torch.set_num_threads(threads)
        found = optimizer.run(BenchmarkOptions(), order.size.optimizer)
        kept = ("parameters_per_s", "copy_bytes_per_s", "share_of_copy_bound", "optimizers")
        result["threads"][str(threads)] = {key: found[key] for key in kept}
        order.keep(result)
    return result


def seven_billion(order: PartOrder) -> Result:
    """The largest model, by `atom bench large`; what is known is kept after each step."""
    setup = dataclasses.replace(order.size.large, device=order.device)
    return large.run(BenchmarkOptions(out=order.out), setup)


def offloaders(order: PartOrder) -> Result:
    """A model that fits, trained resident, by FSDP2 with offload, and by ATOM."""
    case = order.size.offloaders
    cuda = order.device == "cuda"
    place = {
        "device": "cuda" if cuda else "cpu",
        "device_memory": order.size.offloaders_memory if cuda else None,
    }
    result: Result = {"rows": {}, "tokens_per_step": case.tokens_per_step, "skipped": {}}
    result["inputs"] = {**dataclasses.asdict(case), **place}
    for name in ("resident", "fsdp2", "atom"):
        started_s = time.perf_counter()
        try:
            with opened(name, _OFFLOAD_SETTING, case, place) as worker:
                opened_s = time.perf_counter() - started_s
                first = worker.ask(1)
                found = worker.ask(_OFFLOAD_STEPS)
                row = {**found, "open_s": opened_s, "first_step_s": first["step_s"]}
                row |= worker.ask("end")
                row["losses"] = first["losses"] + found["losses"]
        except WorkerError as error:
            row = {"failure": str(error)}
        result["rows"][name] = row
        order.keep(result)
    failed = {name: row["failure"] for name, row in result["rows"].items() if "failure" in row}
    if failed:
        raise ConfigError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return result


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


PARTS: dict[str, Callable[[PartOrder], Result]] = {
    "machine": machine,
    "tests": tests,
    "memory": memory,
    "optimizers": optimizers,
    "timeline": timeline,
    "large": seven_billion,
    "offloaders": offloaders,
}


def main() -> int:
    """Run the part that the argument names; return the exit code."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    out = Path(order["out"])
    result = PARTS[order["part"]](PartOrder(order["device"], SIZES[order["size"]], out))
    report({**result, "complete": True}, json=True, out=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

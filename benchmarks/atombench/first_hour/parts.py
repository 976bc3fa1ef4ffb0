"""What the first hour measures, one function a part, each run in a process of its own.

`python -m atombench.first_hour.parts JSON` runs one part and leaves what it found in a file, also
what was found before a part failed or was ended. What lacks a package is told in `skipped`.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, keep_partial, progress, report
from atombench.engine import large, optimizer
from atombench.engine.large import LargeSetup
from atombench.first_hour.sizes import SIZES, Size
from atombench.offloaders.offloaders import Setting, WorkerError, opened
from atomtrain.engine.calibration.probes import link_rates
from atomtrain.engine.devices.devices import open_device
from atomtrain.errors import ConfigError, reason_of
from atomtrain.models import GPT
from atomtrain.models.gpt_config import preset
from atomtrain.native.library import core
from atomtrain.planning.cost.timeline import Span
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.search.search import least_budget_bytes
from atomtrain.training.config.optimizing import named_optimizer, precision_of

ROOT = Path(__file__).resolve().parents[3]
NEEDED = {
    "pytest": "the tests of the GPU",
    "transformers": "the Llama",
    "deepspeed": "its row beside other offloaders",
    "hivemind": "everything of the swarm",
    "blake3": "checkpoints and the swarm",
    "cryptography": "the swarm",
    "msgspec": "the swarm",
}
"""Packages that may be missing, and what goes with them."""
_REPEATS = 10
_TIGHTER = 1.03
"""A tight cap over the least with which any plan works."""
_OFFLOAD_STEPS = 2
_OFFLOAD_SETTING = Setting(4, {})


class Order(NamedTuple):
    """Where a part runs, how much it does, and where what it finds is kept."""

    device: str
    size: Size
    out: Path

    def keep(self, result: Result) -> None:
        """Keep what has been found so far."""
        keep_partial(result, self.out)


def machine(order: Order) -> Result:
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


_TEST = re.compile(r"^(tests/\S+?::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def tests(order: Order) -> Result:
    """The tests of the GPU, up to ten failures."""
    result: Result = {"counts": {}, "failed": [], "skipped": {}}
    if not _there("pytest"):
        result["skipped"]["pytest"] = NEEDED["pytest"]
        return result
    options = ("-m", "gpu", "--maxfail=10", "-v", "--tb=short", "-p", "no:cacheprovider")
    counts = Counter[str]()
    tail: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "tests", *options, "--durations=5"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[-400:], line.rstrip()]
            found = _TEST.match(line)
            if found is None:
                continue
            counts[found[2].lower()] += 1
            if found[2] in ("FAILED", "ERROR"):
                result["failed"].append(found[1])
            result["counts"] = dict(counts)
            order.keep(result)
    result |= {"exit_code": process.returncode, "output": tail[-200:]}
    if process.returncode:
        order.keep(result)
        raise ConfigError(f"pytest ended with {process.returncode}: {tail[-1] if tail else ''}")
    return result


def memory(order: Order) -> Result:
    """Peaks, predicted and measured, and whether two runs give the same bits; GPT and Llama."""
    result: Result = {"models": {}, "skipped": {}}
    for name, make in (("gpt", _gpt), ("llama", _llama)):
        runs: list[_Run] = []
        for _ in range(2):
            try:
                runs.append(_trained(order, make))
            except ModuleNotFoundError as error:  # transformers, or what it needs
                result["skipped"][str(error.name)] = NEEDED["transformers"]
                break
            result["models"][name] = {
                **runs[0].keys,
                "same_bits": _same(*runs) if len(runs) == 2 else None,
            }
            order.keep(result)
    return result


class _Run(NamedTuple):
    keys: Result
    losses: list[float]
    state: dict[str, Tensor]


def _trained(order: Order, make: Callable[[Size], nn.Module]) -> _Run:
    """Train a model for three steps in bfloat16 with the kernels that PyTorch chooses itself."""
    size, cuda = order.size, order.device == "cuda"
    torch.manual_seed(0)
    model = make(size)
    shape = (size.model_sequences, size.model.context)
    batches = [_tokens(size.model.vocabulary, shape) for _ in range(4)]
    device = open_device(order.device, size.model_memory)
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=lambda _: named_optimizer(model, "adamw", "bf16"),
        device=device,
        # Else a model that fits would never be swapped.
        options=atomtrain.Options(
            micro_batches=len(batches),
            clip_norm=1.0,
            precision=precision_of("bf16"),
            optimizer_on_device=False,
        ),
    ) as engine:
        losses, allocated, reserved = [], 0, 0
        for _ in range(3):
            losses.append(engine.step(batches))
            assert engine.last is not None
            allocated = max(allocated, engine.last.device_peak_bytes)
            reserved = max(reserved, torch.cuda.max_memory_reserved() if cuda else 0)
        keys = {
            "predicted_peak_bytes": engine.plan.device_peak_bytes,
            "library_bytes": device.reserved_bytes,
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": reserved if cuda else None,
            "budget_bytes": device.memory_bytes,
            "segments": engine.plan.segments,
            "activations": dict(Counter(engine.plan.activations)),
            "losses": losses,
        }
        engine.synchronize()
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    return _Run(keys, losses, state)


def _same(one: _Run, other: _Run) -> bool:
    return one.losses == other.losses and all(
        torch.equal(value, other.state[name]) for name, value in one.state.items()
    )


def _gpt(size: Size) -> nn.Module:
    return GPT(size.model)


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.model.vocabulary,
            hidden_size=size.model.width,
            intermediate_size=8 * size.model.width // 3 // 16 * 16,
            num_hidden_layers=size.model.layers,
            num_attention_heads=size.model.heads,
            num_key_value_heads=max(1, size.model.heads // 2),
            max_position_embeddings=size.model.context,
            use_cache=False,
        )
    )


def _tokens(vocabulary: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def optimizers(order: Order) -> Result:
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


def timeline(order: Order) -> Result:
    """A step's spans, predicted and measured: as it is, under a tight cap, and compiled."""
    setup = dataclasses.replace(order.size.timeline, device=order.device)
    result: Result = {"model": setup.model, "cases": {}, "skipped": {}}
    tight: str | None = None
    for name in ("plain", "tight", "compiled"):
        case = setup
        if name == "tight":
            assert tight is not None
            case = dataclasses.replace(setup, device_memory=tight)
        elif name == "compiled" and order.device != "cuda":
            # The emulated device sees no compiled operations; the host runs the same code.
            case = dataclasses.replace(setup, device="cpu")
        try:
            found, least_bytes = _recorded(case, compiled=name == "compiled")
        except Exception as error:
            if name != "compiled":
                raise
            # Compilers lack on some machines; what the others found is worth keeping.
            result["skipped"][name] = f"{type(error).__name__}: {reason_of(error)}"
        else:
            result["cases"][name] = found
            tight = tight or f"{int(_TIGHTER * least_bytes)}B"
        order.keep(result)
        gc.collect()
    return result


def _recorded(setup: LargeSetup, *, compiled: bool) -> tuple[Result, int]:
    """Return what a step did when, and the least budget of the model."""
    torch.manual_seed(setup.seed)
    sizes = preset(setup.model)
    model = large.random_gpt(sizes)
    shape = (setup.sequences, setup.context_tokens)
    batches = [_tokens(sizes.vocabulary, shape) for _ in range(setup.micro_batches)]
    started_s = time.perf_counter()
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=lambda _: named_optimizer(model, str(setup.optimizer), setup.precision),
        device=setup.device,
        device_memory=None if setup.device == "cpu" else setup.device_memory,
        options=atomtrain.Options(
            micro_batches=setup.micro_batches,
            clip_norm=1.0,
            head_pieces="auto",
            precision=precision_of(setup.precision),
            compile=compiled,
        ),
    ) as engine:
        open_s = time.perf_counter() - started_s
        first_s = _timed(lambda: engine.step(batches))
        steps_s = [_timed(lambda: engine.step(batches)) for _ in range(setup.steps)]
        engine.recording = True
        steps_s.append(_timed(lambda: engine.step(batches)))
        assert engine.last is not None
        planner = engine.planner
        least_bytes = engine.device.reserved_bytes + least_budget_bytes(
            planner.chain, planner.costs, planner.times, planner.machine,
            Request(micro_batches=setup.micro_batches, clips=True, updates=planner.updates),
        )  # fmt: skip
        measured, predicted = engine.last_spans(), engine.predicted_spans()
        return {
            "budget_bytes": engine.device.memory_bytes,
            "open_s": open_s,
            "first_step_s": first_s,
            "steps_s": steps_s,
            "predicted_step_s": engine.plan.step_s,
            "measured_step_s": engine.last.step_s,
            "link_wait_s": engine.last.link_wait_s,
            "tokens_per_s": setup.tokens_per_step / engine.last.step_s,
            "device_peak_bytes": engine.last.device_peak_bytes,
            "predicted_device_peak_bytes": engine.plan.device_peak_bytes,
            "predicted_busy_s": _busy_s(predicted),
            "measured_busy_s": _busy_s(measured),
            "predicted_spans": list(_spans(predicted)),
            "measured_spans": list(_spans(measured)),
            "plan": engine.plan.to_json(),
        }, least_bytes


def _busy_s(spans: tuple[Span, ...]) -> dict[str, float]:
    busy = Counter[str]()
    for span in spans:
        busy[span.stream] += span.end_s - span.start_s  # type: ignore[assignment]
    return dict(busy)


def _spans(spans: tuple[Span, ...]) -> Iterator[list[Any]]:
    """Yield stream, label, begin and end in seconds since the first one began."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    for one in spans:
        yield [one.stream, one.label, round(one.start_s - zero_s, 6), round(one.end_s - zero_s, 6)]


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def seven_billion(order: Order) -> Result:
    """The largest model, by `atom bench large`; what is known is kept after each step."""
    setup = dataclasses.replace(order.size.large, device=order.device)
    return large.run(BenchmarkOptions(out=order.out), setup)


def offloaders(order: Order) -> Result:
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


PARTS: dict[str, Callable[[Order], Result]] = {
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
    result = PARTS[order["part"]](Order(order["device"], SIZES[order["size"]], out))
    report({**result, "complete": True}, json=True, out=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

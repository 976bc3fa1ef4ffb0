"""A run's folder as its peers write it, made up: events, timelines, and a table of peers."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

from atomtrain.events import EventLog

Row = dict[str, Any]
STEPS = 120
DAMAGE = "<img src=x onerror=alert(1)>"


def write_run(folder: Path, peers: int = 3) -> dict[str, EventLog]:
    """Write what `peers` peers tell of 120 steps; return their logs, still open."""
    logs = {}
    names = [f"peer-{index}" for index in range(peers)]
    for index, name in enumerate(names):
        source = random.Random(index)
        log = logs[name] = EventLog(folder / name / "events.jsonl")
        log.emit(
            "run_started", run="made-up", peer=name, model="tiny", device="emulated", steps=STEPS,
            parameters=236_928, state_bytes=3_790_848, device_memory_bytes=6 << 20,
        )  # fmt: skip
        log.emit(
            "plan", text="segments   4\ndevice     5.9 MiB", segments=4, predicted_step_s=0.1,
            predicted_device_peak_bytes=6_000_000, host_bytes=12_000_000, bound="compute",
            memory=memory(),
        )  # fmt: skip
        for step in range(1, STEPS + 1):
            tell_step(log, step, source)
            if step % 30 == 0:
                tell_timeline(log, step)
                log.emit("evaluation", step=step, loss=3.0, bits_per_byte=4 - step / 60)
                log.emit(
                    "round", round=step, fragment=step % 4, outcome="averaged", contributors=peers,
                    members=names[:8], peer_ids=[f"id-{name}" for name in names[:8]],
                    weights=[256 * 30] * len(names[:8]), bytes_sent=1e6, bytes_received=1e6,
                    duration_s=0.05, reason="", rejected=["liar: not finite"] if index else [],
                )  # fmt: skip
        log.emit("expelled", peer_id="id-liar", name="liar", reason="its mean is made up")
        log.emit("sample", step=STEPS, prompt="It was", text=f"a night {index}")
        log.emit("warning", message=f"{DAMAGE} cannot be trusted")
    write_swarm(folder / names[0], rows(names))
    return logs


def tell_step(log: EventLog, step: int, source: random.Random) -> None:
    """Tell one step."""
    log.emit(
        "step", step=step, steps=STEPS, loss=6 * math.exp(-step / 60) + 0.3 * source.random(),
        tokens=256, tokens_total=256 * step, tokens_per_s=9000 + 2000 * source.random(),
        step_s=0.1 + 0.01 * source.random(), gradient_norm=1 + source.random(),
        host_resident_bytes=300_000_000 + 1000 * step, link_wait_share=0.02,
        device_peak_bytes=6_071_820,
        device_budget_bytes=6 << 20, state_bytes=3_790_848, learning_rate=1e-3, peers=3, round=1,
        time_left_s=12.0,
    )  # fmt: skip


def tell_timeline(log: EventLog, step: int) -> None:
    """Tell what each stream did."""
    spans = []
    for visit in range(8):
        phase = "forward" if visit < 4 else "turn" if visit == 4 else "backward"
        layers = visit if visit < 5 else 8 - visit
        start_s = 50 + 0.01 * visit
        spans.append(["load", f"{phase} {layers}", start_s - 0.01, start_s - 0.004])
        spans.append(["compute", f"{phase} {layers}", start_s, start_s + 0.0098])
        if visit >= 4:
            spans.append(["unload", f"{phase} {layers}", start_s + 0.01, start_s + 0.013])
            spans.append(["update", f"{phase} {layers}", start_s + 0.013, start_s + 0.02])
    log.emit(
        "timeline", step=step, start_time_s=time.time() - 0.1, step_s=0.1, predicted_step_s=0.1,
        measured=spans, predicted=spans,
    )  # fmt: skip


def memory() -> list[Row]:
    """Return regions as a plan event has them."""
    host = [
        {"place": "host", "kind": kind, "label": f"segment {number}", "bytes": 900_000}
        for kind in ("parameters", "gradients", "optimizer")
        for number in range(4)
    ]
    device = [
        {"place": "device", "kind": "slot", "label": "slot 0", "bytes": 400_000},
        {"place": "device", "kind": "gradient", "label": "gradient buffer 0", "bytes": 400_000},
        {"place": "device", "kind": "work", "label": "workspace", "bytes": 5_000_000},
        {"place": "device", "kind": "free", "label": "free", "bytes": 491_456},
    ]
    return [*host, *device]


def rows(names: list[str], step: int = 100) -> list[Row]:
    """Return a table of peers."""
    return [
        {
            "peer_id": f"id-{name}", "name": name, "is_self": index == 0, "state": "training",
            "next_round": 5, "steps": step + index, "tokens": 256 * (step + index),
            "tokens_per_s": 1000.0 + index, "step_s": 0.1, "behind": index % 3,
            "free_bytes_per_s": 1e6 * (1 + index % 9),
            "reachable": index % 7 != 6, "seen_s": time.time() - index % 5,
            "addresses": [f"/ip4/192.0.2.1/tcp/1/p2p/{'x/p2p-circuit' if index % 5 == 4 else 'x'}"],
        }
        for index, name in enumerate(names)
    ]  # fmt: skip


def write_swarm(folder: Path, peers: list[Row]) -> None:
    """Write the table of peers as a peer does."""
    temporary = folder / ".swarm.tmp"
    temporary.write_text(json.dumps({"time_s": time.time(), "peers": peers}))
    temporary.replace(folder / "swarm.json")

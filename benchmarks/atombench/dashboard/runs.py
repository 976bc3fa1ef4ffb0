"""Folders of long runs as peers leave them, made up: events of many steps, and a table of peers."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atomtrain.events import EVENTS_FILE, SWARM_FILE, Event

_STEP_S = 0.5
_TOKENS = 256
_EVALUATE_EVERY, _ROUND_EVERY = 500, 100
_FRAGMENTS = 8


def write_run(folder: Path, steps: int, seed: int) -> None:
    """Write what a peer of its own run told of so many steps, the last one just now."""
    folder.mkdir(parents=True)
    with (folder / EVENTS_FILE).open("w", encoding="utf-8") as file:
        for event in _history(folder.name, steps, seed):
            file.write(json.dumps(event) + "\n")


def step_told(step: int, steps: int, source: random.Random) -> Event:
    """Return the fields of a step's event."""
    loss = 3 + 4 * math.exp(-4 * step / steps) + 0.3 * source.random()
    return {
        "step": step, "steps": steps, "loss": loss, "tokens": _TOKENS,
        "tokens_total": _TOKENS * step, "tokens_per_s": 9000 + 2000 * source.random(),
        "step_s": _STEP_S + 0.05 * source.random(), "gradient_norm": 1 + source.random(),
        "host_resident_bytes": 300_000_000 + step, "link_wait_share": 0.02,
        "device_peak_bytes": 6_071_820, "device_budget_bytes": 6 << 20,
        "state_bytes": 3_790_848, "learning_rate": 1e-3 * (1 - 0.9 * step / steps), "peers": 3,
        "round": step // _ROUND_EVERY, "time_left_s": _STEP_S * (steps - step),
    }  # fmt: skip


def write_peers(folder: Path, peers: int, step: int) -> None:
    """Write a peer's table of all peers, as of now."""
    now_s = time.time()
    rows = [
        {
            "peer_id": f"id-{index}", "name": f"peer-{index}", "is_self": index == 0,
            "state": "training", "next_round": 5, "steps": step + index,
            "tokens": _TOKENS * (step + index), "tokens_per_s": 1000.0 + index, "step_s": _STEP_S,
            "behind": index % 3, "reachable": index % 7 != 6, "seen_s": now_s - index % 5,
            "addresses": ["/ip4/192.0.2.1/tcp/1/p2p/x"],
        }
        for index in range(peers)
    ]  # fmt: skip
    temporary = folder / f".{SWARM_FILE}"
    temporary.write_text(json.dumps({"time_s": now_s, "peers": rows}))
    temporary.replace(folder / SWARM_FILE)


def _history(name: str, steps: int, seed: int) -> Iterator[Event]:
    source, now_s = random.Random(seed), time.time()

    def told(kind: str, step: int, /, **fields: Any) -> Event:
        return {"time_s": now_s - _STEP_S * (steps - step), "event": kind, **fields}

    yield told(
        "run_started", 0, run=name, peer=name, model="tiny", device="emulated", steps=steps,
        parameters=236_928, state_bytes=3_790_848, device_memory_bytes=6 << 20,
    )  # fmt: skip
    yield told(
        "plan", 0, text="segments   4\ndevice     5.9 MiB", segments=4, predicted_step_s=_STEP_S,
        predicted_device_peak_bytes=6_000_000, host_bytes=12_000_000, bound="compute",
        memory=[
            {"place": place, "kind": "parameters", "label": f"segment {number}", "bytes": 900_000}
            for place in ("host", "device") for number in range(4)
        ],
    )  # fmt: skip
    members = ["peer-0", "peer-1", "peer-2"]
    for step in range(1, steps + 1):
        yield told("step", step, **step_told(step, steps, source))
        if step % _EVALUATE_EVERY == 0:
            yield told("evaluation", step, step=step, loss=3.0, bits_per_byte=2 + 2 / step)
        if step % _ROUND_EVERY == 0:
            yield told(
                "round", step, round=step // _ROUND_EVERY, fragment=step % _FRAGMENTS,
                outcome="averaged", contributors=3, members=members,
                peer_ids=[f"id-{index}" for index in range(3)], weights=[_TOKENS * 30] * 3,
                bytes_sent=1e6, bytes_received=1e6, duration_s=0.05, reason="", rejected=[],
            )  # fmt: skip
    yield told("timeline", steps, step=steps, start_time_s=now_s - _STEP_S, step_s=_STEP_S,
               predicted_step_s=_STEP_S, measured=_spans(), predicted=_spans())  # fmt: skip


def _spans() -> list[tuple[str, str, float, float]]:
    return [
        (stream, f"{phase} {visit}", 0.01 * visit + shift_s, 0.01 * visit + shift_s + 0.009)
        for visit in range(40)
        for phase in ("forward" if visit < 20 else "backward",)
        for stream, shift_s in (("load", 0.0), ("compute", 0.01))
    ]

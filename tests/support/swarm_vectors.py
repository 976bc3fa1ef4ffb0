"""What the peers of these tests train, how they enter a swarm, and how they tell of it.

They "train" small vectors towards a target of their own, and say one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from atomtrain.swarm import Manifest, RoundReport, Swarm, SwarmConfig
from tests.support.swarm_configs import swarm_config

TOKENS_A_STEP = 100
_PRINTING = threading.Lock()


class Vectors:
    """Fragments as plain tensors; a step moves each towards a target."""

    def __init__(self, elements: tuple[int, ...]) -> None:
        self.fragments = [torch.zeros(n) for n in elements]

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]

    def step(self, target: float) -> None:
        self.step_to([torch.tensor(target)] * len(self.fragments))

    def step_to(self, targets: Sequence[torch.Tensor]) -> None:
        for fragment, target in zip(self.fragments, targets, strict=True):
            fragment.lerp_(target, 0.05)

    def means(self) -> list[float]:
        return [float(fragment.mean()) for fragment in self.fragments]


def say(kind: str, **fields: Any) -> None:
    with _PRINTING:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def config_of(settings: dict[str, Any]) -> SwarmConfig:
    """Return the configuration that a test's settings stand for; most have a default."""
    return swarm_config(
        run=settings["run"],
        listen_host=settings.get("host", "127.0.0.1"),
        join=tuple(settings.get("join", ())),
        identity_path=_path(settings, "identity"),
        peers_path=_path(settings, "peers_file"),
        key_path=_path(settings, "key"),
        discoverable=settings.get("discoverable", False),
        local_steps_per_round=settings.get("local_steps", 8),
        outer_momentum=settings.get("momentum", 0.0),
        group_size=settings.get("group_size"),
        mean=settings.get("mean"),
        wire=settings.get("wire", "float16"),
        expiry_s=settings.get("expiry_s", 5.0),
        connect_s=settings.get("connect_s", 5.0),
        stall_s=settings.get("stall_s", 5.0),
        round_floor_s=settings.get("round_floor_s", 4.0),
    )


def found(settings: dict[str, Any]) -> tuple[Swarm, Vectors]:
    """Start a run."""
    config = config_of(settings)
    elements = tuple(settings.get("elements", (2000, 3001)))
    vectors = Vectors(elements)
    manifest = Manifest(config.run, elements, {"kind": "test"})
    return Swarm.found(config, manifest, vectors, judge=judge_of(vectors, settings)), vectors


def judge_of(vectors: Vectors, settings: dict[str, Any]) -> Callable[[], float] | None:
    """Return the loss, if the peer is to judge by it: how far off its worst fragment is.

    As with layers: a model is no better than the worst of them.
    """
    if not settings.get("judges"):
        return None
    return lambda: max(
        float((fragment - settings["target"]).square().mean()) for fragment in vectors.fragments
    )


def cross(swarm: Swarm, vectors: Vectors, step_s: float, steps: int = 1) -> list[RoundReport]:
    """Cross the boundary after a step that took `step_s`, or after none."""
    return swarm.boundary(
        steps=steps,
        tokens=steps * TOKENS_A_STEP,
        tokens_per_s=TOKENS_A_STEP / step_s,
        step_s=step_s,
        access=vectors,
    )


def daemon_pid(swarm: Swarm) -> int:
    return swarm._service.context.transport._daemon.pid


def _path(settings: dict[str, Any], name: str) -> Path | None:
    return Path(settings[name]) if name in settings else None

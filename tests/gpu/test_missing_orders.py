"""Events and waits of the CUDA device are needed: without them the software GPU shows a mistake.

So the tests on the software GPU can fail: what they would miss on a real one, where a copy is
usually early enough, is found in most orders of work, or reported as an access without order.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import atomtrain
from atomtrain.engine import planner
from atomtrain.engine.devices import gpu_device
from atomtrain.engine.devices.gpu_device import GpuDevice, _GpuEvent, _GpuStream
from atomtrain.engine.devices.streams import Event, Job
from atomtrain.engine.execution import boundary_activations as carried
from atomtrain.engine.execution import offload
from atomtrain.planning.plan.shape import Activation
from tests.gpu.test_cuda import train, untied_gpt
from tests.gpu.test_on_software_gpu import small  # noqa: F401
from tests.support.software_gpu import installed

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="a real torch.cuda is not to be replaced"
    ),
    pytest.mark.usefixtures("assumed_times", "small"),
]
SEEDS = range(4)
LATE_S = 0.05
Change = Callable[[pytest.MonkeyPatch], None]


def late_updates(stream: str) -> None:
    """Hold up the host, which otherwise waits for unloads before anybody else could."""
    if stream == "update":
        time.sleep(LATE_S)


def outcome(
    seed: int, activations: Activation, change: Change
) -> tuple[list[float] | None, dict[str, Tensor], list[str]]:
    """Train with a change; return losses (`None` if that failed), parameters and reports."""
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        # So small a model's values would stay on the device.
        patch.setattr(planner, "Request", functools.partial(planner.Request, boundary="host"))
        gpus = None
        try:
            with installed(seed=seed) as gpus:
                losses, state, _ = train(
                    untied_gpt(),
                    8,
                    late_updates,
                    clip_norm=None,
                    slots=3,
                    activations=activations,
                )
        except RuntimeError:  # as the executor and the GPU tell it
            losses, state = None, {}
        assert gpus is not None
        return losses, state, gpus.reports


def unordered(name: str) -> Change:
    """Compute does not wait for what a stream does."""

    class Unordered(_GpuEvent):
        def order(self, stream: torch.cuda.Stream) -> None:
            Event.wait(self)

        def is_done(self) -> bool:  # else it is waited for on the host, if it is not done
            return False

    def change(patch: pytest.MonkeyPatch) -> None:
        made = _GpuStream._new_event
        patch.setattr(
            _GpuStream, "_new_event", lambda s: Unordered(s._vendor) if s.name == name else made(s)
        )

    return change


def buffer_taken_too_early(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for unloads, of the only gradient buffer."""
    unordered("unload")(patch)
    patch.setattr(atomtrain, "Options", functools.partial(atomtrain.Options, gradient_buffers=1))
    # An update waits for its unload on the host, which then is in order with the next visit.
    patch.setattr(sys.modules[__name__], "LATE_S", 1.0)


def heedless(name: str) -> Change:
    """A stream waits for nothing that the GPU does."""

    def change(patch: pytest.MonkeyPatch) -> None:
        run = _GpuStream._run

        def hurried(stream: _GpuStream, job: Job, after: Sequence[Event], event: Event) -> None:
            if stream.name != name:
                run(stream, job, after, event)
                return
            for earlier in after:
                Event.wait(earlier)
            run(stream, job, (), event)

        patch.setattr(_GpuStream, "_run", hurried)

    return change


def recorded_too_early(patch: pytest.MonkeyPatch) -> None:
    """Events of jobs are recorded before the job."""
    run = _GpuStream._run

    def early(stream: _GpuStream, job: Job, after: Sequence[Event], event: Any) -> None:
        event.recorded.record(stream._queue)
        later = _GpuEvent(stream._vendor)
        run(stream, job, after, later)

    patch.setattr(_GpuStream, "_run", early)


def host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Updates begin when the unload is queued."""
    patch.setattr(_GpuEvent, "wait", Event.wait)


def marks_nothing(patch: pytest.MonkeyPatch) -> None:
    """What compute was given so far is not recorded."""

    def mark(device: GpuDevice) -> Event:
        event = _GpuEvent(device.vendor)
        event.finish()
        return event

    patch.setattr(GpuDevice, "mark", mark)


def frees_what_is_saved(patch: pytest.MonkeyPatch) -> None:
    """Values leave the device before they are on the host."""
    patch.setattr(carried.Outbox, "drain", lambda box: box._leaving.clear())


def frees_what_is_offloaded(patch: pytest.MonkeyPatch) -> None:
    """Saved tensors leave the device before they are on the host."""

    def let_go(way: offload.Offload) -> None:
        way._leaving_bytes -= way._leaving.popleft().n_bytes

    patch.setattr(offload.Offload, "_let_go", let_go)


def order_forgotten(patch: pytest.MonkeyPatch) -> None:
    """No stream waits for another one's event."""
    patch.setattr(gpu_device, "_order", lambda event, stream: Event.wait(event))


CASES: dict[str, tuple[Activation, Change]] = {
    "compute does not wait for loads": ("recompute", unordered("load")),
    "compute does not wait for fetches": ("recompute", unordered("fetch")),
    "compute does not wait for saves": ("recompute", unordered("save")),
    "compute does not wait for unloads": ("recompute", buffer_taken_too_early),
    "loads do not wait for compute": ("recompute", heedless("load")),
    "fetches do not wait for saves": ("recompute", heedless("fetch")),
    "unloads do not wait for compute": ("recompute", heedless("unload")),
    "saves do not wait for compute": ("recompute", heedless("save")),
    "offload: compute does not wait for fetches": ("offload", unordered("fetch")),
    "offload: compute does not wait for saves": ("offload", unordered("save")),
    "offload: saves do not wait for compute": ("offload", heedless("save")),
    "events are recorded too early": ("recompute", recorded_too_early),
    "updates do not wait for gradients": ("recompute", host_does_not_wait),
    "compute is not recorded": ("recompute", marks_nothing),
    "values are freed too early": ("recompute", frees_what_is_saved),
    "offloaded tensors are freed too early": ("offload", frees_what_is_offloaded),
    "no event orders anything": ("recompute", order_forgotten),
}


@pytest.fixture(scope="module")
def right() -> dict[Activation, tuple[list[float] | None, dict[str, Tensor]]]:
    """What comes of training without a mistake."""
    return {}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_out_is_found(
    case: str, right: dict[Activation, tuple[list[float] | None, dict[str, Tensor]]]
) -> None:
    activations, change = CASES[case]
    if activations not in right:
        losses, state, reports = outcome(0, activations, lambda _: None)
        assert losses is not None
        assert reports == []
        right[activations] = losses, state
    expected_losses, expected = right[activations]
    for seed in SEEDS:
        losses, state, reports = outcome(seed, activations, change)
        differs = losses != expected_losses or any(
            not torch.equal(state[name], value) for name, value in expected.items()
        )
        if differs or reports:
            return
    pytest.fail(f"{case}: found with no seed")

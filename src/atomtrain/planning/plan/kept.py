"""A plan as a training keeps it beside its state, to go on by it: what fixes it, as plain JSON.

What it takes of memory and time is left out: who goes on knows that of the machine that he has.
Nothing that is read is trusted. It is the shape of some model at most; whether the planner has such
a plan for the model at hand, `planning/search/search.py` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from atomtrain.errors import PlanError
from atomtrain.planning.plan.disk import KINDS, OnDisk
from atomtrain.planning.plan.shape import ACTIVATIONS, Boundary, Shape
from atomtrain.settings import MOST_COUNT

_FIELDS = ("made_for", "micro_batches", "on_disk", "shape")
_SHOWN = 40
"""Characters of what is wrong."""


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """What fixes a plan, and what it was made for."""

    made_for: Mapping[str, Any]
    """Everything that was asked for, by what messages call it."""
    micro_batches: int
    """At least as many as were asked for: a step with more makes a new plan."""
    on_disk: OnDisk
    shape: Shape

    def to_json(self) -> dict[str, Any]:
        fields = self.shape._asdict().items()
        return {
            "made_for": dict(self.made_for),
            "micro_batches": self.micro_batches,
            "on_disk": list(self.on_disk),
            "shape": {k: list(v) if isinstance(v, tuple) else v for k, v in fields},
        }

    @classmethod
    def from_json(cls, data: Any) -> KeptPlan:
        """Return the plan that a JSON object describes.

        Raises:
            PlanError: it describes none; says what of it is wrong.
        """
        given = _object("a kept plan", data, _FIELDS)
        fields = _object("its shape", given["shape"], Shape._fields)
        if not isinstance(given["made_for"], Mapping):
            raise _wrong("made_for", given["made_for"], "an object")
        activations = _texts("activations", fields["activations"], ACTIVATIONS)
        if not isinstance(fields["remakes"], bool):
            raise _wrong("remakes", fields["remakes"], "true or false")
        on_disk = KINDS[: len(_texts("on_disk", given["on_disk"], KINDS))]
        if list(on_disk) != given["on_disk"]:
            raise _wrong("on_disk", given["on_disk"], f"the first few of {', '.join(KINDS)}")
        shape = Shape(
            forward_bounds=_wholes(fields, "forward_bounds"),
            backward_bounds=_wholes(fields, "backward_bounds"),
            slots=_whole("slots", fields["slots"]),
            gradient_buffers=_whole("gradient_buffers", fields["gradient_buffers"]),
            boundary=_texts("boundary", [fields["boundary"]], get_args(Boundary))[0],
            resident_blocks=_wholes(fields, "resident_blocks"),
            host_layers=_whole("host_layers", fields["host_layers"]),
            activations=activations,
            device_blocks=_wholes(fields, "device_blocks"),
            remakes=fields["remakes"],
        )
        check_shape(shape, max(shape.backward_bounds, default=0), MOST_COUNT)
        return cls(
            made_for=given["made_for"],
            micro_batches=_whole("micro_batches", given["micro_batches"]),
            on_disk=on_disk,
            shape=shape,
        )


def check_shape(shape: Shape, layers: int, blocks: int) -> None:
    """Check that a shape can be run on a chain of so many layers and blocks.

    Raises:
        PlanError: it cannot; says why.
    """
    if not 0 <= shape.host_layers < layers:
        raise PlanError(
            f"host_layers is {shape.host_layers}; it must be at least 0 and below the number "
            f"of layers, {layers}"
        )
    start = shape.backward_bounds[-2] if len(shape.backward_bounds) > 1 else -1
    for name, bounds, stop in (
        ("forward_bounds", shape.forward_bounds, start),
        ("backward_bounds", shape.backward_bounds, layers),
    ):
        rising = all(low < high for low, high in itertools.pairwise(bounds))
        if not bounds or bounds[0] != shape.host_layers or bounds[-1] != stop or not rising:
            raise PlanError(
                f"{name} are {_shown(list(bounds))}; they must rise from {shape.host_layers} to "
                f"{max(stop, 0)}"
            )
    if shape.slots < 1 or shape.gradient_buffers < 1:
        raise PlanError("a plan has at least one slot and one gradient buffer")
    resident = shape.resident_blocks
    if list(resident) != sorted(set(resident)) or not all(0 <= b < blocks for b in resident):
        raise PlanError(
            f"resident_blocks are {_shown(list(resident))}; they must rise within 0 to {blocks - 1}"
        )
    device = shape.device_blocks
    if list(device) != sorted(set(device)) or not set(device) <= set(resident):
        raise PlanError(
            f"device_blocks are {_shown(list(device))}; they must rise, and be among the resident "
            f"blocks {_shown(list(resident))}"
        )
    if shape.activations and len(shape.activations) != shape.segments:
        raise PlanError(
            f"there are {len(shape.activations)} activations for {shape.segments} segments; "
            "give one for each backward segment"
        )
    ahead = set(itertools.pairwise(shape.forward_bounds))
    for pair, activation in shape.waiting.items():
        if pair not in ahead:
            raise PlanError(
                f"the backward segment of layers {pair[0]} to {pair[1] - 1} cannot "
                f"{activation} what its forward saves, because it is no forward segment; let "
                "both partitions have it, or recompute it"
            )


def _object(what: str, data: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise PlanError(f"{what} is {_shown(data)}; it must have {', '.join(names)}")
    return data


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise _wrong(name, value, f"a whole number of at most {MOST_COUNT}")
    return value


def _wholes(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if not isinstance(fields[name], list):
        raise _wrong(name, fields[name], "a list of whole numbers")
    return tuple(_whole(name, value) for value in fields[name])


def _texts(name: str, values: Any, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(values, list) or any(value not in allowed for value in values):
        raise _wrong(name, values, f"of {', '.join(allowed)}")
    return tuple(values)


def _wrong(name: str, value: Any, allowed: str) -> PlanError:
    return PlanError(f"{name} of a kept plan is {_shown(value)}; it must be {allowed}")


def _shown(value: Any) -> str:
    """Return what can be shown of a value that may be anything, in one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

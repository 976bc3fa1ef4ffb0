"""What the planner must know about a machine, and the file that a user may keep it in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomtrain.errors import ConfigError, PlanError, nearest
from atomtrain.files import replacing
from atomtrain.units import parse_bytes, parse_rate

_ENDLESS = 1e30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates and budgets of one peer's host, device and the link between them.

    The optional rates are `None` where nobody measured or looked them up.
    """

    name: str
    load_bytes_per_s: float
    """Host to device, from pinned memory, the other direction idle."""
    unload_bytes_per_s: float
    """Device to host, into pinned memory, the other direction idle."""
    update_parameters_per_s: float
    """Host optimizer, a fused AdamW in float32."""
    device_memory_bytes: int
    """Budget that is never exceeded."""
    host_memory_bytes: int
    both_ways_share: float = 1.0
    """What each direction keeps of its rate while both are busy: 1 if they do not disturb each
    other, 0.5 if they share one link; above 0, at most 1."""
    compute_s_per_copied_byte: float = 0.0
    """Seconds that compute loses for each byte that crosses the link meanwhile; 0 where copies are
    not the computing processor's work."""
    compute_s_per_update: float = 0.0
    """Seconds that compute loses for each parameter that is updated meanwhile."""
    compute_s_per_offloaded_storage: float = 0.0
    """Seconds that compute spends on each storage that is sent to the host to wait for backward,
    and again on its way back: hooks and hand-overs. 0 where the device computes while the host does
    that."""
    compute_s_per_offloaded_byte: float = 0.0
    """The same for each of its bytes, beside `compute_s_per_copied_byte`."""
    device_update_parameters_per_s: float | None = None
    """The same optimizer on the device; `None`: as on the host."""
    visit_s: float = 0.0
    """Seconds that compute spends on a micro-batch of a visit beside its layers: hand-overs to the
    streams and back. 0 where the device computes while the host prepares what comes next."""
    copy_s: float = 0.0
    """Seconds that each copy over the link takes beside its bytes."""
    load_pageable_bytes_per_s: float | None = None
    """Host to device, from memory that is not pinned."""
    unload_pageable_bytes_per_s: float | None = None
    host_copy_bytes_per_s: float | None = None
    """Host memory to host memory; each byte copied counts once."""
    storage_read_bytes_per_s: float | None = None
    """NVMe or other local storage, sequential, past the page cache."""
    storage_write_bytes_per_s: float | None = None
    storage_both_ways_share: float = 1.0
    """What reads and writes keep of their rates while the disk does both; above 0, at most 1."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PlanError(f"the machine's {field.name} is {value!r}; it must be a number")
            least_is_zero = field.default == 0.0
            # Also false for NaN; the bound is for whole numbers too long to be floats.
            if not 0 <= value < _ENDLESS or (value == 0 and not least_is_zero):
                raise PlanError(
                    f"the machine's {field.name} is {value}; it must be "
                    f"{'at least 0' if least_is_zero else 'positive'} and finite"
                )
        for name in ("both_ways_share", "storage_both_ways_share"):
            if getattr(self, name) > 1:
                raise PlanError(
                    f"the machine's {name} is {getattr(self, name)}; it must be at most 1"
                )

    @property
    def storage_rates(self) -> tuple[float, float]:
        """Bytes per second that the disk reads and writes.

        Raises:
            PlanError: they are not known.
        """
        if self.storage_read_bytes_per_s is None or self.storage_write_bytes_per_s is None:
            raise PlanError(
                f"the disk of {self.name} was not measured, so no state can be put on it; give "
                "storage_read_bytes_per_s and storage_write_bytes_per_s of the machine"
            )
        return self.storage_read_bytes_per_s, self.storage_write_bytes_per_s

    @property
    def device_update_rate(self) -> float:
        """AdamW parameters a second on the device."""
        return self.device_update_parameters_per_s or self.update_parameters_per_s

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "the machine") -> Machine:
        """Return the machine that a JSON object describes.

        Args:
            data: An object with this class's fields. Sizes and rates may be written with units,
                such as "24GiB" and "25GB/s". Optional fields may be missing.
            where: What messages call the object.

        Raises:
            ConfigError: an unknown or missing key, or a value that is not a number.
            PlanError: a rate or size that is negative, zero or not finite.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where} must be a JSON object with the fields of a machine")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise ConfigError(
                    f"{where} has an unknown key {key!r}.{nearest(str(key), fields)} "
                    f"Keys: {', '.join(fields)}"
                )
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in data:
                raise ConfigError(f"{where} lacks {name!r}; add it")
        return cls(**{key: _parsed(key, value, where) for key, value in data.items()})


def load_machine(path: Path) -> Machine:
    """Read a machine from a JSON file.

    Raises:
        ConfigError: the file cannot be read or is not a machine.
        PlanError: a rate or size in it is negative, zero or not finite.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the machine file {path} ({error.strerror}); check the path"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the machine file {path} is not JSON ({error}); write one with atom plan --save "
            "or see docs/hardware.md"
        ) from error
    return Machine.from_json(data, f"the machine file {path}")


def save_machine(machine: Machine, path: Path) -> None:
    """Write a machine to a JSON file; an existing file is replaced at once or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(machine.to_json(), indent=2) + "\n"
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the machine file {path} ({error.strerror}); choose a file in a folder "
            "that you may write to"
        ) from error


def _parsed(key: str, value: Any, where: str) -> Any:
    if key == "name":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: name must be text, not {value!r}")
        return value
    if isinstance(value, str) and key.endswith("_bytes_per_s"):
        return parse_rate(value, f"{where}: {key}")
    if isinstance(value, str) and key.endswith("_bytes"):
        return parse_bytes(value, f"{where}: {key}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{where}: {key} must be a number, not {value!r}")
    if key.endswith("_memory_bytes") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value

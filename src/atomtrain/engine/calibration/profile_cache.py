"""Profiles kept between runs: one file a machine, in the user's cache folder.

A file is versioned JSON and replaced at once or not at all. What cannot be read, is of another
version or makes no sense is passed over with a warning, measured again and replaced. Processes
that start together wait for each other, so that only one of them measures.

What a run's steps took is compared with what its plan predicted: a profile that misleads is not
kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from atomtrain import locks
from atomtrain.analysis.costs.costs import ChainCosts, LayerCost, ValueSpec
from atomtrain.analysis.costs.profile import LayerTime, check_time
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.gpus import vendor_of
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import AtomError
from atomtrain.files import default_cache, replacing
from atomtrain.native.build import fingerprint
from atomtrain.native.library import core
from atomtrain.planning.plan.machine import Machine
from atomtrain.topology import allowed_cores

VERSION = 14
"""Of the file's form, and of what its figures mean."""
KEPT_S = 7 * 24 * 3600.0
"""Measurements older than this are made again: drivers, cooling and neighbours change."""
_DOUBTED, _SETTLED = "doubted", "settled"
"""Of a profile: steps were not as predicted; it was measured anew for that reason."""
_MOST_ENTRIES = 500
"""Of layers, of updates, and of models compiled; the newest are kept."""
_TURN_S = 60.0
"""Longest wait for another process's measurement; then this one measures for itself."""

_logger = logging.getLogger(__name__)


def profile_folder() -> Path:
    """Return the folder of profiles: `$XDG_CACHE_HOME/atomtrain/profiles` or like."""
    return default_cache() / "profiles"


def machine_key(device: Device) -> dict[str, Any]:
    """Return everything that measured times depend on beside the layer."""
    link = device.link_bytes_per_s if isinstance(device, EmulatedDevice) else None
    vendor = vendor_of(device.torch_device)
    return {
        "host": platform.node(),
        "processor": platform.machine(),
        "cores": len(allowed_cores()),
        "device": device.name,
        "link_bytes_per_s": link,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runtime": vendor and vendor.runtime(),
        "capability": list(vendor.capability(device.torch_device)) if vendor else [],
        "precision": torch.get_float32_matmul_precision(),
        "core": fingerprint() if core() is not None else None,
    }


def kept_profiles(folder: Path | None = None) -> list[ProfileCache]:
    """Return the profiles of this host that are kept, one for each device and way to use it.

    Args:
        folder: Of the cache; `None` is the user's.
    """
    folder = folder or profile_folder()
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                continue
            cache = ProfileCache(folder, data["key"])
        except (OSError, ValueError, TypeError, KeyError):
            continue  # of a disk, or damaged: whoever needs it measures again
        if cache.path == path and cache.key.get("host") == platform.node() and cache.known:
            found.append(cache)
    return found


def layer_key(layer: Layer, cost: LayerCost, values: Mapping[str, ValueSpec]) -> str:
    """Return a name for what a layer computes, the same in every process.

    Layers with the same modules, shapes, types, FLOPs and memory take the same time.
    """
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*layer.parameters.items(), *layer.buffers.items())
    ]
    specs = [
        (spec.shape, str(spec.dtype), spec.requires_grad, repr(spec.constant))
        for spec in (values[name] for name in layer.reads)
    ]
    costs = (cost.forward_flops, cost.backward_flops, cost.kept_bytes, cost.graph_bytes)
    module = layer.module
    said = (
        type(layer).__name__, type(module).__qualname__, repr(module), getattr(module, "code", "")
    )  # fmt: skip
    return hashlib.sha256(repr((said, tensors, specs, costs)).encode()).hexdigest()[:32]


def chain_key(chain: Chain, costs: ChainCosts) -> str:
    """Return a name for what all layers compute, and with which weights in common; the same in
    every process."""
    pairs = zip(chain.layers, costs.layers, strict=True)
    keys = [layer_key(layer, cost, costs.values) for layer, cost in pairs]
    users = [chain.users[id(parameter)] for parameter in chain.parameters]
    said = keys, [each for each in users if len(each) > 1], chain.gradient_factor
    return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


class ProfileCache:
    """The measurements of one machine. Not thread-safe."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Read the machine's file in `folder`, if there is one."""
        self.key = json.loads(json.dumps(dict(key)))
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:16]}.json"
        self._machine: dict[str, Any] = {}
        self._layers: dict[str, dict[str, float]] = {}
        self._updates: dict[str, dict[str, float]] = {}
        self._compiled: dict[str, dict[str, Any]] = {}
        self._doubt = ""
        self.reload()

    def reload(self) -> None:
        """Read again what other processes may have written."""
        self._machine, self._layers, self._updates, self._doubt = {}, {}, {}, ""
        self._compiled = {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            self._check(data)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AtomError) as error:
            _logger.warning("the profile %s cannot be used (%s); measuring again", self.path, error)
            return
        now_s = time.time()
        if _fresh(data["machine"], now_s):
            self._machine, self._doubt = data["machine"], data.get("doubt", "")
        self._layers = {k: v for k, v in data["layers"].items() if _fresh(v, now_s)}
        self._updates = {k: v for k, v in data["updates"].items() if _fresh(v, now_s)}
        self._compiled = {k: v for k, v in data["compiled"].items() if _fresh(v, now_s)}

    def machine(self, device_memory_bytes: int, host_memory_bytes: int) -> Machine | None:
        """Return the measured machine with these budgets, or `None` if it is not known."""
        if not self._machine:
            return None
        return _machine_of(self._machine, device_memory_bytes, host_memory_bytes)

    def put_machine(self, machine: Machine, crowded_share: float = 0.0) -> None:
        """Keep a machine's rates and what others had of its processor; budgets are not kept."""
        rates = {k: v for k, v in machine.to_json().items() if not k.endswith("_memory_bytes")}
        self._machine = {"measured_s": time.time(), "crowded_share": crowded_share, **rates}

    def time(self, key: str) -> LayerTime | None:
        """Return the time of a layer, or `None` if it is not known."""
        entry = self._layers.get(key)
        return None if entry is None else _time_of(entry)

    def put_time(self, key: str, layer_time: LayerTime, crowded_share: float = 0.0) -> None:
        """Keep the time of a layer, and what others had of the processor meanwhile."""
        self._layers.pop(key, None)
        measured = {"measured_s": time.time(), "crowded_share": crowded_share}
        self._layers[key] = {**measured, **layer_time._asdict()}

    @property
    def known(self) -> bool:
        """Whether the machine's rates are known."""
        return bool(self._machine)

    def crowded_share(self, keys: Iterable[str] | None = None) -> float:
        """Return what others had of the processor, at most, when this was measured.

        Args:
            keys: Of the layers that count beside the machine; those not known are left out.
                `None`: all.
        """
        wanted = self._layers if keys is None else keys
        entries = [self._machine, *(self._layers.get(key, {}) for key in wanted)]
        return max(float(entry.get("crowded_share", 0.0)) for entry in entries)

    @property
    def doubted(self) -> bool:
        """Whether steps were not as predicted from this."""
        return self._doubt == _DOUBTED

    def doubt(self) -> bool:
        """Note that steps were not as predicted, unless it was measured anew for that reason."""
        if self.known and self._doubt != _SETTLED:
            self._doubt = _DOUBTED
        return self.doubted

    def forget(self, above_share: float | None = None) -> None:
        """Forget everything, or what was measured while others had more of the processor."""
        self._compiled = {}
        if above_share is None:
            self._machine, self._layers, self._updates = {}, {}, {}
            self._doubt = _SETTLED if self.doubted else ""
            return
        if self._machine and self._machine["crowded_share"] > above_share:
            self._machine, self._doubt = {}, ""
        self._layers = {
            key: entry
            for key, entry in self._layers.items()
            if entry["crowded_share"] <= above_share
        }

    def update(self, key: str) -> float | None:
        """Return what updating a parameter takes, in those of AdamW; `None` if it is not known."""
        entry = self._updates.get(key)
        return None if entry is None else entry["share"]

    def put_update(self, key: str, share: float) -> None:
        """Keep what updating a parameter takes."""
        self._updates.pop(key, None)
        self._updates[key] = {"measured_s": time.time(), "share": share}

    def speed_ratio(self, key: str) -> float | None:
        """Return by what a model computes faster if it is compiled; `None` if it is not known."""
        entry = self._compiled.get(key)
        return None if entry is None else entry["speed_ratio"]

    def put_speed_ratio(self, key: str, ratio: float) -> None:
        """Keep by what a model computes faster if it is compiled."""
        self._put_compiled(key, speed_ratio=ratio)

    def compile_failure(self, key: str) -> str | None:
        """Return why a model could not be compiled; `None` if it could, or was not tried."""
        entry = self._compiled.get(key)
        return None if entry is None else entry["failure"]

    def put_compile_failure(self, key: str, why: str) -> None:
        """Keep why a model could not be compiled."""
        self._put_compiled(key, failure=why)

    def _put_compiled(
        self, key: str, *, speed_ratio: float | None = None, failure: str | None = None
    ) -> None:
        self._compiled.pop(key, None)
        self._compiled[key] = {
            "measured_s": time.time(), "speed_ratio": speed_ratio, "failure": failure,
        }  # fmt: skip

    def save(self) -> None:
        """Replace the file. A folder that cannot be written to costs a warning only."""
        data = {
            "version": VERSION,
            "key": self.key,
            "doubt": self._doubt,
            "machine": self._machine,
            "layers": _newest(self._layers),
            "updates": _newest(self._updates),
            "compiled": _newest(self._compiled),
        }
        text = json.dumps(data, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            _logger.warning("the profile %s cannot be kept: %s", self.path, error.strerror)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other process measures this machine; then it is this one's turn."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock").open("a")
        except OSError:
            yield  # without a folder there is nothing to share either
            return
        with lock:
            ends_s = time.monotonic() + _TURN_S
            while not _locked(lock.fileno()) and time.monotonic() < ends_s:
                time.sleep(0.05)
            yield

    def _check(self, data: Any) -> None:
        """Raise whatever reading nonsense raises."""
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}, not {VERSION}")
        if data["key"] != self.key:
            raise ValueError("it is of another machine")
        if data.get("doubt", "") not in ("", _DOUBTED, _SETTLED):
            raise ValueError(f"its doubt is {data['doubt']!r}")
        for name in ("layers", "updates", "compiled"):
            if not isinstance(data[name], dict):
                raise ValueError(f"its {name} are no object")
        if data["machine"]:
            _fresh(data["machine"], 0.0)
            _check_share(data["machine"])
            _machine_of(data["machine"], 1, 1)
        for name, entry in data["layers"].items():
            _fresh(entry, 0.0)
            _check_share(entry)
            check_time(_time_of(entry), name)
        for name, entry in data["updates"].items():
            _fresh(entry, 0.0)
            if not 0 < float(entry["share"]) < math.inf:
                raise ValueError(f"the update {name} takes {entry['share']!r}")
        for name, entry in data["compiled"].items():
            _fresh(entry, 0.0)
            if isinstance(entry["failure"], str):
                continue
            if not 0 < float(entry["speed_ratio"]) < math.inf:
                raise ValueError(f"the model {name} is {entry['speed_ratio']!r} times as fast")


def _time_of(entry: Mapping[str, Any]) -> LayerTime:
    return LayerTime(*(entry[name] for name in LayerTime._fields))


def _machine_of(entry: Mapping[str, Any], device_bytes: int, host_bytes: int) -> Machine:
    rates = {k: v for k, v in entry.items() if k not in ("measured_s", "crowded_share")}
    budgets = {"device_memory_bytes": device_bytes, "host_memory_bytes": host_bytes}
    return Machine.from_json({**rates, **budgets}, "the profile")


def _check_share(entry: Mapping[str, Any]) -> None:
    if not 0 <= float(entry["crowded_share"]) <= 1:
        raise ValueError(f"others had {entry['crowded_share']!r} of the processor")


def _newest(entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return dict(list(entries.items())[-_MOST_ENTRIES:])


def _fresh(entry: Mapping[str, Any], now_s: float) -> bool:
    # A clock that was set back must not keep an entry for ever.
    return bool(entry) and -KEPT_S < now_s - float(entry["measured_s"]) < KEPT_S


def _locked(descriptor: int) -> bool:
    try:
        locks.take(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return True  # without locks there are no turns
    return True


MOST_OFF_SHARE = 0.25
"""Of the prediction; beyond it the profile is doubted."""
_SLOW_STEPS, _LEAST_STEPS = 2, 5
"""The first steps make what later ones find, and fewer later ones say little."""
_MOST_STEPS = 1000


class StepTimes:
    """The newest steps of a run, without its slow first ones."""

    def __init__(self) -> None:
        self._seen = 0
        self._times_s: deque[float] = deque(maxlen=_MOST_STEPS)

    def note(self, step_s: float) -> None:
        """Hear what a step took."""
        self._seen += 1
        if self._seen > _SLOW_STEPS:
            self._times_s.append(step_s)

    @property
    def steady_s(self) -> float | None:
        """What a step takes usually; `None` as long as there are too few."""
        if len(self._times_s) < _LEAST_STEPS:
            return None
        return statistics.median(self._times_s)


def is_off(predicted_s: float, measured_s: float) -> bool:
    """Return whether steps are so much longer or shorter that their profile is to be doubted."""
    return abs(measured_s - predicted_s) > MOST_OFF_SHARE * predicted_s


def doubt_profile(device: Device, folder: Path | None = None) -> bool:
    """Have a machine measured anew at the next start; return whether it will be.

    It is not if that was done already for this reason: then the profile is not what is wrong.

    Args:
        device: Whose profile it is.
        folder: Of the cache; `None` is the user's.
    """
    cache = ProfileCache(folder or profile_folder(), machine_key(device))
    with cache.turn():
        cache.reload()
        if not cache.doubt():
            return False
        cache.save()
    return True

"""Is this machine fit to train, alone and with others? Each finding says what to do about it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import ipaddress
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atomtrain.errors import ConfigError
from atomtrain.files import existing
from atomtrain.topology import allowed_cores
from atomtrain.units import format_bytes

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_GIB = 1 << 30
_DISK_PROBE_BYTES = 64 << 20
_LEAST_DISK_BYTES = 10 * _GIB
_LEAST_DISK_BYTES_PER_S = 100e6
_MOST_PINNED_BYTES = 4 * _GIB
_LEAST_FILES, _MANY_FILES = 1024, 65536
_CLOCK_ERROR = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronised
_SOCKET_FOLDER_MAX = 60


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: str
    """`ok`, `warning` or `problem`."""
    detail: str
    fix: str = ""
    """What to do, if it is not ok."""


def _found(check: str, detail: str, fix: str | None, state: str = WARNING) -> Finding:
    """Return a finding that is `state` if there is something to fix, else ok."""
    return Finding(check, state, detail, fix) if fix else Finding(check, OK, detail)


def examine(directory: Path, host: str, port: int) -> list[Finding]:
    """Run all checks; takes a few seconds.

    Args:
        directory: Where runs will be written; need not exist yet.
        host: IPv4 address that peers will listen on.
        port: TCP port that they will listen on; 0 is any free one.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _device,
        _memory,
        lambda: _disk(directory),
        lambda: _network(host, port),
        _clock,
        _limits,
        _profile,
    ]
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    import torch

    names = ("atomtrain", "torch", "numpy")
    found = {name: _version(name) for name in names}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    text = f"Python {platform.python_version()}, {text}"
    missing = [name for name, version in found.items() if version is None]
    fix = f"pip install {' '.join(missing)}" if missing else ""
    if not missing and _number(str(torch.__version__)) < (2, 9):
        fix = "pip install 'torch>=2.9'"
    yield _found("versions", text, fix, PROBLEM)


def _device() -> Iterator[Finding]:
    from atomtrain.engine.devices.gpus import driver_is_there, vendor_here, why_none

    if (vendor := vendor_here()) is not None:
        for index in range(vendor.count()):
            try:
                name, free_bytes, all_bytes = vendor.memory(index)
            except ConfigError as error:
                what, _, fix = str(error).partition("; ")
                yield Finding(f"{vendor.kind}:{index}", PROBLEM, what, fix)
                continue
            text = f"{name}, {format_bytes(free_bytes)} of {format_bytes(all_bytes)} free"
            end = f"end what uses it ({vendor.listing()} lists it)"
            fix = f"{end}, or give a smaller --device-memory" if free_bytes < all_bytes / 2 else ""
            yield _found(f"{vendor.kind}:{index}", text, fix)
    elif driver_is_there():
        what, _, fix = why_none().partition("; ")
        yield Finding("device", PROBLEM, f"no GPU can be used: {what}", fix)
    else:
        yield Finding("device", OK, "no GPU: models train on the emulated device (CPU)")


def _memory() -> Iterator[Finding]:
    from atomtrain.engine.devices.host_memory import host_memory

    memory = host_memory()
    free_bytes = memory.usable_bytes
    parameters = free_bytes // 16
    text = f"{memory}; enough for about {parameters / 1e9:.1f}B parameters with AdamW in float32"
    fix = "end other programs, or choose a small model"
    yield _found("memory", text, fix if free_bytes < 2 * _GIB else None)
    yield from _pinned(free_bytes)


def _pinned(free_bytes: int) -> Iterator[Finding]:
    """Pin memory, which is given back: what the limit says is not always what can be had."""
    from atomtrain.engine.devices.gpus import vendor_here

    vendor = vendor_here()
    if vendor is None or not vendor.registers:
        return
    from atomtrain.engine.devices.pinning import pinnable_bytes

    soft, hard = _limits_of("RLIMIT_MEMLOCK")
    tried_bytes = min(free_bytes // 2, _MOST_PINNED_BYTES)
    pinned_bytes = pinnable_bytes(vendor, tried_bytes)
    if pinned_bytes >= tried_bytes:
        yield Finding("pinned memory", OK, f"{format_bytes(pinned_bytes)} can be pinned, or more")
        return
    limit = "" if soft is None else f", the limit is {format_bytes(soft)}"
    text = f"{format_bytes(pinned_bytes)} of memory can be pinned{limit}"
    raised = "ulimit -l unlimited" if hard is None else (
        "put '* - memlock unlimited' into /etc/security/limits.conf and log in anew; in a "
        "container, start it with --ulimit memlock=-1"
    )  # fmt: skip
    fix = f"a larger model is copied more slowly: {raised}; in WSL2, give it more memory"
    yield Finding("pinned memory", WARNING, text, fix)


def _disk(directory: Path) -> Iterator[Finding]:
    place = existing(directory)
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = "choose another --directory, or change its owner"
        yield Finding("disk", PROBLEM, f"{place} may not be written to", fix)
        return
    free_bytes = shutil.disk_usage(place).free
    rate = _write_rate(place) if free_bytes > 4 * _DISK_PROBE_BYTES else 0.0
    text = f"{format_bytes(free_bytes)} free in {place}"
    text += f", written at {format_bytes(rate)}/s" if rate else ""
    if free_bytes < _LEAST_DISK_BYTES:
        fix = "make room: two checkpoints of 12 bytes a parameter are kept"
        yield Finding("disk", WARNING if rate else PROBLEM, text, fix)
    elif rate < _LEAST_DISK_BYTES_PER_S:
        fix = "checkpoints will take long: choose a --directory on a faster disk"
        yield Finding("disk", WARNING, text, fix)
    else:
        yield Finding("disk", OK, text)


def _network(host: str, port: int) -> Iterator[Finding]:
    from atomtrain.swarm.packages import INSTALL, missing_packages

    if missing := missing_packages():
        text = f"this machine trains alone: {', '.join(missing)} missing"
        yield Finding("swarm", WARNING, text, f"to train with others, run {INSTALL} (on Linux)")
        return
    from atomtrain.swarm.membership.lan import PORT

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            text = f"TCP port {port or 'of any number'} can be listened on at {host}"
        yield Finding("port", OK, text)
    except OSError as error:
        fix = "choose another --port, or end what listens there (ss -ltnp)"
        if error.errno is not None and error.strerror and "assign" in error.strerror:
            fix = "choose a --host that is an address of this machine, or 0.0.0.0"
        yield Finding("port", PROBLEM, f"{host}:{port}: {error.strerror}", fix)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):  # not on Windows
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", PORT))
        yield Finding("lan", OK, f"runs can be found on the local network (UDP port {PORT})")
    except OSError as error:
        fix = f"end what uses UDP port {PORT} (ss -lunp), or join by address"
        yield Finding("lan", WARNING, f"UDP port {PORT}: {error.strerror}", fix)
    yield _reachability()


def _reachability() -> Finding:
    """Say which address others would see; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # chooses a route; no packet leaves
            address = str(probe.getsockname()[0])
    except OSError:
        fix = "connect this machine to a network to train with others"
        return Finding("address", WARNING, "there is no way to other machines", fix)
    if ipaddress.ip_address(address).is_global:
        return Finding("address", OK, f"{address} is a public address")
    text = f"{address} is an address of a local network: peers elsewhere cannot dial it"
    fix = (
        "on one network nothing need be done; else forward the port in the router and give "
        "--announce PUBLIC-ADDRESS, or join with --join, which needs no open port here"
    )
    return Finding("address", WARNING, text, fix)


def _clock() -> Iterator[Finding]:
    state = _clock_state()
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if state == _CLOCK_ERROR:
        fix = "timedatectl set-ntp true; peers allow for wrong clocks, logs do not"
        yield Finding("clock", WARNING, f"{now}; nothing keeps this clock right", fix)
    elif state is None:
        yield Finding("clock", OK, f"{now}; whether it is kept right is not known")
    else:
        yield Finding("clock", OK, f"{now}, kept right by the network")


def _limits() -> Iterator[Finding]:
    soft, hard = _limits_of("RLIMIT_NOFILE")
    text = f"{'any number of' if soft is None else soft} files and sockets may be open"
    fix = f"ulimit -n {min(hard or _MANY_FILES, _MANY_FILES)}"
    yield _found("open files", text, fix if soft is not None and soft < _LEAST_FILES else None)
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _SOCKET_FOLDER_MAX:
        text = f"{folder} has too long a name for sockets; /tmp is used"
        yield Finding("temporary folder", OK, text)
    if not hasattr(os, "getloadavg"):
        return
    cores = len(allowed_cores())
    busy = os.getloadavg()[0]
    text = f"{cores} cores, {busy:.1f} programs want one on average"
    fix = "other programs will slow training down"
    yield _found("processor", text, fix if busy > cores else None)


def _limits_of(name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of a resource; `None` where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(getattr(resource, name))
    )
    return soft, hard


def _profile() -> Iterator[Finding]:
    from atomtrain.engine.calibration.profile_cache import kept_profiles
    from atomtrain.engine.calibration.profiling import CROWDED_SHARE

    kept = kept_profiles()
    if not kept:
        text = "nothing is measured yet: the first start takes some seconds longer"
        yield Finding("profile", OK, text)
        return
    share, device = max((cache.crowded_share(), str(cache.key["device"])) for cache in kept)
    if share > CROWDED_SHARE:
        text = f"{device} was measured while other programs had {share:.0%} of the processor"
        fix = (
            "predicted times are too long: end the other programs and start again, which measures "
            "anew; or do it with --profile-again"
        )
        yield Finding("profile", WARNING, text, fix)
    else:
        devices = sorted({str(cache.key["device"]) for cache in kept})
        yield Finding("profile", OK, f"measured: {', '.join(devices)}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(version: str) -> tuple[int, int]:
    parts = version.split("+", maxsplit=1)[0].split(".")
    digits = ["".join(filter(str.isdigit, part)) or "0" for part in [*parts, "0"][:2]]
    return int(digits[0]), int(digits[1])


def _write_rate(place: Path) -> float:
    """Return the bytes per second of a file that is written and synced; 0 if that fails."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".atom-doctor-") as file:
            started_s = time.monotonic()
            for _ in range(_DISK_PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_PROBE_BYTES / (time.monotonic() - started_s)
    except OSError:
        return 0.0


def _clock_state() -> int | None:
    """Return what adjtimex(2) says without changing anything; None where there is none."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        # 208 bytes: struct timex on 64-bit Linux; all zero asks only.
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
        return state if state >= 0 else None
    return None

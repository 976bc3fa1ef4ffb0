"""Names of devices, taken apart without torch, so that a wrong one is refused at once."""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.errors import ConfigError, nearest
from atomtrain.units import parse_rate

DEFAULT_LINK_BYTES_PER_S = 4.0 * 2**30
"""About PCIe 3.0 with 4 lanes: a slow but real link."""
GPU_KINDS = ("cuda", "xpu")
"""Those that are a GPU, as torch calls them: NVIDIA's and AMD's, Intel's."""
_KINDS = ("auto", "cpu", *GPU_KINDS, "emulated")
_MEANT = {**dict.fromkeys(("gpu", "hip", "nvidia", "rocm"), "cuda"), "mps": "cpu"}
"""What is probably meant by names that others use."""


class DeviceName(NamedTuple):
    """What a name says."""

    kind: str
    """`auto`, `cpu`, `cuda`, `xpu` or `emulated`."""
    number: int = 0
    """Which GPU."""
    link_bytes_per_s: float = DEFAULT_LINK_BYTES_PER_S
    """Of an emulated device."""


def parse_device(name: str) -> DeviceName:
    """Return what `auto`, `cpu`, `cuda`, `cuda:1`, `xpu`, `emulated` or `emulated:4GiB/s` says.

    Raises:
        ConfigError: no such device.
    """
    kind, _, argument = name.partition(":")
    if name in ("auto", "cpu"):
        return DeviceName(kind)
    if kind in GPU_KINDS:
        if argument and not (argument.isascii() and argument.isdigit()):
            raise ConfigError(f"device {name!r} is not a GPU; write {kind} or {kind}:NUMBER")
        return DeviceName(kind, int(argument or 0))
    if kind == "emulated":
        link = parse_rate(argument, "link") if argument else DEFAULT_LINK_BYTES_PER_S
        return DeviceName(kind, link_bytes_per_s=link)
    meant = f"cuda:{name}" if name.isdecimal() else _MEANT.get(kind.lower())
    hint = nearest(kind, _KINDS) if meant is None else f" Did you mean {meant!r}?"
    raise ConfigError(
        f"there is no device {name!r}.{hint} "
        "Devices: auto, cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER, emulated, emulated:LINK such as "
        "emulated:4GiB/s"
    )


def parse_devices(names: str) -> list[DeviceName]:
    """Return what a list of devices says, separated by commas, such as `cuda:0,cuda:1`.

    Raises:
        ConfigError: no such device, or devices that cannot share a model.
    """
    found = [parse_device(name.strip()) for name in names.split(",")]
    if len(found) == 1:
        return found
    for one in found:
        if one.kind not in (*GPU_KINDS, "emulated") or one.kind != found[0].kind:
            raise ConfigError(
                f"devices {names!r} cannot share a model; give several GPUs, such as "
                "cuda:0,cuda:1, or several emulated devices"
            )
    if one.kind in GPU_KINDS and len({one.number for one in found}) < len(found):
        raise ConfigError(f"devices {names!r} name a GPU twice; give each one once")
    return found

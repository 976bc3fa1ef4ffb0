"""Benchmark `install`: what `pip install atomtrain` brings along, and what importing it takes.

Read from what is installed here, as pip wrote it down: the packages that the product requires,
without extras and with `swarm`. What it requires only for torch is left out, as torch itself is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

import atomtrain
from atombench.common import BenchmarkOptions, Result, description
from atombench.mistakes import import_s
from atomtrain.errors import ConfigError

ROOT = "atomtrain"
LEFT_OUT = "torch"


def run(options: BenchmarkOptions) -> Result:
    """Count; return the result.

    Raises:
        ConfigError: a package of the extra `swarm` is not installed.
    """
    plain, swarm = needed(), needed("swarm")
    sizes = {name: size_bytes(found) for name, found in swarm.items()}
    return {
        **description(),
        "plain_packages": len(plain),
        "plain_bytes": sum(sizes[name] for name in plain),
        "swarm_packages": len(swarm),
        "swarm_bytes": sum(sizes.values()),
        "import_s": import_s(),
        "plain_names": sorted(plain),
        "swarm_only_names": sorted(set(swarm) - set(plain)),
        "size_bytes": dict(sorted(sizes.items(), key=lambda each: -each[1])),
    }


def needed(extra: str = "") -> dict[str, Distribution]:
    """Return the packages that the product requires with an extra, itself included, by name."""
    found: dict[str, Distribution] = {}
    waiting = [(ROOT, frozenset({extra, ""}))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        found[name] = _installed(name)
        for wanted in _required(found[name], extras):
            if wanted[0] != LEFT_OUT and wanted not in seen:
                seen.add(wanted)
                waiting.append(wanted)
    return found


def _required(found: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for line in found.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in extras):
            name = re.sub(r"[-_.]+", "-", wanted.name).lower()
            yield name, frozenset({*wanted.extras, ""})


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the package {name} is not installed, so it cannot be counted; "
            "pip install 'atomtrain[swarm]'"
        ) from error


def size_bytes(found: Distribution) -> int:
    """Return the bytes of a package's files, without what Python compiled of them."""
    # Where the product is installed to be edited, pip knows none of its files.
    own = found.name == ROOT and not any(path.name == "lazy.py" for path in found.files or ())
    files = Path(atomtrain.__file__).parent.rglob("*") if own else _files(found)
    return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc")


def _files(found: Distribution) -> Iterator[Path]:
    for path in found.files or ():
        yield Path(str(path.locate()))

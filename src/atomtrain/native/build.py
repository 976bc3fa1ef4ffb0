"""Compiles the kernels into one library for each level of vector instructions.

The package's build runs this, and `python -m atomtrain.native.build` does after a change of the
sources. It needs nothing but a C compiler: not even the rest of the package, which may not be
installed yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"
LEVELS = {
    "DEFAULT": [],
    "AVX2": ["-march=x86-64-v3"],
    "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
"""Flags by the name that PyTorch gives to what a processor can do; others than x86 have the first
only."""
_NEEDED = {
    "AVX512": {"avx512vl", "avx512bw", "avx512dq", "fma"},
    "AVX2": {"avx2", "fma"},
    "DEFAULT": set[str](),
}
"""What a processor has to which PyTorch gives such a name, as Linux calls it; the best first."""
# Contraction and reordering would give other bits on other processors; neither rounding modes nor
# floating-point traps nor `errno` are used, and without them loops become vector instructions.
FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


class BuildError(Exception):
    """There is no compiler, or it refused the sources."""


def levels() -> list[str]:
    """Return the levels that are built for this kind of processor."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return list(LEVELS) if x86 else ["DEFAULT"]


def own_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the level that PyTorch names here; all of them where the kernel does not tell."""
    try:
        told = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        told = None
    if told is None or len(levels()) == 1:
        return levels()
    has = set(told[1].split())
    return [next(level for level, needed in _NEEDED.items() if needed <= has)]


def library_path(level: str, folder: Path = HERE) -> Path:
    return folder / f"core_{level.lower()}.so"


def fingerprint() -> str:
    """Return the hash of the sources: a library tells that of those it was made from."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """Return the command of the C compiler: what `CC` says, else `cc`, `gcc` or `clang`.

    Raises:
        BuildError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError("no C compiler was found (cc, gcc or clang; the variable CC names another)")


def build(
    folder: Path = HERE, extra: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[Path]:
    """Compile the kernels; return the libraries.

    Args:
        folder: Where they are put, each by renaming, so that nobody ever loads half of one.
        extra: More flags of the compiler, such as those of a sanitizer.
        only: Of these levels; `None` is all.

    Raises:
        BuildError: there is no compiler, or it failed; what it said is in the message.
    """
    command = compiler()
    chosen = levels() if only is None else only
    with ThreadPoolExecutor() as threads:  # a compiler takes one core
        return list(threads.map(lambda level: _compiled(command, level, folder, extra), chosen))


def _compiled(command: Sequence[str], level: str, folder: Path, extra: Sequence[str]) -> Path:
    """Compile one library; return it."""
    target = library_path(level, folder)
    part = target.with_name(f"{target.name}.{os.getpid()}")
    sources = [str(path) for path in sorted(KERNELS.glob("*.c"))]
    flags = [*FLAGS, *LEVELS[level], f'-DATOM_SOURCES="{fingerprint()}"', *extra]
    done = subprocess.run(
        [*command, *flags, *sources, "-o", str(part), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    part.replace(target)
    return target


def main() -> int:
    try:
        for path in build():
            print(path)  # noqa: T201
    except BuildError as error:
        print(f"atomtrain.native.build: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

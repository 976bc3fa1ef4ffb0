"""Updates stay within their memory, whatever the sizes and formats: checked by sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomtrain.native import build

_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
# Memory of malloc, with nothing behind it: torch is not loaded, which the sanitizer's loader
# would slow down by minutes.
_DRIVER = """
import ctypes, importlib.util, itertools, sys
core = ctypes.CDLL(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
f, i, l, p = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
class Parameter(ctypes.Structure):
    _fields_ = [("count", l)] + [(n, i) for n in "vgmc"] + [("by", f), ("factor", f)] + [
        (n, p) for n in ("values", "master", "gradient", "first", "second", "scale1", "scale2")]
class Slices(ctypes.Structure):
    _fields_ = [("elements", l), ("random", p)]
beyond = 2 if len(sys.argv) > 2 else 0
for count, values, gradient, moments, clipped in itertools.product(
        (1, 7, 127, 128, 300, 1031), range(4), range(3), range(3), (0, 1)):
    if values == 0 and gradient:
        continue
    made = []
    def new(n_bytes, byte=0x11):
        made.append(libc.malloc(n_bytes))
        ctypes.memset(made[-1], byte, n_bytes)
        return made[-1]
    width, each = (4, 2, 2, 2)[values], (4, 2, 1)[moments]
    memory = Parameter(
        count + beyond, values, gradient, moments, clipped, 0.5, 0.5 if values else 1,
        new(width * count), new((2 if values == 2 else 4) * count),
        new((4, 2, 2)[gradient] * count),
        new(each * count), new(each * count), new(4 * -(-count // 128)), new(4 * -(-count // 128)))
    numbers = (f * 7)(0.99, 0.1, 0.999, 0.001, 0.1, 1e-8, 1e-3)
    slices = -(-count // 256)
    random = (p * (2 * slices))(*(
        new(2 * min(256, count - 256 * (n // 2))) for n in range(2 * slices)))
    table = Slices(256, ctypes.addressof(random))
    core.atom_adamw(ctypes.byref(memory), numbers, ctypes.byref(table), l(0), l(count + beyond))
    sgd = (f * 6)(0.1, 0.1, 0.9, 1.0, 0, 0)
    if moments == 0:
        core.atom_sgd(ctypes.byref(memory), sgd, l(0), l(count + beyond))
    for one in made:
        libc.free(one)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    try:
        build.build(folder, _FLAGS, only=["AVX2" if "AVX2" in build.levels() else "DEFAULT"])
    except build.BuildError as error:
        pytest.skip(f"the compiler has no sanitizers: {error}"[:200])
    return next(folder.glob("*.so"))


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    asan = subprocess.run(
        [*build.compiler(), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    preload = {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-c", _DRIVER, str(library), *arguments],
        env={**os.environ, **preload},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_update_leaves_its_memory(sanitized: Path) -> None:
    done = run(sanitized)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_check_notices_an_update_that_does(sanitized: Path) -> None:
    done = run(sanitized, "two elements too many")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr

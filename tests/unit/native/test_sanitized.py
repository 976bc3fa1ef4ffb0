"""Kernels stay within their memory, whatever sizes, formats and bits: checked by sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomtrain.native import build, library

_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
# Memory of malloc, with nothing behind it: torch is not loaded, which the sanitizer's loader
# would slow down by minutes.
_DRIVER = """
import ctypes, itertools, random, sys
core = ctypes.CDLL(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
f, i, l, p = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
class Parameter(ctypes.Structure):
    _fields_ = [("count", l)] + [(n, i) for n in "vgmc"] + [("by", f), ("factor", f)] + [
        (n, p) for n in ("values", "master", "gradient", "first", "second", "scale1", "scale2")]
class Slices(ctypes.Structure):
    _fields_ = [("elements", l), ("random", p)]
libc.malloc.restype = ctypes.c_void_p
draw = random.Random(0)
beyond = 2 if len(sys.argv) > 2 else 0
made = []
def new(n_bytes, kind="same"):
    made.append(libc.malloc(max(1, n_bytes)))
    if kind == "any":
        ctypes.memmove(made[-1], draw.randbytes(n_bytes), n_bytes)
    else:
        ctypes.memset(made[-1], {"same": 0x11, "zero": 0, "nan": 0xFF}[kind], n_bytes)
    return p(made[-1])
def free():
    while made:
        libc.free(made.pop())
KINDS = itertools.cycle(("same", "zero", "nan", "any"))
for count, values, gradient, moments, clipped in itertools.product(
        (1, 7, 127, 128, 300, 1031), range(4), range(3), range(3), (0, 1)):
    if values == 0 and gradient:
        continue
    width, each, kind = (4, 2, 2, 2)[values], (4, 2, 1)[moments], next(KINDS)
    memory = Parameter(
        count + beyond, values, gradient, moments, clipped, 0.5, 0.5 if values else 1,
        new(width * count, kind), new((2 if values == 2 else 4) * count),
        new((4, 2, 2)[gradient] * count, kind),
        new(each * count), new(each * count), new(4 * -(-count // 128)), new(4 * -(-count // 128)))
    numbers = (f * 7)(0.99, 0.1, 0.999, 0.001, 0.1, 1e-8, 1e-3)
    slices = -(-count // 256)
    starts = (p * (2 * slices))(*(
        new(2 * min(256, count - 256 * (n // 2)), "any") for n in range(2 * slices)))
    table = Slices(256, ctypes.addressof(starts))
    core.atom_adamw(ctypes.byref(memory), numbers, ctypes.byref(table), l(0), l(count + beyond))
    sgd = (f * 6)(0.1, 0.1, 0.9, 1.0, 0, 0)
    if moments == 0:
        core.atom_sgd(ctypes.byref(memory), sgd, l(0), l(count + beyond))
    free()
for count, kind, wide, fill in itertools.product(
        range(1, 300, 7), range(3), (0, 1), ("nan", "any")):
    core.atom_norm(new((4, 2, 2)[kind] * count, fill), l(count), i(kind), i(wide), new(4))
    free()
sizes, counts = itertools.product((1, 5), (2, 30, 64)), (0, 16, 256)
for (blocks, block), levels, signs, kind in itertools.product(sizes, counts, (0, 1), range(3)):
    core.atom_dequantise(
        new(blocks * block * (4 if levels == 16 else 8) // 8, "any"), new(4 * blocks, "any"),
        l(blocks), l(block), new(4 * levels, "any") if levels else None, i(levels), i(signs),
        i(kind), new(blocks * block * (4, 2, 2)[kind]))
    free()
for count, told, fill in itertools.product((1, 31, 255, 256, 257, 4095, 4097, 12288), (0, 1), "sz"):
    fill = {"s": "same", "z": "zero"}[fill]  # what codecs take is finite
    values, sent, lost = new(4 * count, fill), *(new(4 * count) if told else None for _ in "ab")
    half = new(4 + 2 * count)
    core.atom_half_encode(values, l(count), half, sent)
    core.atom_half_decode(half, l(count), new(4 * count))
    for bits, keys in itertools.product((4, 8), (None, new(8))):
        data = new(4 * -(-count // 256) + (count * bits + 7) // 8)
        core.atom_blocks_encode(values, l(count), l(bits), keys, data, sent, lost)
        core.atom_blocks_decode(data, l(count), l(bits), new(4 * count))
    rows, width, most = max(1, count // 4096), min(count, 4096), -(-min(count, 4096) // 32)
    sizes = [rows * size for size in (8, 3 * -(-most // 2), -(-most // 4))]
    parts = [new(size) for size in sizes]
    core.atom_largest_encode(values, l(rows), l(width), *parts, sent, lost)
    for some in (parts, [new(size, "any") for size in sizes]):
        core.atom_largest_decode(*some, l(rows), l(width), new(4 * rows * width))
    there, room = new(4 * -(-count // 32)), new(4 * count)
    core.atom_sparse_gather(values, l(count), there, room, l(count))
    core.atom_sparse_scatter(there, l(count), room, l(count), new(4 * count))
    bits = new(4 * -(-count // 32), "any")  # that name more than there are
    core.atom_sparse_scatter(bits, l(count), new(4), l(1), new(4 * count))
    free()
"""


# Each level that this processor runs, for each has loops of its own.
_LEVELS = build.levels()[: build.levels().index(library.level()) + 1]


@pytest.fixture(scope="module", params=_LEVELS)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    try:
        build.build(folder, _FLAGS, only=[request.param])
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


@pytest.mark.slow
def test_no_kernel_leaves_its_memory(sanitized: Path) -> None:
    done = run(sanitized)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_check_notices_an_update_that_does(sanitized: Path) -> None:
    done = run(sanitized, "two elements too many")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


# Threads take ranges as `library.run` cuts them; an argument has ranges overlap.
_RACE = """
#include <pthread.h>
#include <stdlib.h>
#include "updates.h"
enum { COUNT = 5000, THREADS = 4, EACH = 10 * BLOCK, SLICE = 1024 };
static struct parameter p;
static struct adamw adamw = {0.99f, 0.1f, 0.999f, 0.001f, 0.1f, 1e-8f, 1e-3f};
static struct sgd sgd = {0.1f, 0.1f, 0.9f, 1.0f, 0, 0};
static struct slices slices;
static int overlap;
static void *work(void *index) {
    int64_t begin = (int64_t)index * EACH, end = begin + EACH + overlap;
    if (end > COUNT) end = COUNT;
    atom_adamw(&p, &adamw, &slices, begin, end);
    if (p.moments_kind == FLOAT32_MOMENTS) atom_sgd(&p, &sgd, begin, end);
    return 0;
}
static void *zeros(void) { return calloc(COUNT, 4); }
int main(int count, char **arguments) {
    static uint16_t drawn[2 * SLICE];
    static struct random random[COUNT / SLICE + 1];
    (void)arguments;
    overlap = count > 1 ? BLOCK : 0;
    for (int i = 0; i <= COUNT / SLICE; i++) random[i] = (struct random){drawn, drawn + SLICE};
    slices = (struct slices){SLICE, random};
    for (int kind = 0; kind < 36; kind++) {
        int values = kind / 9, gradient = kind / 3 % 3, moments = kind % 3;
        if (values == FLOAT32_VALUES && gradient != FLOAT32_GRADIENT) continue;
        p = (struct parameter){COUNT, values, gradient, moments, 1, 0.5f, values ? 0.5f : 1.0f,
                               zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()};
        pthread_t threads[THREADS];
        for (int64_t i = 0; i < THREADS; i++) pthread_create(threads + i, 0, work, (void *)i);
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
    }
}
"""


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of C alone: the sanitizer does not know the threads of a Python that it did not compile."""
    folder = tmp_path_factory.mktemp("raced")
    source, program = folder / "race.c", folder / "race"
    source.write_text(_RACE)
    level = build.LEVELS["AVX2" if "AVX2" in build.levels() else "DEFAULT"]
    flags = [flag for flag in build.FLAGS if flag != "-shared"]
    done = subprocess.run(
        [*build.compiler(), *flags, *level, "-O1", "-g", "-fsanitize=thread", "-pthread",
         '-DATOM_SOURCES=""', f"-I{build.KERNELS}", str(source),
         *(str(path) for path in sorted(build.KERNELS.glob("*.c"))), "-o", str(program), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the compiler has no sanitizer of threads: {done.stderr}"[:200])
    return program


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ranges_of_other_threads_are_left_alone_and_one_too_long_is_noticed(
    raced: Path, overlap: bool
) -> None:
    arguments = ["overlap"] if overlap else []
    done = subprocess.run([raced, *arguments], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not know this kernel's layout of memory")
    assert ("data race" in done.stderr) is overlap, done.stderr[-3000:]
    assert (done.returncode != 0) is overlap, done.stderr[-3000:]

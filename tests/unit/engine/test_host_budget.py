"""How much host memory a model may take: what is available and what control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from atomtrain.engine.devices.host_memory import HostMemory, host_memory

GIB = 1 << 30


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 64 GiB, 48 GiB of it available."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")
    return tmp_path


def test_what_is_available_counts_not_what_is_there(root: Path) -> None:
    memory = host_memory(root)
    assert memory == HostMemory(64 * GIB, 48 * GIB, None)
    assert memory.usable_bytes == pytest.approx(0.95 * 48 * GIB)
    assert str(memory) == "48.0 GiB of 64.0 GiB free"


def test_the_least_of_nested_groups_holds(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/user/job\n")
    write(root, "sys/fs/cgroup/user/job/memory.max", "max\n")
    assert host_memory(root).group_bytes is None
    write(root, "sys/fs/cgroup/user/memory.max", f"{16 * GIB}\n")
    write(root, "sys/fs/cgroup/user/memory.current", f"{12 * GIB}\n")
    write(root, "sys/fs/cgroup/user/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    assert host_memory(root).group_bytes == 6 * GIB
    write(root, "sys/fs/cgroup/user/job/memory.high", f"{5 * GIB}\n")
    assert host_memory(root).group_bytes == 5 * GIB
    assert host_memory(root).usable_bytes == pytest.approx(4.5 * GIB)
    assert str(host_memory(root)).endswith("free, of which this container may take 5.0 GiB")


@pytest.mark.parametrize("there", ["docker/a1", ""])
def test_version_1_and_a_container_that_sees_only_its_own_folder(root: Path, there: str) -> None:
    write(root, "proc/self/cgroup", "3:cpu,cpuacct:/docker/a1\n2:memory:/docker/a1\n")
    folder = f"sys/fs/cgroup/memory/{there}".rstrip("/")
    write(root, f"{folder}/memory.limit_in_bytes", f"{8 * GIB}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{3 * GIB}\n")
    write(root, f"{folder}/memory.stat", f"inactive_file 0\ntotal_inactive_file {GIB}\n")
    assert host_memory(root).group_bytes == 6 * GIB
    write(root, f"{folder}/memory.limit_in_bytes", "9223372036854771712\n")
    assert host_memory(root).group_bytes is None


def test_little_memory_leaves_some_and_none_is_not_negative(root: Path) -> None:
    assert HostMemory(GIB, GIB, None).usable_bytes == 0.75 * GIB
    assert HostMemory(GIB, GIB, 0).usable_bytes == 1
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{2 * GIB}\n")
    assert host_memory(root).group_bytes == 0

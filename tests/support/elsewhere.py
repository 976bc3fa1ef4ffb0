"""Runs `atom` as if this were a system that is not Linux: `python elsewhere.py ARGUMENT...`.

For the package's own code, what only Linux and its like have is missing: modules, names in modules,
the files below `/proc` and `/sys`, the C library by the name `None`. Python's library and PyTorch
still find all of it, since on such a system they would do without. With `--imports` alone, all
modules of the package are imported and their names are written.
"""

from __future__ import annotations

import builtins
import importlib
import mmap
import os
import pkgutil
import signal
import socket
import sys
import time
from types import ModuleType
from typing import Any

MODULES = frozenset(("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"))
NAMES = {
    os: (
        *("fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid"),
        *("killpg", "setpriority", "setsid", "sysconf", "statvfs", "uname", "waitid", "wait4"),
        *("sched_getaffinity", "sched_setaffinity", "register_at_fork", "memfd_create", "mkfifo"),
        *("O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_TMPFILE"),
        *("POSIX_FADV_DONTNEED", "posix_fadvise", "posix_fallocate", "copy_file_range"),
        *("WEXITED", "WNOHANG", "WNOWAIT", "P_PID"),
        *("chown", "fchmod", "fchown", "pread", "preadv", "pwrite", "pwritev", "sendfile"),
    ),
    signal: ("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2"),
    socket: ("AF_UNIX", "SO_REUSEPORT", "TCP_CONGESTION", "TCP_INFO", "socketpair"),
    mmap: ("MADV_DONTNEED", "MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED"),
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "clock_gettime", "tzset"),
}
_PACKAGE = "atomtrain"
_KERNELS = "atomtrain.native.core_"
"""Libraries, which are not modules though they end as those do."""


class _Partial(ModuleType):
    """A module that lacks names, for the package."""

    def __getattribute__(self, name: str) -> Any:
        if name in _LACKING[super().__getattribute__("__name__")] and _asks(2):
            raise AttributeError(f"this system has no {name}")
        return super().__getattribute__(name)


_LACKING = {module.__name__: frozenset(names) for module, names in NAMES.items()}
_real_import = builtins.__import__


def _asks(depth: int) -> bool:
    """Return whether the package's code is at work, so many frames below this one."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.partition(".")[0] == _PACKAGE


def _import(name: str, *rest: Any, **named: Any) -> Any:
    if name in MODULES and _asks(2):
        raise ModuleNotFoundError(f"this system has no module {name}", name=name)
    return _real_import(name, *rest, **named)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "this system has no such file", arguments[0])
    if event == "ctypes.dlopen" and not arguments[0] and _asks(3):
        raise TypeError("this system's C library has a name")


def leave() -> None:
    """Have the package see another system from now on."""
    for module in NAMES:
        module.__class__ = _Partial
    builtins.__import__ = _import
    sys.addaudithook(_refuse)


def import_all() -> list[str]:
    """Import each module of the package; return their names."""
    package = importlib.import_module(_PACKAGE)
    found = (each.name for each in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."))
    names = [name for name in found if not name.startswith(_KERNELS)]
    for name in names:
        importlib.import_module(name)
    return names


if __name__ == "__main__":
    import torch  # noqa: F401 - as it is; it has builds for other systems

    leave()
    if sys.argv[1:] == ["--imports"]:
        print("\n".join(import_all()))
    else:
        from atomtrain.cli.main import main

        sys.exit(main(sys.argv[1:]))

"""Programs of Python that start as forks of a process in which the heavy packages lie ready.

A peer that a benchmark or a test starts would import torch, hivemind and more, for seconds of a
processor, again and again. Here one process, which is started with the first such program, imports
them and does nothing else; each program is a fork of it, in a process of its own, with its own
arguments, folder, environment and files. It does what `python -m MODULE`, `python FILE` or
`python -c CODE` would do, but for that start and the tidying at the end, and it ends with the
process that asked for it if nothing else ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

_READY = (
    "torch", "torch.export", "torch._dynamo", "numpy", "safetensors.torch",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
    "atomtrain.cli.train", "atomtrain.training.loop", "atomtrain.training.setup.setup",
    "atomtrain.swarm", "atomtrain.views.runs.display", "atomtrain.views.runs.picture",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MESSAGE_BYTES = 1 << 20
_ADOPTED_S = 60.0
"""A fork whose owner has not got it by then ends: the owner is gone."""


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of a command that begins with `sys.executable`."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        base = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        call = inspect.signature(base).bind(self, *given, **named).arguments
        program, *arguments = call["args"]
        assert program == sys.executable, "what is forked is Python"
        ends = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        order = {
            "arguments": arguments, "folder": str(call["cwd"] or os.getcwd()),
            "environment": dict(os.environ if call["env"] is None else call["env"]),
            "group": call["process_group"],
        }  # fmt: skip
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        self.pid = _nursery().fork(order, files)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]


def run(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(command, **{**pipes, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Nursery:
    """The process that has everything imported, as seen from who asks for forks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                # -P: what lies in this folder, or where one is, is not what others import.
                [sys.executable, "-P", "-m", __name__, str(other.fileno()), str(self.owner)],
                pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        self._connection.settimeout(600.0)
        self._one_at_a_time = threading.Lock()

    def fork(self, order: dict[str, Any], files: list[int]) -> int:
        """Start a program with `files` as its standard ones; return its process id."""
        with self._one_at_a_time, _adopting():
            socket.send_fds(self._connection, [json.dumps(order).encode()], files)
            answer = self._connection.recv(_MESSAGE_BYTES)
        assert answer, "the process that forks has ended"
        return int(answer)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what loses its own: forks are forks of forks whose parents end at once.

    Not for longer: what programs leave behind when they end would come to us, too, and stay as
    zombies, since nobody here knows of it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_NURSERIES: list[_Nursery] = []


def _nursery() -> _Nursery:
    if not _NURSERIES or _NURSERIES[0].owner != os.getpid():
        _NURSERIES[:] = [_Nursery()]
    return _NURSERIES[0]


def _serve(connection: socket.socket, owner: int) -> list[str] | None:
    """Fork on demand; return in each fork, with its arguments, and in the end, without."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            return None
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                for end in (reading, writing, connection.detach()):
                    os.close(end)
                return _become(json.loads(message), files, owner)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(writing)
        answer = os.read(reading, 32)
        os.waitpid(between, 0)
        for end in (reading, *files):
            os.close(end)
        connection.send(answer)


def _become(order: dict[str, Any], files: list[int], owner: int) -> list[str]:
    until_s = time.monotonic() + _ADOPTED_S
    while os.getppid() != owner and time.monotonic() < until_s:
        time.sleep(0.0005)  # until the process between has ended
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
    if order["group"] is not None and order["group"] >= 0:
        os.setpgid(0, order["group"])
    for own, file in enumerate(files):
        os.dup2(file, own)
    for file in files:
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # `TMPDIR` may have changed since an import looked it up
    arguments: list[str] = order["arguments"]
    return arguments


def _ran(arguments: list[str]) -> int:
    """Run a program as Python does; return its exit code."""
    try:
        _run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (this is the program's end)
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Leave as Python does, but for the tidying of all modules, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _run(arguments: list[str]) -> None:
    """Run what `python ARGUMENTS` would."""
    how, *rest = arguments
    if how == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(how)))
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    for _name in _READY:
        if importlib.util.find_spec(_name.partition(".")[0]) is not None:
            importlib.import_module(_name)
    if importlib.util.find_spec("hivemind") is not None:
        from atomtrain.swarm.transport.libp2p import import_hivemind

        import_hivemind()
    gc.freeze()
    _given = _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if _given is not None:
        _end(_ran(_given))

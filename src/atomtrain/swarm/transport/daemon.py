"""The libp2p daemon that hivemind brings, as a child that cannot outlive this process.

hivemind can start the daemon itself, but then it survives a `kill -9` of its parent. Here a stub
asks the kernel to kill it with its parent before it becomes the daemon. The kernel watches the
thread that started it: start it on the thread that will run the event loop. What the daemon leaves
behind, its sockets, the next process removes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from atomtrain import locks
from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.identity import Identity

_log = logging.getLogger("atomtrain.swarm")
_STUB = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_START_S = 15.0
_STOP_S = 60.0
_PREFIX = "atom-swarm-"
_LOCK = "lock"
_PATH_BYTES_MAX = 60
"""Paths of sockets may have 107 bytes; names in the folder take the rest."""
_UNLOCKED_S = 60.0
"""A folder without a lock is being made; after this long it was not finished."""


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """What the daemon is started with."""

    listen_host: str
    """IPv4 address to listen on."""
    listen_port: int
    """TCP port; 0: any free one."""
    announce: str | None
    """Multiaddress, without peer id, that others shall dial; None: those listened on."""
    identity: Identity
    """The peer's key."""


class Daemon:
    """A running libp2p daemon."""

    def __init__(self, config: DaemonConfig) -> None:
        """Start the daemon and wait until it is ready.

        Raises:
            SwarmError: the port is in use, or the daemon did not start.
        """
        _check_port_is_free(config.listen_host, config.listen_port)
        self._folder = RuntimeFolder()
        self.folder = self._folder.path
        """For the sockets of those who talk to the daemon; readable by this user only."""
        self.control = str(self.folder / "control.sock")
        key = self.folder / "key"
        config.identity.save(key)
        binary = str(files("hivemind.hivemind_cli") / "p2pd")
        stub = [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid())]
        self._process = subprocess.Popen(
            [*stub, binary, *_flags(config, self.control, key)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": "fatal"},
        )
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
        except SwarmError:
            self.stop()
            raise
        key.unlink()

    def stop(self) -> None:
        """End the daemon; idempotent."""
        self._process.kill()
        self._process.wait(_STOP_S)
        self._folder.close()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        output = b""
        until_s = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"Peer ID:" not in output:
                left_s = until_s - time.monotonic()
                chunk = b""
                if left_s > 0 and selector.select(left_s):
                    chunk = os.read(self._process.stdout.fileno(), 4096)
                if not chunk:
                    last = output.decode(errors="replace").strip().rsplit("\n", 1)[-1][:300]
                    raise SwarmError(
                        f"the network daemon did not start: {last or 'no output'}; check that the "
                        "listen address belongs to this machine"
                    )
                output += chunk
        threading.Thread(target=self._drain, name="atom-swarm-daemon-output", daemon=True).start()

    def _drain(self) -> None:
        """Read what the daemon says to its end: a full pipe would stop it, a closed one kill it."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                _log.debug("daemon: %s", line.decode(errors="replace").rstrip())


def _flags(config: DaemonConfig, control: str, key: Path) -> list[str]:
    loopback = config.listen_host.startswith("127.")
    flags = [
        f"-id={key}",
        f"-listen=/unix{control}",
        f"-hostAddrs=/ip4/{config.listen_host}/tcp/{config.listen_port}",
        "-dhtServer=1",
        "-connManager=1",
        "-tls=1",
        # Peers relay themselves, within limits that their owners set (`relaying`): the daemon would
        # for any stranger, and its circuits cannot be dialled (docs/transports.md).
        "-relay=0",
        "-relayService=0",
        "-idleTimeout=30s",
        f"-natPortMap={int(not loopback)}",
        f"-autonat={int(not loopback)}",
    ]
    if config.announce is not None:
        flags.append(f"-announceAddrs={config.announce}")
    return flags


def _check_port_is_free(host: str, port: int) -> None:
    """Refuse a port in use: the daemon itself would share it silently with another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of a former listener that linger do not make a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            fix = "choose another port, or 0 for any free one"
            if error.errno == errno.EADDRNOTAVAIL:
                fix = "--host takes an address of this machine, or 0.0.0.0 for all of them"
            raise SwarmError(f"cannot listen on {host}:{port}: {error.strerror}; {fix}") from error


class RuntimeFolder:
    """A new folder, readable by its owner only, held until `close` or the end of the process.

    Whoever has a folder holds a lock on a file in it. The kernel frees the lock when the owner
    ends, however it ends; so a folder whose lock is free belongs to nobody.
    """

    def __init__(self) -> None:
        """Make and lock a folder; remove those that nobody holds any more."""
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > _PATH_BYTES_MAX:
            base = Path("/tmp")  # where sockets' paths are short enough
        _remove_forgotten(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        locked = self.path / f".{_LOCK}"
        self._lock = os.open(locked, os.O_RDWR | os.O_CREAT, 0o600)
        locks.take(self._lock)
        locked.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_forgotten(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            if folder.stat().st_uid == os.getuid() and _is_forgotten(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_forgotten(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # it is being made, half removed, or somebody else's
        ours = all(entry.is_socket() or entry.name == f".{_LOCK}" for entry in folder.iterdir())
        return ours and time.time() - folder.stat().st_mtime > _UNLOCKED_S
    try:
        locks.take(lock)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)

"""A file without a name on a local disk, read and written past the page cache where that works.

The file has no name from the start, so nothing is left behind however the process ends. Its space
is taken when it is opened: a disk that is too small is found before anything is trained.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path

from torch import Tensor

from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.errors import DiskError
from atomtrain.planning.plan.disk import PAGE_BYTES, paged
from atomtrain.units import format_bytes

_PIECE_BYTES = 16 << 20
"""Moved by one system call: enough for a disk to be busy with, and other threads get their turn."""
_CALLS = ("preadv", "pwritev", "posix_fallocate", "posix_fadvise")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFile:
    """Space on a disk, by offsets. Threads may use different parts of it at once.

    Offsets, sizes and memory addresses are multiples of a page; `aligned_empty` gives such memory.
    """

    def __init__(self, folder: Path, n_bytes: int) -> None:
        """Take `n_bytes` of the disk of an existing folder.

        Raises:
            DiskError: the folder cannot be written to, its disk has less space, or the system
                lacks calls that this needs.
        """
        if not all(hasattr(os, call) for call in _CALLS):
            raise DiskError(
                f"state on disk needs Linux: this system lacks one of {', '.join(_CALLS)}; leave "
                "out --disk"
            )
        self.folder = folder
        self.read_bytes = 0
        self.written_bytes = 0
        self._lock = threading.Lock()
        self._size_bytes = self._used_bytes = 0
        self._descriptor = _open_nameless(folder)
        try:
            self._reserve(paged(n_bytes))
            self.direct = self._try_direct()
            """Whether reads and writes go past the page cache; some file systems refuse it."""
        except BaseException:
            self.close()
            raise

    def allocate(self, n_bytes: int) -> int:
        """Return the offset of a part that nothing else uses; the file grows if it must.

        Raises:
            DiskError: the disk is full.
        """
        n_bytes = paged(n_bytes)
        with self._lock:
            offset = self._used_bytes
            if offset + n_bytes > self._size_bytes:
                self._reserve(offset + n_bytes)
            self._used_bytes += n_bytes
        return offset

    def read(self, offset: int, target: Tensor) -> None:
        """Fill `target` (1-D uint8) with what is at `offset`.

        Raises:
            DiskError: the disk failed, or the file is shorter than that.
        """
        view, done = _view(target), 0
        while done < len(view):
            piece = view[done : done + _PIECE_BYTES]
            try:
                moved = os.preadv(self._descriptor, [piece], offset + done)
            except OSError as error:
                raise self._failed("reading", len(view), error) from error
            if moved == 0:
                raise DiskError(
                    f"the file in {self.folder} ends after {format_bytes(offset + done)}, "
                    f"{format_bytes(offset + len(view))} were written; something cut it short: "
                    "resume from the last checkpoint"
                )
            done += moved
        with self._lock:
            self.read_bytes += done

    def write(self, offset: int, source: Tensor) -> None:
        """Put `source` (1-D uint8) at `offset`.

        Raises:
            DiskError: the disk failed or is full; part of it may be written.
        """
        view, done = _view(source), 0
        while done < len(view):
            piece = view[done : done + _PIECE_BYTES]
            try:
                done += os.pwritev(self._descriptor, [piece], offset + done)
            except OSError as error:
                raise self._failed("writing", len(view), error) from error
        with self._lock:
            self.written_bytes += done

    def map(self, offset: int, n_bytes: int) -> mmap.mmap:
        """Return a part of the file as memory that the system may drop and read again."""
        return mmap.mmap(self._descriptor, paged(n_bytes), offset=offset)

    def settle(self) -> None:
        """Bring what was written to the disk and forget it in memory, if I/O is not direct."""
        if not self.direct:
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the space back, as soon as no part is mapped any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _reserve(self, n_bytes: int) -> None:
        """Make the file `n_bytes` long, of space that is its own."""
        more_bytes = n_bytes - self._size_bytes
        if more_bytes <= 0:
            return
        free_bytes = free_bytes_of(self.folder)
        if more_bytes <= free_bytes:
            try:
                os.posix_fallocate(self._descriptor, self._size_bytes, more_bytes)
                self._size_bytes = n_bytes
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._failed("reserving", more_bytes, error) from error
        raise DiskError(
            f"the disk of {self.folder} has {format_bytes(free_bytes)} free for this process, "
            f"{format_bytes(more_bytes)} are needed; free some, or name a folder on a larger disk"
        )

    def _try_direct(self) -> bool:
        """Switch to direct I/O, if the file system takes it."""
        if not hasattr(os, "O_DIRECT") or self._size_bytes == 0:
            return False
        import fcntl

        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        page = aligned_empty(PAGE_BYTES).zero_()
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            view = _view(page)
            if os.pwritev(self._descriptor, [view], 0) == os.preadv(self._descriptor, [view], 0):
                return True
        except OSError:
            pass  # buffered I/O works everywhere, and `direct` says what it is
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        return False

    def _failed(self, doing: str, n_bytes: int, error: OSError) -> DiskError:
        what = f"{doing} {format_bytes(n_bytes)} on the disk of {self.folder} failed"
        if error.errno in _FULL:
            free = format_bytes(free_bytes_of(self.folder))
            return DiskError(f"{what}: it is full ({error.strerror}, {free} free); make room on it")
        return DiskError(f"{what} ({error.strerror}); check the disk, and use another folder")


def free_bytes_of(folder: Path) -> int:
    """Return what this user may still write to the disk of a folder, in bytes."""
    return shutil.disk_usage(folder).free


def _open_nameless(folder: Path) -> int:
    if not folder.is_dir():
        raise DiskError(f"{folder} is not a folder; make it, or name another one for --disk")
    try:
        with contextlib.suppress(OSError, AttributeError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        # Not every file system knows files without a name.
        descriptor, name = tempfile.mkstemp(prefix="atom-", dir=folder)
        os.unlink(name)
        return descriptor
    except OSError as error:
        raise DiskError(
            f"no file can be made in {folder} ({error.strerror}); name a folder that you may "
            "write to for --disk"
        ) from error


def _view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]

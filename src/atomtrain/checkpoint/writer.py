"""Saving: write under a temporary name, sync, rename, sync the folder, then drop the oldest."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from atomtrain import locks
from atomtrain.checkpoint.reader import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    directory_name,
    hash_file,
    is_plain_name,
    list_directories,
    read_manifest,
)
from atomtrain.errors import CheckpointError, reason_of
from atomtrain.units import format_bytes

Shards = Mapping[str, Mapping[str, Tensor]] | Iterable[tuple[str, Mapping[str, Tensor]]]

_LOCK_FILE = ".lock"
_UNFINISHED = ".unfinished-"
_DISCARDED = ".discarded-"
_RESERVED = "__metadata__"  # safetensors keeps its own text under this name

_logger = logging.getLogger(__name__)

_saving: set[Path] = set()
_saving_guard = threading.Lock()


def save(
    folder: Path,
    step: int,
    shards: Shards,
    meta: Mapping[str, Any],
    texts: Mapping[str, str] = MappingProxyType({}),
    keep: int = 2,
) -> Path:
    """Write one checkpoint into `folder`, then remove all but the newest `keep` checkpoints.

    Blocks until everything is on disk. The tensors must not change meanwhile. `shards` may be a
    generator: each shard is written before the next is asked for, straight from the tensors'
    memory, so no second copy of the model is made. What the writer leaves when it dies, the next
    save into the same folder removes.

    Args:
        folder: holds the checkpoints of one run, and nothing else; made if missing.
        step: training step, 0 or more. A step that was saved before is saved anew.
        shards: name of a shard (a segment, a layer) -> name of a tensor -> tensor, of any shape
            and dtype. Tensors on a device are copied to the host one shard at a time.
            Two names for the same memory in one shard are refused: give a tied tensor once.
        meta: anything JSON can express; tuples come back as lists, keys as strings.
        texts: file name -> text, such as `{"tokenizer.json": ...}`.
        keep: how many checkpoints to keep, 1 or more.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: nothing was saved and the earlier checkpoints are as they were: bad
            arguments, shared or sparse tensors, a full disk, or another writer in this folder.
    """
    _check_arguments(step, texts, keep)
    with _only_writer(folder):
        _remove_leftovers(folder)
        serial = 1 + max((_serial(path) for path in list_directories(folder)), default=0)
        unfinished = folder / f"{_UNFINISHED}{directory_name(step, 0)}"
        try:
            with _writing(unfinished):
                unfinished.mkdir()
            manifest = Manifest(
                step=step,
                serial=serial,
                meta=dict(meta),
                texts=tuple(_write_text(unfinished / name, texts[name]) for name in texts),
                shards=tuple(_write_shards(unfinished, shards)),
            )
            _write_text(unfinished / MANIFEST_FILE, manifest.to_json())
            final = _publish(unfinished, _free_directory(folder, step))
        finally:
            # Also when the caller's generator raises: an unfinished checkpoint is of no use.
            shutil.rmtree(unfinished, ignore_errors=True)
        _remove_old(folder, final, keep)
    return final


def _check_arguments(step: int, texts: Mapping[str, str], keep: int) -> None:
    if step < 0:
        raise CheckpointError(f"step {step} cannot be saved; it must be 0 or more")
    if keep < 1:
        raise CheckpointError(f"keep={keep} would leave no checkpoint; keep at least 1")
    for name in texts:
        if not is_plain_name(name) or name == MANIFEST_FILE or name.endswith(".safetensors"):
            raise CheckpointError(
                f"{name!r} cannot be a text file of a checkpoint; "
                "use a plain file name such as tokenizer.json"
            )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process dies, or refuse.

    A POSIX record lock, because children forked meanwhile must not inherit it; it does not tell
    the threads of one process apart, so a set of folders does that. Where there are no locks, only
    saves of this process are told apart.
    """
    busy = CheckpointError(
        f"{folder} is being written by another save; give each run a checkpoint folder of its own"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        key = folder.resolve()
        with _saving_guard:
            if key in _saving:
                raise busy
            _saving.add(key)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be made a checkpoint folder ({error.strerror}); choose another"
        ) from error
    try:
        with _open_lock(folder) as lock:
            try:
                locks.take_for_process(lock)
            except BlockingIOError:
                raise busy from None
            except OSError as error:
                if error.errno != errno.ENOLCK:
                    raise
            yield
    finally:
        with _saving_guard:
            _saving.discard(key)


@contextmanager
def _open_lock(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror}); choose another checkpoint folder"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_shards(directory: Path, shards: Shards) -> Iterator[ShardEntry]:
    names: set[str] = set()
    written_bytes = 0
    for index, (name, tensors) in enumerate(
        shards.items() if isinstance(shards, Mapping) else shards
    ):
        if name in names:
            raise CheckpointError(f"shard {name!r} was given twice; give each shard once")
        names.add(name)
        entry = _write_shard(directory, index, name, tensors, written_bytes)
        written_bytes += entry.size_bytes
        yield entry


def _write_shard(
    directory: Path, index: int, name: str, tensors: Mapping[str, Tensor], written_bytes: int
) -> ShardEntry:
    path = directory / f"shard-{index:05d}.safetensors"
    if _RESERVED in tensors:
        raise CheckpointError(f"shard {name!r} has a tensor named {_RESERVED!r}; rename it")
    needed_bytes = written_bytes + sum(t.nelement() * t.element_size() for t in tensors.values())
    with _writing(path, needed_bytes):
        try:
            save_file({key: t.detach().contiguous() for key, t in tensors.items()}, path)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"shard {name!r} cannot be saved: {reason_of(error)}; give each piece of memory "
                "once, as a dense tensor that holds data"
            ) from error
        file = _seal(path)
    return ShardEntry(name=name, tensors=tuple(tensors), **vars(file))


def _write_text(path: Path, text: str) -> FileEntry:
    content = text.encode()
    with _writing(path, len(content)):
        path.write_bytes(content)
        return _seal(path)


def _seal(path: Path) -> FileEntry:
    """Bring a file to disk and describe it."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        size_bytes = os.fstat(stream.fileno()).st_size
    return FileEntry(file=path.name, size_bytes=size_bytes, sha256=hash_file(path))


def _publish(unfinished: Path, final: Path) -> Path:
    """Give a finished checkpoint its name, durably, and return it."""
    with _writing(final):
        _sync_folder(unfinished)
        unfinished.rename(final)
        _sync_folder(final.parent)
    return final


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn a failure of the disk into one line that says what was needed and what is free."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        free_bytes = shutil.disk_usage(path.parent).free
        needed = f"at least {format_bytes(needed_bytes)} ({needed_bytes} bytes) are needed and "
        raise CheckpointError(
            f"{path} could not be written ({reason or error}); {needed if needed_bytes else ''}"
            f"{format_bytes(free_bytes)} ({free_bytes} bytes) were left; earlier checkpoints are "
            "intact; free some space or choose another checkpoint folder"
        ) from error


def _free_directory(folder: Path, step: int) -> Path:
    copy = 0
    while (folder / directory_name(step, copy)).exists():
        copy += 1
    return folder / directory_name(step, copy)


def _serial(directory: Path) -> int:
    """Return how new a checkpoint is, or 0 if it cannot be told."""
    try:
        return read_manifest(directory).serial
    except CheckpointError:
        return 0


def _remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Remove other saves of the newest step, and of the rest all but the last `keep - 1`."""
    others = [path for path in list_directories(folder) if path != newest]
    same_step = [p for p in others if p.name.split(".")[0] == newest.name.split(".")[0]]
    rest = sorted((p for p in others if p not in same_step), key=_serial, reverse=True)
    for path in same_step + rest[keep - 1 :]:
        # Renamed first: a checkpoint that is half removed must not look like a damaged one.
        discarded = folder / f"{_DISCARDED}{path.name}"
        try:
            path.rename(discarded)
            shutil.rmtree(discarded)
        except OSError as error:
            # The new checkpoint is safe; the next save tries again.
            _logger.warning("old checkpoint %s could not be removed: %s", path, error)


def _remove_leftovers(folder: Path) -> None:
    """Remove what writers left that died; the folder's lock says that none is alive."""
    for path in folder.iterdir():
        if path.name.startswith((_UNFINISHED, _DISCARDED)):
            shutil.rmtree(path, ignore_errors=True)

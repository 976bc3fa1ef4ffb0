"""Loading: find the newest checkpoint whose every byte is as it was written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atomtrain.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ManifestDamageError,
    list_directories,
    read_manifest,
    verify,
)
from atomtrain.errors import CheckpointError, nearest

CHECKPOINTS_FOLDER = "checkpoints"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk, its checksums verified; tensors are read when asked for."""

    path: Path
    """Its directory."""
    manifest: Manifest
    """What it consists of."""
    texts: dict[str, str]
    """Extra text files by name."""
    skipped: tuple[str, ...] = ()
    """One line for each damaged checkpoint that was met before this one was found."""

    @property
    def step(self) -> int:
        """Training step at which it was saved."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """Free-form JSON given when it was saved."""
        return self.manifest.meta

    @property
    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors by shard, both in the order in which they were saved."""
        return {shard.name: shard.tensors for shard in self.manifest.shards}

    def shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each shard's name and tensors, one shard in memory at a time.

        The tensors are on the CPU and share one private mapping of the shard's file: copy them to
        where they belong and let them go.
        """
        for shard in self.manifest.shards:
            yield shard.name, self.shard(shard.name)

    def shard(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one shard.

        Raises:
            CheckpointError: no such shard, or its file has vanished or changed meanwhile.
        """
        for entry in self.manifest.shards:
            if entry.name == name:
                break
        else:
            raise CheckpointError(
                f"{self.path} has no shard {name!r}.{nearest(name, self.tensor_names)}"
            )
        path = self.path / entry.file
        try:
            tensors = load_file(path)
            return {key: tensors[key] for key in entry.tensors}
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); load again") from error


def load_latest(folder: Path) -> Checkpoint:
    """Return the newest checkpoint in `folder` that is intact; reads every byte of it once.

    Damaged ones met on the way are logged and named in `Checkpoint.skipped`, and left on disk.

    Raises:
        CheckpointError: no checkpoint at all, none intact (names each damaged file), or the
            newest was written by another version of the format.
    """
    directories = list_directories(folder)
    if not directories:
        raise CheckpointError(f"{folder} holds no checkpoint (no step-* directory with a manifest)")
    skipped: list[str] = []
    readable: list[tuple[Manifest, Path]] = []
    for path in directories:
        try:
            readable.append((read_manifest(path), path))
        except ManifestDamageError as error:
            skipped.append(str(error))
    for manifest, path in sorted(readable, key=lambda found: found[0].serial, reverse=True):
        try:
            verify(path, manifest)
            texts = _read_texts(path, manifest)
        except ManifestDamageError as error:
            skipped.append(str(error))
            continue
        for line in skipped:
            _logger.warning("damaged checkpoint passed over: %s", line)
        return Checkpoint(path=path, manifest=manifest, texts=texts, skipped=tuple(skipped))
    raise CheckpointError(f"no checkpoint in {folder} is intact: {'; '.join(skipped)}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`: a `step-*` directory, a checkpoint folder or a run's folder.

    Of a folder with several, the newest intact one is taken, as by `load_latest`; a single
    directory is taken or refused.

    Raises:
        CheckpointError: there is none, it is damaged (names the file), or of another format.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint or the folder of a run")
    if list_directories(path):
        return load_latest(path)
    if list_directories(path / CHECKPOINTS_FOLDER):
        return load_latest(path / CHECKPOINTS_FOLDER)
    if not (path / MANIFEST_FILE).exists() and not path.name.startswith("step-"):
        raise CheckpointError(
            f"{path} is not a checkpoint: it has neither {MANIFEST_FILE} nor step-* directories; "
            "give a checkpoint or the folder of a run"
        )
    manifest = read_manifest(path)
    verify(path, manifest)
    return Checkpoint(path=path, manifest=manifest, texts=_read_texts(path, manifest))


def _read_texts(directory: Path, manifest: Manifest) -> dict[str, str]:
    return {entry.file: (directory / entry.file).read_bytes().decode() for entry in manifest.texts}

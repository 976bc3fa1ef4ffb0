"""What a checkpoint consists of, and loading the newest one whose every byte is as it was written.

Its manifest is one JSON file, written last: what belongs to it, how large it is, and checksums. It
carries a checksum of its own, so that a flipped digit in a step number or a data position is found
just as one in a tensor is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atomtrain.errors import CheckpointError, nearest

FORMAT_NAME = "atomtrain-checkpoint"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIRECTORY = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")


class ManifestDamageError(CheckpointError):
    """This checkpoint's files are not as they were written; an older checkpoint may be good."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    file: str
    """Plain file name inside the checkpoint's directory."""
    size_bytes: int
    """Length of the file, bytes."""
    sha256: str
    """Checksum of the whole file, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry(FileEntry):
    """One shard (a segment or a layer): its file and what is in it."""

    name: str
    """The shard's name as given by the caller; unique in the checkpoint."""
    tensors: tuple[str, ...]
    """Names of its tensors, in the order in which they were given."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about one checkpoint except the tensors themselves."""

    step: int
    """Training step, 0 or more."""
    serial: int
    """Grows with every save into a folder; the newest checkpoint is the one with the largest."""
    meta: dict[str, Any]
    """Free-form JSON of the caller."""
    shards: tuple[ShardEntry, ...]
    """Tensor files, in the order in which they were saved."""
    texts: tuple[FileEntry, ...]
    """Extra text files, such as tokenizer.json."""

    def files(self) -> Iterator[FileEntry]:
        """Yield every file that must be present and unchanged."""
        yield from self.texts
        yield from self.shards

    def to_json(self) -> str:
        """Return the text of the manifest file.

        Raises:
            CheckpointError: `meta` holds something that JSON cannot express.
        """
        body = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)}
        try:
            checksum = _body_checksum(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the checkpoint's meta data cannot be written as JSON ({error}); "
                "use only numbers, strings, booleans, None, lists and dictionaries"
            ) from error
        return json.dumps({**body, "manifest_sha256": checksum}, indent=1)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of one checkpoint directory.

    Raises:
        ManifestDamageError: it is missing, cut short, changed or malformed.
        CheckpointError: it was written by another version of the format.
    """
    path = directory / MANIFEST_FILE
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ManifestDamageError(f"{path} is missing") from error
    except OSError as error:
        raise ManifestDamageError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ManifestDamageError(f"{path} is damaged (not JSON: {error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise ManifestDamageError(f"{path} is not the manifest of an ATOM checkpoint")
    if body.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {body.get('version')!r}, this version of atomtrain "
            f"reads format {FORMAT_VERSION}; use the version of atomtrain that wrote it"
        )
    if body.pop("manifest_sha256", None) != _body_checksum(body):
        raise ManifestDamageError(f"{path} is damaged (its checksum does not match)")
    try:
        return _from_body(body)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestDamageError(f"{path} is malformed ({error!r})") from error


def verify(directory: Path, manifest: Manifest) -> None:
    """Compare every file with its size and checksum; reads all bytes of the checkpoint.

    Raises:
        ManifestDamageError: names the first file that is missing, short or changed, and how.
    """
    for entry in manifest.files():
        path = directory / entry.file
        try:
            size_bytes = path.stat().st_size
            checksum = hash_file(path) if size_bytes == entry.size_bytes else ""
        except FileNotFoundError as error:
            raise ManifestDamageError(f"{path} is missing") from error
        except OSError as error:
            raise ManifestDamageError(f"{path} cannot be read ({error.strerror})") from error
        if size_bytes != entry.size_bytes:
            raise ManifestDamageError(
                f"{path} is damaged ({size_bytes} bytes, {entry.size_bytes} were written)"
            )
        if checksum != entry.sha256:
            raise ManifestDamageError(f"{path} is damaged (its checksum does not match)")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_plain_name(name: str) -> bool:
    """Return whether `name` can be a file inside a checkpoint: no folders, nothing hidden."""
    return _PLAIN_NAME.fullmatch(name) is not None


def directory_name(step: int, copy: int) -> str:
    """Return the name of the `copy`-th directory for a step: `step-00000100`, `step-00000100.1`.

    A second save of a step gets a directory of its own, so that the first is never in pieces.
    """
    return f"step-{step:08d}" + (f".{copy}" if copy else "")


def list_directories(folder: Path) -> list[Path]:
    """Return the checkpoint directories in a folder by name: the highest step and copy first."""
    if not folder.is_dir():
        return []
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        match = _DIRECTORY.fullmatch(path.name)
        if match is not None and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _body_checksum(body: Mapping[str, Any]) -> str:
    # Dumped twice: keys that are not strings, and tuples, must hash as they will be read back.
    plain = json.loads(json.dumps(body))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _from_body(body: Mapping[str, Any]) -> Manifest:
    shards = tuple(
        ShardEntry(**{**entry, "tensors": tuple(entry["tensors"])}) for entry in body["shards"]
    )
    texts = tuple(FileEntry(**entry) for entry in body["texts"])
    for entry in (*shards, *texts):
        if not is_plain_name(entry.file):
            raise ValueError(f"file name {entry.file!r}")
    return Manifest(
        step=int(body["step"]),
        serial=int(body["serial"]),
        meta=dict(body["meta"]),
        shards=shards,
        texts=texts,
    )


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
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
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
    """Return the checkpoint at `path`: a `step-*` directory, or the folder of a peer or of a run.

    Of a peer's folder the newest intact one is taken, as by `load_latest`, and of a run's folder
    that of its only peer; a single directory is taken or refused.

    Raises:
        CheckpointError: there is none, it is damaged (names the file), or of another format.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint or the folder of a run")
    if list_directories(path):
        return load_latest(path)
    if list_directories(path / CHECKPOINTS_FOLDER):
        return load_latest(path / CHECKPOINTS_FOLDER)
    if peers := sorted(p for p in path.glob(f"*/{CHECKPOINTS_FOLDER}") if list_directories(p)):
        if peers[1:]:
            raise CheckpointError(
                f"{path} has checkpoints of {len(peers)} peers; give the folder of one, such as "
                f"{peers[0].parent}"
            )
        return load_latest(peers[0])
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

"""The manifest of a checkpoint: what belongs to it, how large it is, and its checksums.

It is one JSON file, written last. It carries a checksum of its own, so that a flipped digit in a
step number or a data position is found just as one in a tensor is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atomtrain.errors import CheckpointError

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

"""A corpus as tokens, in a file that is memory-mapped, checked and reused; and its tokenizer.

One file, so that it appears and is replaced as a whole: a header block (magic, checksum, JSON,
padding), the training tokens, the held-out tokens. It is written under a temporary name, synced
and renamed. Processes that build it at once do so independently, and the last rename wins with
equal content.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.data.corpus import SPLIT_VERSION, Corpus, HoldOut, Part, pieces
from atomtrain.data.tokenizer import DEFAULT_VOCABULARY, Tokenizer
from atomtrain.errors import DataError
from atomtrain.files import replacing
from atomtrain.progress import Progress
from atomtrain.units import format_bytes

FORMAT_VERSION = 1

_MAGIC = b"ATOMTOK1"
_HEADER_BYTES = 4096
_BATCH_PIECES = 64
_STALE_S = 24 * 3600.0
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_logger = logging.getLogger(__name__)


class _DamageError(DataError):
    """A token file that is not as it was written; it is built again."""


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What the header block says; it is the one layout that writer and reader share."""

    version: int
    key: str
    dtype: str
    vocabulary: int
    train_tokens: int
    held_out_tokens: int
    train_bytes: int
    held_out_bytes: int
    body_sha256: str

    @property
    def file_bytes(self) -> int:
        tokens = self.train_tokens + self.held_out_tokens
        return _HEADER_BYTES + tokens * _DTYPES[self.dtype].itemsize

    def to_block(self) -> bytes:
        content = json.dumps(asdict(self)).encode()
        checksum = hashlib.sha256(content).hexdigest().encode()
        return (_MAGIC + checksum + content).ljust(_HEADER_BYTES)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A corpus as token numbers, on disk, in two parts that never mix."""

    path: Path
    """The token file."""
    train: NDArray[Any]  # [training tokens] uint16 or uint32, read-only
    """Tokens to train on, the separator after each document and each gap."""
    held_out: NDArray[Any]  # [held-out tokens] uint16 or uint32, read-only
    """Tokens to evaluate on, never trained on by any peer."""
    train_bytes: int
    """UTF-8 bytes of the training text."""
    held_out_bytes: int
    """UTF-8 bytes of the held-out text."""
    vocabulary: int
    """Number of tokens of the tokenizer that made it."""

    def held_out_bits_per_byte(self, loss_nats_per_token: float) -> float:
        """Return a held-out loss in bits per byte of text, comparable between tokenizers."""
        return bits_per_byte(loss_nats_per_token, len(self.held_out), self.held_out_bytes)


def bits_per_byte(loss_nats_per_token: float, tokens: int, size_bytes: int) -> float:
    """Return a mean loss, nats per token over `tokens` of `size_bytes` text, in bits per byte."""
    return loss_nats_per_token * tokens / (math.log(2) * size_bytes)


def open_tokens(
    corpus: Corpus, tokenizer: Tokenizer, cache: Path, hold_out: HoldOut = "some"
) -> Tokens:
    """Return the tokens of `corpus`, from the file in `cache` if it is there and intact.

    Blocks while the file is built or its checksum verified. Safe in several processes at once.

    Raises:
        DataError: the file cannot be written (names it, and says what to do) or the corpus read.
    """
    key = _key(corpus, tokenizer, hold_out)
    path = cache / f"tokens-{key[:32]}.bin"
    try:
        return _open(path, key)
    except FileNotFoundError:
        pass
    except _DamageError as error:
        _logger.warning("%s; building it again", error)
    with disk_errors(path):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        _build(path, key, corpus, tokenizer, hold_out)
    return _open(path, key)


def _key(corpus: Corpus, tokenizer: Tokenizer, hold_out: HoldOut) -> str:
    parts = (FORMAT_VERSION, f"{SPLIT_VERSION}-{hold_out}", corpus.sha256, tokenizer.sha256)
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _open(path: Path, key: str) -> Tokens:
    try:
        with path.open("rb") as stream:
            header = _read_header(stream, path, key)
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes != header.file_bytes:
                raise _DamageError(
                    f"{path} is damaged ({size_bytes} bytes, {header.file_bytes} were written)"
                )
            if hashlib.file_digest(stream, "sha256").hexdigest() != header.body_sha256:
                raise _DamageError(f"{path} is damaged (its checksum does not match)")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); remove it or choose another cache folder"
        ) from error
    body = np.memmap(path, dtype=_DTYPES[header.dtype], mode="r", offset=_HEADER_BYTES)
    return Tokens(
        path=path,
        train=body[: header.train_tokens],
        held_out=body[header.train_tokens :],
        train_bytes=header.train_bytes,
        held_out_bytes=header.held_out_bytes,
        vocabulary=header.vocabulary,
    )


def _read_header(stream: BinaryIO, path: Path, key: str) -> _Header:
    block = stream.read(_HEADER_BYTES)
    checksum, content = block[len(_MAGIC) : len(_MAGIC) + 64], block[len(_MAGIC) + 64 :].rstrip()
    if not block.startswith(_MAGIC) or hashlib.sha256(content).hexdigest().encode() != checksum:
        raise _DamageError(f"{path} is damaged (its header is not as it was written)")
    # The checksum vouches for the content: it is what `to_block` wrote.
    header = _Header(**json.loads(content))
    if header.version != FORMAT_VERSION or header.key != key:
        raise _DamageError(f"{path} is damaged (it belongs to another corpus or tokenizer)")
    return header


_PARTS: dict[HoldOut, tuple[Part | None, Part | None]] = {
    "some": ("train", "held_out"),
    "none": ("whole", None),
    "all": (None, "whole"),
}
"""What is trained on, and what is evaluated on."""


def _build(path: Path, key: str, corpus: Corpus, tokenizer: Tokenizer, hold_out: HoldOut) -> None:
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    with replacing(path) as unfinished, unfinished.open("xb") as stream:
        stream.write(b"\0" * _HEADER_BYTES)
        body = _BodyWriter(stream, tokenizer, _DTYPES[dtype])
        trained, judged = _PARTS[hold_out]
        with Progress("tokenising", corpus.characters, "characters") as body.progress:
            train_tokens, train_bytes = body.write(corpus, trained)
            held_out_tokens, held_out_bytes = body.write(corpus, judged)
        header = _Header(
            version=FORMAT_VERSION,
            key=key,
            dtype=dtype,
            vocabulary=tokenizer.vocabulary,
            train_tokens=train_tokens,
            held_out_tokens=held_out_tokens,
            train_bytes=train_bytes,
            held_out_bytes=held_out_bytes,
            body_sha256=body.digest.hexdigest(),
        )
        stream.seek(0)
        stream.write(header.to_block())
        stream.flush()
        os.fsync(stream.fileno())


class _BodyWriter:
    """Encodes a part of a corpus into a stream, a few megabytes at a time."""

    def __init__(self, stream: BinaryIO, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._dtype = dtype
        self.digest = hashlib.sha256()
        self.progress = Progress("tokenising")

    def write(self, corpus: Corpus, part: Part | None) -> tuple[int, int]:
        """Write one part; return its tokens and its bytes of text."""
        if part is None:
            return 0, 0
        tokens, size_bytes = 0, 0
        found = pieces(corpus, part)
        while batch := list(itertools.islice(found, _BATCH_PIECES)):
            encoded = self._tokenizer.encode_batch([piece.text for piece in batch])
            size_bytes += sum(len(piece.text.encode()) for piece in batch)
            self.progress.advance(sum(len(piece.text) for piece in batch))
            for piece, numbers in zip(batch, encoded, strict=True):
                if not piece.continues and tokens:
                    tokens += self._put([self._tokenizer.separator])
                tokens += self._put(numbers)
        return tokens + self._put([self._tokenizer.separator]), size_bytes

    def _put(self, numbers: list[int]) -> int:
        content = np.asarray(numbers, dtype=self._dtype).tobytes()
        self.digest.update(content)
        self._stream.write(content)
        return len(numbers)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into a `DataError` that says what is free and what to do."""
    try:
        yield
    except OSError as error:
        folder = next(parent for parent in path.parents if parent.is_dir())
        free = format_bytes(shutil.disk_usage(folder).free)
        raise DataError(
            f"{path} could not be written ({error.strerror}), {free} are free; free some space "
            "or choose another cache folder"
        ) from error


def _remove_stale(cache: Path) -> None:
    """Remove what builders left that died; one that is alive writes, so its file is not old."""
    for path in cache.glob("*.tmp-*"):
        # Another process may remove it first.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


TOKENIZER_SAMPLE_CHARACTERS = 32 * 1024 * 1024


class Prepared(NamedTuple):
    """What training needs of a corpus."""

    tokenizer: Tokenizer
    tokens: Tokens


def prepare(
    corpus: Corpus,
    cache: Path,
    *,
    vocabulary: int = DEFAULT_VOCABULARY,
    tokenizer: Tokenizer | None = None,
    hold_out: HoldOut = "some",
) -> Prepared:
    """Return tokenizer and tokens of `corpus`; a few seconds the first time, then from `cache`.

    Args:
        corpus: the text.
        cache: folder for the tokenizer and the token file; made if missing.
        vocabulary: tokens of the tokenizer that is trained on the corpus, held-out text excluded.
        tokenizer: use this one (of a checkpoint, of the swarm) and train none.
        hold_out: what of the tokens to evaluate on.

    Raises:
        DataError: see `Tokenizer.train` and `open_tokens`.
    """
    if tokenizer is None:
        tokenizer = cached_tokenizer(corpus, vocabulary, cache)
    return Prepared(tokenizer, open_tokens(corpus, tokenizer, cache, hold_out))


def cached_tokenizer(corpus: Corpus, vocabulary: int, cache: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, from `cache` if it is there and intact."""
    path = cache / f"tokenizer-{corpus.sha256[:32]}-{vocabulary}.json"
    try:
        return _read_tokenizer(path)
    except FileNotFoundError:
        pass
    except DataError as error:
        _logger.warning("%s; training it again", error)
    with Progress("training a tokenizer"):
        tokenizer = Tokenizer.train(_sample(corpus), vocabulary)
    with disk_errors(path):
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(_envelope(tokenizer.to_json()), encoding="utf-8")
    return tokenizer


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        content = path.read_bytes()
        text = str(json.loads(content)["tokenizer"])
        if _envelope(text).encode() != content:
            raise DataError(f"{path} is damaged (its checksum does not match)")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error!r})") from error
    return Tokenizer.from_json(text)


def _envelope(text: str) -> str:
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text})


def _sample(corpus: Corpus) -> Iterator[str]:
    """Yield training text spread evenly over the corpus, at most about 32 MiB of it."""
    stride = max(1, -(-corpus.characters // TOKENIZER_SAMPLE_CHARACTERS))
    for piece in itertools.islice(pieces(corpus, "train"), 0, None, stride):
        yield piece.text

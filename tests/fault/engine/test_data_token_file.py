"""Token files: damage is found and repaired, builders may race or die, a full disk is reported."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from atombench import forks
from atomtrain.data import tokens
from atomtrain.data.corpus import Corpus, corpus_of_texts
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.data.tokens import open_tokens, prepare
from atomtrain.errors import DataError

DEADLINE_S = 600.0


def make_corpus() -> Corpus:
    return corpus_of_texts("lines", ["".join(f"This is line {i}.\n" for i in range(2000))])


def make_tokenizer() -> Tokenizer:
    return Tokenizer.train(["This is line 0123456789.\n"], 270)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0\0")


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def flip_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:150] + bytes([content[150] ^ 1]) + content[151:])


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 10_000)


@pytest.mark.parametrize(
    "damage",
    [truncate, empty, grow, flip_last_bit, flip_header, garbage],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_named_and_built_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    corpus, tokenizer = make_corpus(), make_tokenizer()
    first = open_tokens(corpus, tokenizer, tmp_path)
    train, content = first.train.copy(), first.path.read_bytes()
    del first
    path = next(tmp_path.glob("tokens-*.bin"))
    damage(path)
    with caplog.at_level(logging.WARNING):
        again = open_tokens(corpus, tokenizer, tmp_path)
    assert np.array_equal(again.train, train)
    assert path.read_bytes() == content
    assert f"{path} is damaged" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_of_another_corpus_under_this_name_is_not_used(tmp_path: Path) -> None:
    corpus, tokenizer = make_corpus(), make_tokenizer()
    other = corpus_of_texts("other", ["Something else.\n" * 1000])
    path = open_tokens(corpus, tokenizer, tmp_path).path
    open_tokens(other, tokenizer, tmp_path).path.replace(path)
    found = open_tokens(corpus, tokenizer, tmp_path)
    assert tokenizer.decode(found.train[:20].tolist()).startswith("This is line 0")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"[]", b'{"sha256": "0", "tokenizer": "{}"}', b"[" * 100_000]
)
def test_a_damaged_tokenizer_is_trained_again(tmp_path: Path, content: bytes) -> None:
    first = prepare(make_corpus(), tmp_path, vocabulary=300).tokenizer
    path = next(tmp_path.glob("tokenizer-*.json"))
    path.write_bytes(content)
    assert prepare(make_corpus(), tmp_path, vocabulary=300).tokenizer.to_json() == first.to_json()
    assert path.read_bytes() != content


def build_when_told(cache: Path, go: Event) -> None:
    go.wait(DEADLINE_S)
    prepared = prepare(make_corpus(), cache, vocabulary=300)
    text = prepared.tokenizer.decode(prepared.tokens.train[:20].tolist())
    assert text.startswith("This is line 0")


def test_processes_that_build_at_once_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "atomtrain.data", "atomtrain.checkpoint"])
    go = context.Event()
    builders = [context.Process(target=build_when_told, args=(tmp_path, go)) for _ in range(4)]
    for builder in builders:
        builder.start()
    go.set()
    for builder in builders:
        builder.join(DEADLINE_S)
        builder.kill()
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert len(list(tmp_path.iterdir())) == 2, "one tokenizer, one token file, no leftovers"


DYING = """
import os, signal, sys
from pathlib import Path
from atomtrain.data import tokens
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.data.tokens import open_tokens
from tests.fault.engine.test_data_token_file import make_corpus, make_tokenizer
def die(self):
    os.kill(os.getpid(), signal.SIGKILL)
tokens._Header.to_block = die
open_tokens(make_corpus(), make_tokenizer(), Path(sys.argv[1]))
"""


def test_a_builder_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    done = forks.run([sys.executable, "-c", DYING, str(tmp_path)], DEADLINE_S)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert ".tmp-" in leftover.name
    open_tokens(make_corpus(), make_tokenizer(), tmp_path)
    assert leftover.exists(), "young: its writer may be alive"
    two_days_ago_s = time.time() - 2 * 24 * 3600
    os.utime(leftover, (two_days_ago_s, two_days_ago_s))
    next(tmp_path.glob("tokens-*.bin")).unlink()
    open_tokens(make_corpus(), make_tokenizer(), tmp_path)
    assert not leftover.exists()


LIMITED = """
import resource, sys
from pathlib import Path
from tests.fault.engine.test_data_token_file import make_corpus, make_tokenizer
from atomtrain.data.tokens import open_tokens
from atomtrain.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    open_tokens(make_corpus(), make_tokenizer(), Path(sys.argv[1]))
except DataError as error:
    print(error)
"""


def test_a_write_that_really_fails_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    done = forks.run([sys.executable, "-c", LIMITED, str(tmp_path)], DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "tokens-" in done.stdout
    assert "could not be written (File too large)" in done.stdout
    assert "choose another cache folder" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_last_moment_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens.os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device.*are free"):
        open_tokens(make_corpus(), make_tokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"choose another cache folder"):
        prepare(make_corpus(), tmp_path / "file" / "cache", vocabulary=300)

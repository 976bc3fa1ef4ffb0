"""Work that takes long tells how far it is: while it is under way, and to a listener only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from atomtrain import progress
from atomtrain.progress import BYTES, Progress, each, listening
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Lines that a listener without patience gets."""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    return queue.Queue()


def wait_for(told: queue.Queue[str], words: str) -> None:
    """Wait until a line has these words."""
    while words not in told.get(timeout=PATIENCE_S):
        pass


@pytest.mark.parametrize(
    ("what", "total", "unit", "done", "line"),
    [
        ("planning", None, "", 0, "planning: 4 s"),
        ("reading a.jsonl", None, "rows", 8000, "reading a.jsonl: 8k rows, 2k rows/s"),
        ("asking", 10, "pairs", 2, "asking: 2 of 10 pairs (20%), 0.5 pairs/s, 16 s left"),
        ("reading", 2**34, BYTES, 2**31,
         "reading: 2.0 GiB of 16.0 GiB (12%), 512.0 MiB/s, 28 s left"),
        ("reading", 5, "", 6, "reading: 6 of 5 (100%), 1.5/s, 1 s left"),
        ("reading", 800, "", 4, "reading: 4 of 800 (0%), 1/s, 13 min 16 s left"),
    ],
)  # fmt: skip
def test_a_line_says_what_is_done_and_left_and_the_rate(
    what: str, total: float | None, unit: str, done: float, line: str
) -> None:
    work = Progress(what, total, unit)
    work.advance(done)
    assert work.line(4.0) == line


def test_a_listener_is_told_until_it_is_over(told: queue.Queue[str]) -> None:
    with listening(told.put), Progress("reading", 10) as work:
        wait_for(told, "reading: ")
        work.advance(5)
        wait_for(told, "5 of 10 (50%)")
    *_, last = told.queue
    assert last == ""
    assert "atom-progress" not in {thread.name for thread in threading.enumerate()}


def test_each_item_counts_when_it_is_done(told: queue.Queue[str]) -> None:
    with listening(told.put):
        for number in each("judging", ["a", "b", "c", "d"], "texts"):
            wait_for(told, "judging: " if number == "a" else "of 4 texts")
    *_, last = told.queue
    assert last == ""
    assert list(each("judging", iter("ab"), "texts")) == ["a", "b"], "nobody knows how many come"


def test_the_part_is_told_in_place_of_the_whole(told: queue.Queue[str]) -> None:
    with listening(told.put), Progress("the whole"):
        wait_for(told, "the whole")
        with Progress("a part"):
            wait_for(told, "a part")
            wait_for(told, "a part")
            assert "the whole" not in "".join(told.queue)
        wait_for(told, "the whole")


def test_an_error_ends_it(told: queue.Queue[str]) -> None:
    def fail() -> None:
        with Progress("reading"):
            wait_for(told, "reading")
            raise ValueError("broken")

    with listening(told.put), pytest.raises(ValueError, match="broken"):
        fail()
    *_, last = told.queue
    assert last == ""


def test_a_generator_that_an_error_leaves_unfinished_ends_with_the_listener(
    told: queue.Queue[str],
) -> None:
    def rows() -> Iterator[int]:
        with Progress("reading"):
            yield 1
            yield 2

    def fail() -> None:
        found = rows()
        for _ in found:
            wait_for(told, "reading")
            raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row") as held, listening(told.put):
        fail()
    *_, last = told.queue
    assert last == ""
    assert "atom-progress" not in {thread.name for thread in threading.enumerate()}
    assert not progress._under_way
    del held  # the generator is closed only now


def test_nothing_happens_without_a_listener() -> None:
    before = threading.active_count()
    with Progress("reading", 3) as work:
        work.advance()
        assert threading.active_count() == before

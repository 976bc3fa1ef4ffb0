"""Streams: order, dependencies, failures that spread to dependants only, and an end."""

from __future__ import annotations

import threading
import weakref

import pytest

from atomtrain.engine.devices import streams
from atomtrain.engine.devices.streams import EagerStream, Event, Stream, finished
from atomtrain.errors import StreamError
from tests.support.waiting import PATIENCE_S


def boom() -> None:
    raise ValueError("boom")


def test_jobs_run_in_order_on_one_thread_of_their_own() -> None:
    stream = Stream("load")
    seen: list[tuple[int, str]] = []
    for number in range(50):
        stream.submit(lambda n=number: seen.append((n, threading.current_thread().name)))
    stream.close()
    assert seen == [(n, "atom-load") for n in range(50)]


def test_a_job_starts_only_after_what_it_waits_for() -> None:
    first, second = Stream("a"), Stream("b")
    gate = threading.Event()
    order: list[str] = []

    def slow() -> None:
        assert gate.wait(PATIENCE_S)
        order.append("slow")

    before = first.submit(slow)
    after = second.submit(lambda: order.append("after"), [before, finished()])
    assert not before.is_done()
    assert not after.is_done()
    gate.set()
    after.wait()
    assert order == ["slow", "after"]
    first.close()
    second.close()


def test_a_failure_spreads_to_dependants_and_waiters_and_the_stream_goes_on() -> None:
    first, second = Stream("a"), Stream("b")
    ran: list[str] = []
    failed = first.submit(boom)
    dependant = second.submit(lambda: ran.append("dependant"), [failed])
    free = first.submit(lambda: ran.append("free"))
    free.wait()
    for event in (failed, dependant):
        for _ in range(2):
            with pytest.raises(StreamError, match="boom") as caught:
                event.wait()
            assert isinstance(caught.value.__cause__, ValueError)
        assert event.is_done()
    second.submit(lambda: ran.append("later")).wait()
    assert ran == ["free", "later"]
    first.close()
    second.close()


def test_the_injector_runs_before_each_job_and_may_fail_it() -> None:
    seen: list[str] = []

    def inject(name: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            boom()

    stream = Stream("save", inject)
    events = [stream.submit(lambda: seen.append("job")) for _ in range(3)]
    events[2].wait()
    with pytest.raises(StreamError, match="boom"):
        events[1].wait()
    assert seen == ["save", "job", "save", "save", "job"]
    stream.close()


def test_close_finishes_the_queue_and_ends_the_thread() -> None:
    stream = Stream("load")
    done: list[int] = []
    for number in range(100):
        stream.submit(lambda n=number: done.append(n))
    stream.close()
    assert done == list(range(100))
    assert not stream._thread.is_alive()


def test_a_job_is_let_go_before_its_event_says_that_it_is_done() -> None:
    class Thing:
        pass

    class Watched(Stream):
        def _new_event(self) -> Event:
            return Watching()

    class Watching(Event):
        def finish(self, error: BaseException | None = None) -> None:
            then.append(alive())
            super().finish(error)

    then: list[Thing | None] = []
    stream, thing = Watched("save"), Thing()
    alive = weakref.ref(thing)
    event = stream.submit(lambda kept=thing: None)
    del thing
    event.wait()
    assert then == [None]
    stream.close()


def test_waits_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "DEADLINE_S", 0.01)
    with pytest.raises(StreamError, match=r"did not finish within 0\.01 s"):
        Event().wait()


def test_the_caller_does_what_need_not_wait_and_the_order_stays() -> None:
    stream, gate = EagerStream("update"), Event()
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    def submit(number: int, *after: Event) -> Event:
        return stream.submit(lambda: note(number), after)

    here = threading.current_thread().name
    assert submit(0, finished()).is_done()
    waiting = submit(1, gate)
    behind = submit(2)  # waits for nothing but its turn
    assert seen == [(0, here)]
    gate.finish()
    waiting.wait()
    behind.wait()
    assert submit(3).is_done()
    assert seen == [(0, here), (1, "atom-update"), (2, "atom-update"), (3, here)]
    stream.close()


def test_what_fails_on_the_callers_thread_fails_whoever_waits_for_it() -> None:
    stream = EagerStream("update")
    failed = stream.submit(boom)
    dependant = stream.submit(lambda: None, [failed])
    stream.submit(lambda: None).wait()
    for event in (failed, dependant):
        with pytest.raises(StreamError, match="boom"):
            event.wait()
    stream.close()


def test_an_interrupt_is_the_callers() -> None:
    stream = EagerStream("update")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.submit(interrupted)
    assert stream.submit(lambda: None).is_done()
    stream.close()

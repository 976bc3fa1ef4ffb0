"""What a peer's network side runs on: a thread with an event loop, workers, background tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atomtrain.errors import SwarmError

_log = logging.getLogger("atomtrain.swarm")
_WORKERS = 2
_STOP_S = 10.0
ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs coroutines on a background thread, and arithmetic on workers beside it; `stop` ends it.

    While it runs, the garbage collector leaves alone what has been there before: to look at the
    hundreds of thousands of objects of large libraries takes it a tenth of a second, in which
    nothing moves.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_loop_error)
        self._workers = concurrent.futures.ThreadPoolExecutor(_WORKERS, "atom-swarm-worker")
        self._thread = threading.Thread(target=self._run, name="atom-swarm", daemon=True)
        self._thread.start()
        gc.freeze()

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> concurrent.futures.Future[ResultT]:
        """Start a coroutine and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, ResultT], within_s: float) -> ResultT:
        """Run a coroutine and return its result.

        Raises:
            SwarmError: it took longer than `within_s`, and was cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise SwarmError(
                f"the network did not get ready within {within_s:.0f} s; try again, "
                "or see the log for what it waited for"
            ) from error

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Have `call(*args)` run on the thread soon; nothing happens after `stop`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    async def offload(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run arithmetic on a worker, so that streams keep moving meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread; idempotent."""
        if self._thread.is_alive():
            self.submit(_cancel_all())
            self._thread.join(_STOP_S)
            gc.unfreeze()
        self._workers.shutdown(wait=False)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_STOP_S / 2) if tasks else None
    asyncio.get_running_loop().stop()


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    _log.debug("network thread: %s %r", context.get("message"), error)


class Tasks:
    """One peer's background tasks: started by name, logged when they fail, cancelled together."""

    def __init__(self, who: str) -> None:
        """`who` is named in the log."""
        self._who = who
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work`, called `what`, in the background."""
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel_all(self) -> None:
        """Cancel every task, those too that others start at their end; wait until all are over."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # for what is called when they are done

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("peer %s: %s failed", self._who[-8:], task.get_name(), exc_info=error)

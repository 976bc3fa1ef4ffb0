"""The background tasks of one peer: started by name, logged when they fail, cancelled together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("atomtrain.swarm")


class Tasks:
    """Keeps every task until it is done."""

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

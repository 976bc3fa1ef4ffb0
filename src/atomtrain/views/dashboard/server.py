"""The web page: static files, the present state, and a stream of what is new.

Server-sent events (HTML Living Standard, section 9.2): one line `event:`, one line `data:`, an
empty line.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.errors import ConfigError
from atomtrain.views.dashboard.source import Message, Source

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
COOKIE = "atom_token"
_POLL_S = 0.25
_ALIVE_S = 15.0
_MOST_WAITING = 256
"""Messages that a view may lag behind; then its stream ends, and it begins anew."""
_MOST_VIEWS = 500
"""That follow at a time; each holds a connection and a queue."""
_logger = logging.getLogger(__name__)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Hub:
    """Polls a source and gives what is new to every view."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._lock = asyncio.Lock()
        self._first: list[str] | None = None
        """What views begin with, made once for all that come before there is news."""
        self.views = 0
        """How many streams are open, those that lag behind and read no more included."""

    async def run(self) -> None:
        """Poll until cancelled. What cannot be shown is said on the terminal, once each."""
        said = set[str]()
        while True:
            async with self._lock:
                try:
                    messages = await asyncio.to_thread(self._source.poll)
                    if messages:
                        self._first = None
                    for message in messages:
                        self._tell(message)
                except Exception as error:  # noqa: BLE001 - the task's edge: nobody would hear of it
                    self._first = None
                    if (what := f"{type(error).__name__}: {error}") not in said:
                        said.add(what)
                        _logger.warning("the page lacks something that is new: %s", what)
            await asyncio.sleep(_POLL_S)

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events for one view: all that is known, then what is new."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(_MOST_WAITING)
        self.views += 1
        try:
            async with self._lock:  # nothing is missed or told twice in between
                if self._first is None:
                    self._first = await asyncio.to_thread(self._beginning)
                first = self._first
                self._queues.add(queue)
            for text in first:
                yield text
            del first
            while True:
                try:
                    async with asyncio.timeout(_ALIVE_S):
                        news = await queue.get()
                except TimeoutError:
                    yield ": alive\n\n"
                    continue
                if news is None:
                    return
                yield news
        finally:
            self.views -= 1
            self._queues.discard(queue)

    def _beginning(self) -> list[str]:
        start = Message("start", {"title": self._source.title})
        return [_sent(one) for one in (start, *self._source.snapshot(), Message("ready", {}))]

    def close(self) -> None:
        for queue in self._queues:
            _end(queue)

    def _tell(self, message: Message) -> None:
        if not self._queues:
            return
        text = _sent(message)  # once for all
        for queue in list(self._queues):
            try:
                queue.put_nowait(text)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                _end(queue)


def application(
    source: Source, *, token: str | None, hosts: frozenset[str] | None, page: str = "index.html"
) -> Starlette:
    """Return the web application.

    Args:
        source: What it shows.
        token: What a visitor must know; `None` lets everybody in.
        hosts: Names under which it may be called, or `None` for any: a page of another name that
            points here must not read what is shown here only.
        page: The static file that shows it.

    Raises:
        ConfigError: the packages that serve it are missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.responses import FileResponse, PlainTextResponse, StreamingResponse
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    except ImportError as error:
        raise missing_extra(error) from error

    hub = Hub(source)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.hub = hub
        polling = asyncio.create_task(hub.run())
        try:
            yield
        finally:
            polling.cancel()
            hub.close()

    async def first(_: Request) -> Response:
        return FileResponse(STATIC / page)

    async def stream(_: Request) -> Response:
        if hub.views >= _MOST_VIEWS:
            return PlainTextResponse("too many visitors; come back later\n", status_code=503)
        return StreamingResponse(hub.stream(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", first),
            Route("/stream", stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(_Guard, token=token, hosts=hosts)],
        lifespan=lifespan,
    )


def missing_extra(error: ImportError) -> ConfigError:
    """Return the error that names the extra."""
    return ConfigError(
        f"the dashboard needs packages that are not installed ({error}); run "
        "pip install 'atomtrain[dashboard]'"
    )


class _Guard:
    """Lets in who may come in, and gives every answer the headers that browsers protect it by."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name.encode().lower(): value.encode() for name, value in _HEADERS.items()}
                message["headers"] = [*message.get("headers", ()), *names.items()]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, protected)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer for who may not come in, or has just shown the token."""
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        request = Request(scope)
        if self._hosts is not None and (request.url.hostname or "") not in self._hosts:
            return PlainTextResponse("this page is for this machine only\n", status_code=403)
        if self._token is None:
            return None
        if _same(request.query_params.get("token"), self._token):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if _same(request.cookies.get(COOKIE), self._token):
            return None
        return PlainTextResponse(
            "a token is needed: open the whole address that 'atom dashboard' printed\n",
            status_code=401,
        )


def _same(shown: str | None, token: str) -> bool:
    return shown is not None and hmac.compare_digest(shown.encode(), token.encode())


def _sent(message: Message) -> str:
    body = json.dumps(message.body, allow_nan=False, separators=(",", ":"))
    return f"event: {message.kind}\ndata: {body}\n\n"


def _end(queue: asyncio.Queue[str | None]) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)

"""The studio's server: loopback only, a token on every question, and nothing from outside the page."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .answers import Answers
from .lanes import Lane, Superseded, Task, sentence
from .page import page_files
from .source import Source
from .state import State, parse_query

TOKEN_HEADER = "x-shardwise-token"
_MOST_BODY = 64 * 1024
# A page says that it is there every few seconds; browsers slow those down that are not in sight.
BEAT_SECONDS = 5
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src-elem 'self'; style-src-attr 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Studio:
    """What a running studio knows: its answers, its tasks, and when a page was heard of last."""

    def __init__(self, source: Source, *, framed: bool = False):
        """Takes what it is about.

        Args:
            source: the target and its first state.
            framed: whether other pages may show it in a frame, as a notebook does.
        """
        self.source, self.answers = source, Answers(source)
        self.token = secrets.token_urlsafe(24)
        self.heard = time.monotonic()
        self.port = 0
        self.framed = framed
        self.tasks: dict[int, Task] = {}
        # Arithmetic never waits for an estimate.
        self._exact, self._offer, self._estimate = Lane("exact"), Lane("offer"), Lane("estimate")

    @property
    def address(self) -> str:
        """The address of the page; the browser never sends what follows the #."""
        return f"http://127.0.0.1:{self.port}/?{self.source.start.query}#{self.token}"

    def app(self) -> Starlette:
        """Returns the application."""
        asks: dict[str, Ask] = {
            "start": self._start,
            "exact": self._exactly,
            "offered": self._offered,
            "estimate": self._estimated,
            "compile": self._compile,
            "search": self._search,
            "task": self._task,
            "cancel": self._cancel,
            "python": self._python,
            "lockfile": self._lockfile,
            "beat": self._beat,
        }
        routes = [
            Route(f"/{name}", _file(text, kind), methods=["GET"])
            for name, (text, kind) in page_files().items()
        ]
        routes += [
            Route(f"/api/{n}", self._asked(ask), methods=["POST"]) for n, ask in asks.items()
        ]
        return Starlette(routes=routes)

    def guarded(self, app: Any) -> Any:
        """Returns the application behind what every request must pass."""

        async def guard(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                if scope["type"] == "lifespan":
                    await app(scope, receive, send)
                return
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
            }
            refusal = self._refusal(scope, headers)
            if refusal:
                await PlainTextResponse(f"{refusal}\n", 403, self._headers())(scope, receive, send)
                return

            async def sent(message: Any) -> None:
                if message["type"] == "http.response.start":
                    more = [(n.encode(), v.encode()) for n, v in self._headers().items()]
                    message = {**message, "headers": [*message.get("headers", []), *more]}
                await send(message)

            await app(scope, receive, sent)

        return guard

    def stop_tasks(self) -> None:
        """Ends compilers and searches."""
        for task in self.tasks.values():
            if not task.ended:
                task.cancel()

    def _refusal(self, scope: Any, headers: dict[str, str]) -> str:
        """Returns why a request is refused, or an empty text."""
        here = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        # A page of another site may know our port, and a name of its own for this address.
        if headers.get("host") not in here:
            return "refused: this is a studio of shardwise, under the address that it printed"
        if headers.get("origin") not in (None, *(f"http://{host}" for host in here)):
            return "refused: the request comes from another page"
        if (
            headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
            and scope["path"] != "/"
        ):
            return "refused: the request comes from another site"
        if scope["path"].startswith("/api/"):
            given = headers.get(TOKEN_HEADER, "")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return "refused: the token is missing or wrong: open the address that was printed"
        return ""

    def _headers(self) -> dict[str, str]:
        ancestors = "*" if self.framed else "'none'"
        found = {
            "content-security-policy": f"{_POLICY}; frame-ancestors {ancestors}",
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cross-origin-resource-policy": "same-origin",
        }
        return found if self.framed else {**found, "cross-origin-opener-policy": "same-origin"}

    def _asked(self, ask: Ask) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self.heard = time.monotonic()
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_BODY:
                    return JSONResponse({"error": "the question is too long"}, 413)
            given: dict[str, Any] = {}
            try:
                given = json.loads(body or b"{}")
                if not isinstance(given, dict):
                    raise ValueError("a question is an object")
                found = await ask(given)
            except Superseded:
                return JSONResponse({"superseded": True, "number": given.get("number")})
            except (ValueError, RecursionError) as error:
                return JSONResponse({"error": sentence(error)}, 400)
            if "number" in given:
                found = {**found, "number": given["number"]}
            return JSONResponse(found)

        return answer

    async def _start(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": metadata.version("shardwise"),
            "state": self.source.start.to_dict(),
            "targets": list(self.source.targets),
            "command": self.source.command,
            "prices": dict(self.source.prices),
            "beat": BEAT_SECONDS,
        }

    async def _exactly(self, given: dict[str, Any]) -> dict[str, Any]:
        state = _state(given)

        edits = given.get("edits", [])
        if not isinstance(edits, list) or len(edits) > 256:
            raise ValueError("edits must be a short list")

        def work() -> dict[str, Any]:
            try:
                moved = self.answers.edited(state, edits)
            except Exception as error:  # what the user typed: an answer, not a broken question
                return {"refused": sentence(error)}
            return self.answers.exact(moved)

        return await asyncio.wrap_future(self._exact.ask(work))

    async def _offered(self, given: dict[str, Any]) -> dict[str, Any]:
        state = _state(given)
        return await asyncio.wrap_future(self._offer.ask(lambda: self.answers.offered(state)))

    async def _estimated(self, given: dict[str, Any]) -> dict[str, Any]:
        state = _state(given)
        return await asyncio.wrap_future(self._estimate.ask(lambda: self.answers.estimated(state)))

    async def _compile(self, given: dict[str, Any]) -> dict[str, Any]:
        state = _state(given)
        return self._begin("compile", state, lambda task: self.answers.compiled(state, task))

    async def _search(self, given: dict[str, Any]) -> dict[str, Any]:
        state = _state(given)
        keep = [
            name for name in ("strategy", "remat", "accumulate") if name in given.get("keep", ())
        ]
        proofs = given.get("compile", 0)
        if type(proofs) is not int or not 0 <= proofs <= 10:
            raise ValueError("compile is how many of the best to compile: 0 to 10")
        parts = {"compile": proofs, "keep": keep}
        return self._begin("search", state, lambda task: self.answers.searched(state, parts, task))

    def _begin(
        self, kind: str, state: State, work: Callable[[Task], dict[str, Any]]
    ) -> dict[str, Any]:
        """Starts a task; one of its kind that runs is cancelled, since the newest request counts."""
        for task in self.tasks.values():
            if task.kind == kind and not task.ended:
                task.cancel()
        begun = Task(kind, state.query, work)
        self.tasks[begun.number] = begun
        for number in [n for n, task in self.tasks.items() if task.ended][:-8]:
            del self.tasks[number]
        return begun.to_dict()

    async def _task(self, given: dict[str, Any]) -> dict[str, Any]:
        lines, points = _count(given, "lines"), _count(given, "points")
        return self._known(given).to_dict(lines, points)

    async def _cancel(self, given: dict[str, Any]) -> dict[str, Any]:
        task = self._known(given)
        task.cancel()
        return task.to_dict()

    def _known(self, given: dict[str, Any]) -> Task:
        found = self.tasks.get(_count(given, "task"))
        if found is None:
            raise ValueError("there is no such task")
        return found

    async def _python(self, given: dict[str, Any]) -> dict[str, Any]:
        return await self._in_thread(self.answers.python, _state(given))

    async def _lockfile(self, given: dict[str, Any]) -> dict[str, Any]:
        return await self._in_thread(self.answers.lockfile, _state(given))

    async def _in_thread(self, work: Callable[[State], str], state: State) -> dict[str, Any]:
        try:
            return {"text": await asyncio.to_thread(work, state)}
        except Exception as error:
            raise ValueError(sentence(error)) from error

    async def _beat(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"idle": False}


def _state(given: dict[str, Any]) -> State:
    query = given.get("state")
    if not isinstance(query, str):
        raise ValueError("the question has no state")
    return parse_query(query)


def _count(given: dict[str, Any], name: str) -> int:
    value = given.get(name, 0)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a number")
    return value


def _file(text: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def found(request: Request) -> Response:
        return Response(text, media_type=kind)

    return found


class Running:
    """A studio's server in a thread of its own."""

    def __init__(self, studio: Studio, *, port: int = 0):
        """Binds a port of the loopback interface, which nothing outside this machine reaches."""
        self.studio = studio
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            listening.close()
            raise ValueError(
                f"port {port} of 127.0.0.1 cannot be used: {error.strerror}"
            ) from error
        self._socket = listening
        studio.port = listening.getsockname()[1]
        config = uvicorn.Config(
            studio.guarded(studio.app()), log_level="warning", access_log=False, lifespan="off",
            server_header=False, date_header=False, ws="none", timeout_graceful_shutdown=1,
            limit_concurrency=64,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        # Signals stay those of the process; a server in a thread does not touch them.
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="shardwise-studio", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    @property
    def idle_seconds(self) -> float:
        """How long no page was heard of, while nothing is at work."""
        if any(not task.ended for task in self.studio.tasks.values()):
            self.studio.heard = time.monotonic()
        return time.monotonic() - self.studio.heard

    @property
    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the compilers, and the server."""
        self.studio.stop_tasks()
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()

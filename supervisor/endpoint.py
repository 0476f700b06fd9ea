"""The operator's view over HTTP: a few pages to read, and nothing that could be changed.

It lives in the supervisor's process, so it goes on answering while the executor is in the middle of a rebuild, and
while the engine holds the driver's interpreter. It speaks as little HTTP as it needs: GET and HEAD, no body, one
request a connection, everything bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from resilient_executor.supervisor.page import PAGE
from resilient_executor.supervisor.status import prometheus

#: For one request, from its first byte to the last of the answer, in seconds; and its size in bytes.
_REQUEST_S: Final = 10.0
_MAX_REQUEST: Final = 8192
#: Requests that are answered at once; more are turned away.
_MAX_CONNECTIONS: Final = 64
_JSON, _TEXT, _HTML = "application/json", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
#: The page may run its own script and ask this server, and nothing else.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

Answer = tuple[int, str, str]


class Endpoint:
    """Serves ``/livez``, ``/readyz``, ``/metrics``, ``/status``, ``/stacks`` and ``/``.

    Args:
        status: returns what ``/status`` shows.
        stacks: returns the lines of ``/stacks``.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], stacks: Callable[[], Awaitable[list[str]]]) -> None:
        self._status = status
        self._stacks = stacks
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is another one for 0.

        Raises:
            OSError: that address cannot be listened at.
        """
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            await asyncio.wait_for(self._exchange(reader, writer), _REQUEST_S)
        except (OSError, asyncio.TimeoutError):
            pass  # whoever asked is gone, or asks too slowly
        finally:
            self._open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            method, target = "GET", ""
        if self._open > _MAX_CONNECTIONS:
            answer: Answer = (503, _TEXT, "too many requests at once\n")
        elif method not in ("GET", "HEAD"):
            answer = (405, _TEXT, "this endpoint can only be read\n")
        else:
            answer = await self._answer(target.partition("?")[0])
        code, kind, text = answer
        body = text.encode()
        lines = [
            f"HTTP/1.1 {code} {_REASONS[code]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            f"Content-Security-Policy: {_POLICY}",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        if code == 405:
            lines.append("Allow: GET, HEAD")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body))
        await writer.drain()

    async def _answer(self, path: str) -> Answer:
        if path == "/":
            return 200, _HTML, PAGE
        if path == "/stacks":
            return 200, _TEXT, "\n".join(await self._stacks()) + "\n"
        if path not in ("/livez", "/readyz", "/metrics", "/status"):
            return (404 if path else 400), _TEXT, "there are /, /livez, /readyz, /metrics, /status and /stacks\n"
        data = self._status()
        state = data["state"]
        if path == "/livez":  # a rebuild is life; only what nothing but a restart can help is not
            return (503 if state in ("FAILED", "STOPPED") else 200), _TEXT, f"{state}\n"
        if path == "/readyz":
            return (200 if state == "HEALTHY" else 503), _TEXT, f"{state}\n"
        if path == "/metrics":
            return 200, _TEXT, prometheus(data)
        return 200, _JSON, json.dumps(data)

"""JSON and server-sent events on their way out, to clients that may leave or not read on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foretell.serve.errors import ApiError

T = TypeVar("T")
log = logging.getLogger("foretell.serve")
DONE = "data: [DONE]\n\n"


class Gone(Exception):
    """Raised where the client has left, or reads no more."""


def encode_json(document: Any) -> bytes:
    """Encodes a document as JSON, which has no infinite numbers: such log-probabilities are the
    lowest.
    """
    try:
        # In ASCII: some clients take other letters of Unicode for ends of lines (U+2028, say).
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    except ValueError:
        return json.dumps(finite_numbers(document), allow_nan=False).encode("ascii")


def finite_numbers(value: Any) -> Any:
    """Replaces the numbers that JSON does not have by finite ones."""
    if isinstance(value, float):
        return value if abs(value) < 1e300 else -9999.0
    if isinstance(value, dict):
        return {key: finite_numbers(inner_value) for key, inner_value in value.items()}
    if isinstance(value, list | tuple):
        return [finite_numbers(inner_value) for inner_value in value]
    return value


def json_response(document: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(encode_json(document), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.json_body(), error.status, error.headers)


def unexpected_error(error: Exception) -> ApiError:
    """Logs an error that nobody expected. What a client learns of it is a name to ask for."""
    error_id = secrets.token_hex(8)
    log.error("a request failed, id %s", error_id, exc_info=error)
    return ApiError(
        f"the server failed; its log says why under {error_id}",
        code=error_id,
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
    )


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Returns what `work` returns; it is cancelled, and Gone raised, once the client leaves."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_leave(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for pending_task in (task, watcher):
            pending_task.cancel()
        for pending_task in (task, watcher):
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pending_task


async def _wait_for_leave(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a generator of documents.

    The status is sent with the first of them, so that what is refused before it has a status of
    its own; later errors are events. `patience`: seconds that a reader may leave a chunk unread.
    """

    def __init__(self, documents: AsyncGenerator[Any, None], patience: float):
        self.documents = documents
        self.patience = patience
        self.started = False
        self.background = None
        self.status_code = 200
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # else a proxy may collect them
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            await while_there(request, self._send_documents(scope, receive, send))
        except Gone:
            pass
        finally:
            await self.documents.aclose()

    async def _send_documents(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async for document in self.documents:
                await self._send_body(send, b"data: " + encode_json(document) + b"\n\n")
        except Gone:
            raise
        except Exception as error:
            refusal = error if isinstance(error, ApiError) else unexpected_error(error)
            if not self.started:
                await error_response(refusal)(scope, receive, send)
                return
            await self._send_body(send, b"data: " + encode_json(refusal.json_body()) + b"\n\n")
        await self._send_body(send, DONE.encode(), has_more=False)

    async def _send_body(self, send: Any, body: bytes, has_more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.patience):
                if not self.started:
                    self.started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": body, "more_body": has_more})
        except TimeoutError:
            raise Gone from None

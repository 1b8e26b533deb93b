"""Middleware between network and routes: sizes, patience, names, headers, last errors.

Pure ASGI, so that a body is measured while it is read and a response is passed on as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from foretell.serve.errors import ApiError
from foretell.serve.keys import Key
from foretell.serve.limits import retry_error
from foretell.serve.settings import Settings
from foretell.serve.wire import Gone, error_response, unexpected_error

log = logging.getLogger("foretell.serve")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
PROTECTED = ("/v1/", "/foretell/", "/metrics")  # what needs a key
POLLED = ("/foretell/status", "/health", "/metrics")  # asked every few seconds, by programs
LONGEST = 200  # characters of a path in the log, as it came
LEFT = 499  # nginx's status for a client that did not wait, for the log alone


class Guard:
    """Wraps the application; calls `report_status(status)` after each response."""

    def __init__(self, app: Any, settings: Settings, report_status: Callable[[int], None]):
        self.app = app
        self.settings = settings
        self.told = report_status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        start_time = time.perf_counter()
        status = LEFT
        has_started = False

        async def passed_on(message: Any) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_host(scope)
            api_key = self._find_key(scope)
            state = scope.setdefault("state", {})
            state["key"], state["arrived"] = api_key, asyncio.get_running_loop().time()
            peer = scope.get("client") or ("",)
            state["client"] = str(peer[0]) if api_key is None else api_key.name
            await self.app(scope, self._limit_body(scope, receive), passed_on)
        except Gone:
            pass
        except ApiError as error:
            if not has_started:
                await error_response(error)(scope, receive, passed_on)
        except asyncio.CancelledError:  # the server ends, and the time for it is over
            if not has_started:
                ending_error = retry_error(
                    "the server is ending", 1, HTTPStatus.SERVICE_UNAVAILABLE, "draining"
                )
                await error_response(ending_error)(scope, receive, passed_on)
        except Exception as error:
            server_error = unexpected_error(error)
            if not has_started:
                await error_response(server_error)(scope, receive, passed_on)
        finally:
            self.told(status)
            spent_ms = 1000 * (time.perf_counter() - start_time)
            logged_path = scope.get("raw_path", b"")[:LONGEST].decode("ascii", "replace")
            is_polling = scope["path"] in POLLED and status == HTTPStatus.OK
            log_level = logging.DEBUG if is_polling else logging.INFO
            log.log(log_level, "%s %s %d %.0f ms", scope["method"], logged_path, status, spent_ms)

    def _check_host(self, scope: Any) -> None:
        """Raises ApiError for an unknown host: a page of another site must not reach a local server
        by a name that it made up.
        """
        if not self.settings.hosts:
            return
        host = Headers(scope=scope).get("host", "")
        host_name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if host_name.lower().strip("[]") not in self.settings.hosts:
            raise ApiError(
                "this server does not go by that name: allow it with --allow-host",
                status=HTTPStatus.MISDIRECTED_REQUEST,
            )

    def _find_key(self, scope: Any) -> Key | None:
        """Finds the key that a request comes with; None: there are no keys, or all may see this.
        Raises ApiError.
        """
        keys = self.settings.keys
        is_protected = scope["path"].startswith(PROTECTED)
        if not keys or not is_protected:
            return None
        auth_scheme, _, given_key = Headers(scope=scope).get("authorization", "").partition(" ")
        api_key = keys.find_key(given_key.strip())
        if auth_scheme.lower() != "bearer" or api_key is None:
            key_fault = "no API key was given" if not given_key else "the API key is not known here"
            raise ApiError(
                f"{key_fault}: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                status=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return api_key

    def _limit_body(self, scope: Any, receive: Any) -> Any:
        """Returns a `receive` that refuses a body once it is too long, and one that does not come:
        its client's time counts in all, not that in which we do not read.
        """
        body_limit = self.settings.body
        headers = Headers(scope=scope)
        declared_length = headers.get("content-length", "")
        if (
            declared_length.isascii()
            and declared_length.isdecimal()
            and int(declared_length[:20]) > body_limit
        ):
            raise self._too_long()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(
                "the body is compressed: send it as it is, without Content-Encoding",
                status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            )
        body_size = 0
        is_complete = False
        remaining_seconds = self.settings.patience
        event_loop = asyncio.get_running_loop()

        async def measured() -> Any:
            nonlocal body_size, is_complete, remaining_seconds
            if is_complete:  # what follows is that the client leaves
                return await receive()
            wait_start = event_loop.time()
            try:
                async with asyncio.timeout(remaining_seconds):
                    message = await receive()
            except TimeoutError:
                raise ApiError("the body did not come", status=HTTPStatus.REQUEST_TIMEOUT) from None
            remaining_seconds -= event_loop.time() - wait_start
            body_size += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if body_size > body_limit:
                raise self._too_long()
            return message

        return measured

    def _too_long(self) -> ApiError:
        return ApiError(
            f"the body has more than {self.settings.body} bytes",
            code="request_too_large",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            headers={"Connection": "close"},
        )

"""What stands between the network and the routes: sizes, patience, names, headers, last errors.

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
from foretell.serve.limits import refused
from foretell.serve.settings import Settings
from foretell.serve.wire import Gone, error_response, unexpected

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
    """Wraps the application; `told(status)` is called after each response."""

    def __init__(self, app: Any, settings: Settings, told: Callable[[int], None]):
        self.app = app
        self.settings = settings
        self.told = told

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = LEFT
        started = False

        async def passed_on(message: Any) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_host(scope)
            key = self._key(scope)
            state = scope.setdefault("state", {})
            state["key"], state["arrived"] = key, asyncio.get_running_loop().time()
            peer = scope.get("client") or ("",)
            state["client"] = str(peer[0]) if key is None else key.name
            await self.app(scope, self._measured(scope, receive), passed_on)
        except Gone:
            pass
        except ApiError as error:
            if not started:
                await error_response(error)(scope, receive, passed_on)
        except asyncio.CancelledError:  # the server ends, and the time for it is over
            if not started:
                late = refused(
                    "the server is ending", 1, HTTPStatus.SERVICE_UNAVAILABLE, "draining"
                )
                await error_response(late)(scope, receive, passed_on)
        except Exception as error:
            answer = unexpected(error)
            if not started:
                await error_response(answer)(scope, receive, passed_on)
        finally:
            self.told(status)
            spent = 1000 * (time.perf_counter() - began)
            path = scope.get("raw_path", b"")[:LONGEST].decode("ascii", "replace")
            usual = scope["path"] in POLLED and status == HTTPStatus.OK
            level = logging.DEBUG if usual else logging.INFO
            log.log(level, "%s %s %d %.0f ms", scope["method"], path, status, spent)

    def _check_host(self, scope: Any) -> None:
        """A page of another site must not reach a local server by a name that it made up."""
        if not self.settings.hosts:
            return
        host = Headers(scope=scope).get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.lower().strip("[]") not in self.settings.hosts:
            raise ApiError(
                "this server does not go by that name: allow it with --allow-host",
                status=HTTPStatus.MISDIRECTED_REQUEST,
            )

    def _key(self, scope: Any) -> Key | None:
        """Whose request it is; None: there are no keys, or all may see this. Raises ApiError."""
        keys = self.settings.keys
        protected = scope["path"].startswith(PROTECTED)
        if not keys or not protected:
            return None
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = keys.find(given.strip())
        if kind.lower() != "bearer" or key is None:
            missing = "no API key was given" if not given else "the API key is not known here"
            raise ApiError(
                f"{missing}: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                status=HTTPStatus.UNAUTHORIZED,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key

    def _measured(self, scope: Any, receive: Any) -> Any:
        """`receive` that refuses a body once it is too long, and one that does not come: its
        client's time counts in all, not that in which we do not read.
        """
        limit = self.settings.body
        headers = Headers(scope=scope)
        told = headers.get("content-length", "")
        if told.isascii() and told.isdecimal() and int(told[:20]) > limit:
            raise self._too_long()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(
                "the body is compressed: send it as it is, without Content-Encoding",
                status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            )
        size = 0
        whole = False
        left = self.settings.patience
        loop = asyncio.get_running_loop()

        async def measured() -> Any:
            nonlocal size, whole, left
            if whole:  # what follows is that the client leaves
                return await receive()
            began = loop.time()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                raise ApiError("the body did not come", status=HTTPStatus.REQUEST_TIMEOUT) from None
            left -= loop.time() - began
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > limit:
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

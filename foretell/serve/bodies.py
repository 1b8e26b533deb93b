"""Bodies of requests: read within bounds of their sizes, then made requests.

What is counted while a body is read (values, depth) bounds what parsing and checking it takes: a
body of eight megabytes may hold a long text, and not millions of lists.
"""

from __future__ import annotations

from http import HTTPStatus

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from foretell.serve.errors import ApiError
from foretell.serve.turns import Turns
from foretell.serve.wire import Gone

LARGE = 65536  # bytes from which on a body waits for a turn
DEEPEST = 256  # lists and objects within each other
VALUES = 2**18  # of a body, unless the model's context holds more


class Extent:
    """Counts what a JSON text in UTF-8 holds, part by part: values, and how deep they lie. Of what
    is no JSON it counts what comes before the fault.
    """

    def __init__(self) -> None:
        self.values = 1
        self.deepest = 0
        self._depth = 0
        self._quoted = False  # the next byte stands in a text
        self._escaped = False  # and means itself

    def add(self, part: bytes) -> None:
        part = part[self._escaped :]
        self._escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        plain = part[: len(part) - self._escaped].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = plain.split(b'"')
        outside = np.frombuffer(b"".join(pieces[self._quoted :: 2]), np.uint8)
        self._quoted ^= len(pieces) % 2 == 0
        opened = (outside == ord("[")) | (outside == ord("{"))
        closed = (outside == ord("]")) | (outside == ord("}"))
        self.values += int(opened.sum() + (outside == ord(",")).sum())
        if opened.any() or closed.any():
            depths = self._depth + np.cumsum(opened.astype(np.int32) - closed.astype(np.int32))
            self.deepest = max(self.deepest, int(depths.max()))
            self._depth = int(depths[-1])

    def check(self, most: int) -> None:
        """Raises ApiError for more values than `most`, or deeper ones than can be read."""
        if self.values > most:
            raise ApiError(
                f"the body has more than {most} values; send several requests, or texts in place "
                "of token ids",
                code="request_too_large",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                headers={"Connection": "close"},
            )
        if self.deepest > DEEPEST:
            raise ApiError(
                f"the body has more than {DEEPEST} lists and objects within each other; make it "
                "flatter",
                code="invalid_json",
                headers={"Connection": "close"},
            )


async def read(http: HttpRequest, turns: Turns, most: int) -> bytes:
    """The body. Raises ApiError where it is too much, and Gone where the client leaves.

    While a large one comes, and until it is whole, it has one of the `turns`.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise no_object()
    extent = Extent()
    parts: list[bytes] = []
    size = 0
    client = http.state.client
    taken = False
    try:
        async for part in http.stream():
            size += len(part)
            extent.add(part)
            extent.check(most)
            parts.append(part)
            if size > LARGE and not taken:
                await turns.take(client)
                taken = True
    except ClientDisconnect:
        raise Gone from None
    finally:
        if taken:
            turns.give(client)
    return b"".join(parts)


def no_object() -> ApiError:
    return ApiError(
        "the body must be a JSON object, sent as Content-Type: application/json",
        None,
        "invalid_json",
    )

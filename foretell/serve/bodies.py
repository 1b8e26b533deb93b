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
    """Counts what a JSON text in UTF-8 holds, part by part: values, and how deep they lie. In a
    text that is no JSON it counts what comes before the fault.
    """

    def __init__(self) -> None:
        self.values = 1
        self.deepest = 0
        self._depth = 0
        self._quoted = False  # the next byte stands in a text
        self._escaped = False  # and means itself

    def add_part(self, body_part: bytes) -> None:
        body_part = body_part[self._escaped :]
        self._escaped = (len(body_part) - len(body_part.rstrip(b"\\"))) % 2 == 1
        unescaped_part = (
            body_part[: len(body_part) - self._escaped].replace(b"\\\\", b"").replace(b'\\"', b"")
        )
        quoted_pieces = unescaped_part.split(b'"')
        outside_bytes = np.frombuffer(b"".join(quoted_pieces[self._quoted :: 2]), np.uint8)
        self._quoted ^= len(quoted_pieces) % 2 == 0
        opened_mask = (outside_bytes == ord("[")) | (outside_bytes == ord("{"))
        closed_mask = (outside_bytes == ord("]")) | (outside_bytes == ord("}"))
        self.values += int(opened_mask.sum() + (outside_bytes == ord(",")).sum())
        if opened_mask.any() or closed_mask.any():
            depths = self._depth + np.cumsum(
                opened_mask.astype(np.int32) - closed_mask.astype(np.int32)
            )
            self.deepest = max(self.deepest, int(depths.max()))
            self._depth = int(depths[-1])

    def check_limits(self, max_values: int) -> None:
        """Raises ApiError for more values than `max_values`, or deeper ones than can be read."""
        if self.values > max_values:
            raise ApiError(
                f"the body has more than {max_values} values; send several requests, or texts in "
                "place of token ids",
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


async def read_body(http: HttpRequest, turns: Turns, max_values: int) -> bytes:
    """Reads the body of a request. Raises ApiError where it is too much, and Gone where the client
    leaves.

    While a large body comes, and until it is complete, it has one of the `turns`.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise no_object()
    extent = Extent()
    body_parts: list[bytes] = []
    body_size = 0
    client = http.state.client
    has_turn = False
    try:
        async for part in http.stream():
            body_size += len(part)
            extent.add_part(part)
            extent.check_limits(max_values)
            body_parts.append(part)
            if body_size > LARGE and not has_turn:
                await turns.take_turn(client)
                has_turn = True
    except ClientDisconnect:
        raise Gone from None
    finally:
        if has_turn:
            turns.end_turn(client)
    return b"".join(body_parts)


def no_object() -> ApiError:
    return ApiError(
        "the body must be a JSON object, sent as Content-Type: application/json",
        None,
        "invalid_json",
    )

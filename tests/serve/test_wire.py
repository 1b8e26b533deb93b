"""JSON on its way out, and streams whose readers leave or do not read on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from foretell.serve.errors import ApiError
from foretell.serve.wire import EventStream, Gone, encode_json, while_there

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Documents:
    """A generator of so many documents that notes how it ended."""

    def __init__(self, count: int, error: Exception | None = None):
        self.count = count
        self.error = error
        self.given = 0
        self.closed = False

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            for number in range(self.count):
                self.given += 1
                yield {"number": number}
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def forever() -> Any:
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


def sent(documents: Documents, receive: Any = forever, stuck_at: int = 99) -> list[Any]:
    """What a stream sends to a client that reads so many messages."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        if len(messages) == stuck_at:
            await forever()
        messages.append(message)

    asyncio.run(EventStream(documents(), patience=0.05)(SCOPE, receive, send))
    assert documents.closed or not documents.given
    return messages


def test_a_stream_ends_as_one() -> None:
    messages = sent(Documents(2))
    assert messages[0]["status"] == 200
    bodies = [message["body"] for message in messages[1:]]
    assert bodies == [b'data: {"number":0}\n\n', b'data: {"number":1}\n\n', b"data: [DONE]\n\n"]
    assert messages[-1]["more_body"] is False


def test_who_does_not_read_on_is_not_waited_for() -> None:
    documents = Documents(1000)
    assert len(sent(documents, stuck_at=3)) == 3
    assert documents.given == 3


def test_who_leaves_is_not_computed_for() -> None:
    documents = Documents(1000)
    assert len(sent(documents, leaves)) < 5
    assert documents.given < 5


def test_what_is_refused_before_the_first_document_has_a_status() -> None:
    messages = sent(Documents(0, ApiError("no", status=429, headers={"Retry-After": "3"})))
    assert messages[0]["status"] == 429
    assert (b"retry-after", b"3") in messages[0]["headers"]


@pytest.mark.parametrize("error", [ApiError("no", code="timeout"), ValueError("secret")])
def test_a_later_error_is_an_event(error: Exception) -> None:
    messages = sent(Documents(1, error))
    told = json.loads(messages[2]["body"].removeprefix(b"data: "))["error"]
    assert messages[0]["status"] == 200 and messages[3]["body"] == b"data: [DONE]\n\n"
    assert told["message"] and "secret" not in told["message"]


def test_work_is_cancelled_when_its_client_leaves() -> None:
    from starlette.requests import Request

    ended = []

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.append(True)

    async def run() -> None:
        with pytest.raises(Gone):
            await while_there(Request(SCOPE, leaves_later), work())

    async def leaves_later() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    asyncio.run(run())
    assert ended == [True]


def test_numbers_that_json_has_not() -> None:
    document = json.loads(encode_json({"a": [-math.inf, 1.5, "\ud800", "é"]}))
    assert document == {"a": [-9999.0, 1.5, "\ud800", "é"]}


def test_streams_have_no_letters_that_clients_take_for_ends_of_lines() -> None:
    assert encode_json({"a": "é\u2028\x85"}) == b'{"a":"\\u00e9\\u2028\\u0085"}'

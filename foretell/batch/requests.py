"""A file of requests in OpenAI's batch format: one JSON object a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line that cannot be used is refused with its number, and the others are done.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from foretell.batch.prefixes import shared_length
from foretell.errors import BadFile, ForetellError
from foretell.serve.errors import ApiError, of_ours
from foretell.serve.responses import Answer, answer_for
from foretell.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Fields,
    Request,
    document,
    of_pydantic,
    parse,
)
from foretell.serve.translate import Call, translate

if TYPE_CHECKING:
    from foretell.serve.served import Served

URLS: Mapping[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
SHOWN = 5  # duplicates that an error names


class Line(Fields):
    """What a line holds."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A request as it stands in the file. `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Refused:
    """A line that cannot be used, and why."""

    line: int
    custom_id: str | None  # where there is one
    error: ApiError


@dataclass
class Requests:
    """What a file holds. `digest` is that of its bytes."""

    items: list[Item] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    digest: str = ""

    def __len__(self) -> int:
        return len(self.items) + len(self.refused)


def read(path: Path) -> Requests:
    """Reads a file. Raises BadFile where it cannot be read, holds no request, or has a custom_id
    twice: results could not be told apart.
    """
    found = Requests()
    digest = hashlib.sha256()
    lines: dict[str, list[int]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.strip():
                    continue
                one = _item(number, line)
                if isinstance(one, Item):
                    found.items.append(one)
                else:
                    found.refused.append(one)
                if one.custom_id is not None:
                    lines.setdefault(one.custom_id, []).append(number)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}; name a file of requests") from error
    found.digest = digest.hexdigest()
    if not len(found):
        raise BadFile(f"{path}: it holds no request; write one JSON object a line")
    doubled = {name: places for name, places in lines.items() if len(places) > 1}
    if doubled:
        raise BadFile(f"{path}: {_named(doubled)}; every request needs a custom_id of its own")
    return found


def _named(doubled: Mapping[str, Sequence[int]]) -> str:
    """Which lines have the same custom_id, of the first few that do."""
    parts = []
    for name, places in list(doubled.items())[:SHOWN]:
        parts.append(f"lines {' and '.join(map(str, places[:SHOWN]))} have the custom_id {name!r}")
    if len(doubled) > SHOWN:
        parts.append(f"and so on, {len(doubled)} in all")
    return ", ".join(parts)


def _item(number: int, line: bytes) -> Item | Refused:
    custom_id = None
    try:
        found = _parsed(line, first=number == 1)
        given = found.get("custom_id")
        custom_id = given if isinstance(given, str) and given else None
        if not isinstance(found.get("body"), dict):
            raise ApiError("body: it must be a JSON object", "body", "invalid_value")
        checked = Line.model_validate(found)
    except ValidationError as error:
        return Refused(number, custom_id, of_pydantic(error))
    except ApiError as error:
        return Refused(number, custom_id, error)
    return Item(number, checked.custom_id, checked.url, checked.body)


def _parsed(line: bytes, first: bool) -> dict[str, Any]:
    """The JSON object of a line; the first one may begin with a byte order mark."""
    text = line.rstrip().removeprefix(codecs.BOM_UTF8) if first else line.rstrip()
    value = document(text, "it", "invalid_line")
    if not isinstance(value, dict):
        raise ApiError("it is no JSON object", code="invalid_line")
    return value


# --- what the engine is asked


@dataclass
class Prepared:
    """A request that can run: its call of the LM, and who writes its answer."""

    item: Item
    call: Call
    answer: Answer

    @property
    def priority(self) -> int:
        return int(self.call.arguments.get("priority", 0))

    @property
    def longest(self) -> int:
        """Tokens that one of its answers may have."""
        return max(self.call.arguments["max_new_tokens"])

    def beginning(self) -> Sequence[int]:
        """Its prompt, or of several prompts the tokens that all of them begin with, and one more:
        what groups are made by.
        """
        first, *others = self.call.prompts
        length = min((shared_length(first, other) for other in others), default=len(first))
        return first[: length + 1]


def prepare(item: Item, served: Served, method: str = "auto") -> Prepared:
    """The call that an item asks for. Raises ApiError, which names the field at fault.

    `method`: for a request that names none.
    """
    request = parse(URLS[item.url], item.body)
    if request.stream:
        raise ApiError("stream: a batch has none; leave it out", "stream", "unsupported_parameter")
    known = {served.name, Path(served.name).name}
    if request.model is not None and request.model not in known:
        raise ApiError(
            f"model: {request.model!r} is not what runs here; write {served.name!r}, "
            "or leave the field out",
            "model",
            "model_not_found",
            404,
        )
    try:
        call = translate(request, served.lm, seed=seed_of(item.custom_id))
        if request.method is None and request.speculation != "off":
            call.method = method
        return Prepared(item, call, answer_for(served, request, call))
    except ForetellError as error:
        raise in_full(error) from None


def in_full(error: ForetellError) -> ApiError:
    """An error of ours in OpenAI's shape; whoever runs a batch may read all that it says."""
    known = of_ours(error)
    return ApiError(str(error), known.param, known.code, known.status)


def seed_of(custom_id: str) -> int:
    """The seed of a request that gives none: another for each, and the same whenever it runs."""
    digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:4], "big") >> 1

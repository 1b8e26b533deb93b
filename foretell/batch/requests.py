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
    of_pydantic,
    parse_json,
    parse_request,
)
from foretell.serve.translate import Call, translate_request

if TYPE_CHECKING:
    from foretell.serve.served import Served

URLS: Mapping[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
SHOWN = 5  # duplicates that an error names


class Line(Fields):
    """Fields of a line in a file of requests."""

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
    """Requests of a file, and its lines that hold none. `digest` is that of its bytes."""

    items: list[Item] = field(default_factory=list)
    refused_lines: list[Refused] = field(default_factory=list)
    digest: str = ""

    def __len__(self) -> int:
        return len(self.items) + len(self.refused_lines)


def read_requests(path: Path) -> Requests:
    """Reads a file. Raises BadFile where it cannot be read, holds no request, or has a custom_id
    twice: results could not be told apart.
    """
    requests = Requests()
    digest = hashlib.sha256()
    lines_by_id: dict[str, list[int]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.strip():
                    continue
                read_line = _read_item(number, line)
                if isinstance(read_line, Item):
                    requests.items.append(read_line)
                else:
                    requests.refused_lines.append(read_line)
                if read_line.custom_id is not None:
                    lines_by_id.setdefault(read_line.custom_id, []).append(number)
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}; name a file of requests") from error
    requests.digest = digest.hexdigest()
    if not len(requests):
        raise BadFile(f"{path}: it holds no request; write one JSON object a line")
    duplicate_ids = {
        name: line_numbers for name, line_numbers in lines_by_id.items() if len(line_numbers) > 1
    }
    if duplicate_ids:
        raise BadFile(
            f"{path}: {_name_duplicates(duplicate_ids)}; every request needs a custom_id of its own"
        )
    return requests


def _name_duplicates(duplicate_ids: Mapping[str, Sequence[int]]) -> str:
    """Text that says which lines have the same custom_id, for the first few of them."""
    parts = []
    for name, line_numbers in list(duplicate_ids.items())[:SHOWN]:
        parts.append(
            f"lines {' and '.join(map(str, line_numbers[:SHOWN]))} have the custom_id {name!r}"
        )
    if len(duplicate_ids) > SHOWN:
        parts.append(f"and so on, {len(duplicate_ids)} in all")
    return ", ".join(parts)


def _read_item(number: int, line: bytes) -> Item | Refused:
    custom_id = None
    try:
        fields = _parse_object(line, is_first=number == 1)
        given_id = fields.get("custom_id")
        custom_id = given_id if isinstance(given_id, str) and given_id else None
        if not isinstance(fields.get("body"), dict):
            raise ApiError("body: it must be a JSON object", "body", "invalid_value")
        checked_line = Line.model_validate(fields)
    except ValidationError as error:
        return Refused(number, custom_id, of_pydantic(error))
    except ApiError as error:
        return Refused(number, custom_id, error)
    return Item(number, checked_line.custom_id, checked_line.url, checked_line.body)


def _parse_object(line: bytes, is_first: bool) -> dict[str, Any]:
    """The JSON object of a line; the first one may begin with a byte order mark."""
    text = line.rstrip().removeprefix(codecs.BOM_UTF8) if is_first else line.rstrip()
    value = parse_json(text, "it", "invalid_line")
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

    def shared_beginning(self) -> Sequence[int]:
        """Tokens by which groups are made: the prompt, or of several prompts the tokens that all of
        them begin with, and one more.
        """
        first_prompt, *other_prompts = self.call.prompts
        length = min(
            (shared_length(first_prompt, other_prompt) for other_prompt in other_prompts),
            default=len(first_prompt),
        )
        return first_prompt[: length + 1]


def prepare_item(item: Item, served: Served, method: str = "auto") -> Prepared:
    """The call that an item asks for. Raises ApiError, which names the field at fault.

    `method`: for a request that names none.
    """
    request = parse_request(URLS[item.url], item.body)
    if request.stream:
        raise ApiError("stream: a batch has none; leave it out", "stream", "unsupported_parameter")
    model_names = {served.name, Path(served.name).name}
    if request.model is not None and request.model not in model_names:
        raise ApiError(
            f"model: {request.model!r} is not what runs here; write {served.name!r}, "
            "or leave the field out",
            "model",
            "model_not_found",
            404,
        )
    try:
        call = translate_request(request, served.lm, seed=seed_of(item.custom_id))
        if request.method is None and request.speculation != "off":
            call.method = method
        return Prepared(item, call, answer_for(served, request, call))
    except ForetellError as error:
        raise full_error(error) from None


def full_error(error: ForetellError) -> ApiError:
    """An error of ours in OpenAI's shape; whoever runs a batch may read all that it says."""
    api_error = of_ours(error)
    return ApiError(str(error), api_error.param, api_error.code, api_error.status)


def seed_of(custom_id: str) -> int:
    """The seed of a request that gives none: another for each, and the same whenever it runs."""
    digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:4], "big") >> 1

"""Prompt files: JSON lines whose rows have `prompt`, `turns`, `messages`, `question` or `text`.

The first of these that a row has counts. `prompt` and `text` are texts that are continued, the
others turns of a chat; of `turns` (the questions of one conversation) the first is the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig
from foretell.ops.parsing import parse_json

FIELDS = ("prompt", "turns", "messages", "question", "text")
Prompt = str | list[dict[str, Any]]  # a text, or chat messages


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file, one a line; blank lines are skipped.

    Raises BadConfig, with the number of the line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        cause = error.strerror
        raise BadConfig(f"{path}: cannot be read ({cause}); give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        line_number = error.object[: error.start].count(b"\n") + 1
        raise BadConfig(
            f"{path}, line {line_number}: not UTF-8 text; convert the file to it"
        ) from None
    prompts = []
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_parse_prompt(line, f"{path}, line {line_number}"))
    if not prompts:
        raise BadConfig(
            f'{path}: has no prompts; give one JSON object a line, such as {{"prompt": "Hello"}}'
        )
    return prompts


def _parse_prompt(line: str, location: str) -> Prompt:
    try:
        row = parse_json(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        cause = f"{error.msg} at column {error.colno}"
        raise BadConfig(f"{location}: not JSON ({cause}); one object a line") from None
    except UnicodeEncodeError as error:  # JSON can write what UTF-8 has not
        half_character = error.object[error.start]
        raise BadConfig(
            f"{location}: half a character, {half_character!a}, stands alone; "
            "write its other half too"
        ) from None
    except RecursionError:
        raise BadConfig(
            f"{location}: lists or objects nested too deeply; one flat object a line"
        ) from None
    field_name = _first_field(row, location)
    field_value = row[field_name]
    if field_name == "messages":
        if _are_messages(field_value):
            return list(field_value)
        raise BadConfig(
            f"{location}: `messages` must be a list of objects with `role` and `content`"
        )
    if field_name == "turns":
        field_value = field_value[0] if isinstance(field_value, list) and field_value else None
    if not isinstance(field_value, str) or not field_value:
        cause = "a list of texts" if field_name == "turns" else "a text"
        raise BadConfig(f"{location}: `{field_name}` must be {cause}, and not empty")
    return (
        field_value
        if field_name in ("prompt", "text")
        else [{"role": "user", "content": field_value}]
    )


def _first_field(row: Any, location: str) -> str:
    for field_name in FIELDS:
        if isinstance(row, dict) and row.get(field_name) is not None:
            return field_name
    present_fields = "none of them"
    if isinstance(row, dict) and row:
        present_fields = f"only {', '.join(map(repr, row))}"
    raise BadConfig(
        f"{location}: needs one of the fields {', '.join(FIELDS)}, and has {present_fields}"
    )


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value)

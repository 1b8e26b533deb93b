"""Prompt files: JSON lines whose rows have `prompt`, `turns`, `messages`, `question` or `text`.

The first of these that a row has counts. `prompt` and `text` are texts that are continued, the
others turns of a chat; of `turns` (the questions of one conversation) the first is the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig
from foretell.ops.parsing import json_of

FIELDS = ("prompt", "turns", "messages", "question", "text")
Prompt = str | list[dict[str, Any]]  # a text, or chat messages


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file, one a line; blank lines are skipped.

    Raises BadConfig, with the number of the line.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        what = error.strerror
        raise BadConfig(f"{path}: cannot be read ({what}); give a file of JSON lines") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise BadConfig(f"{path}, line {number}: not UTF-8 text; convert the file to it") from None
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}"))
    if not prompts:
        raise BadConfig(
            f'{path}: has no prompts; give one JSON object a line, such as {{"prompt": "Hello"}}'
        )
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json_of(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        raise BadConfig(f"{where}: not JSON ({what}); one object a line") from None
    except UnicodeEncodeError as error:  # JSON can write what UTF-8 has not
        half = error.object[error.start]
        raise BadConfig(
            f"{where}: half a character, {half!a}, stands alone; write its other half too"
        ) from None
    except RecursionError:
        raise BadConfig(
            f"{where}: lists or objects nested too deeply; one flat object a line"
        ) from None
    name = _first_field(row, where)
    value = row[name]
    if name == "messages":
        if _are_messages(value):
            return list(value)
        raise BadConfig(f"{where}: `messages` must be a list of objects with `role` and `content`")
    if name == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, str) or not value:
        what = "a list of texts" if name == "turns" else "a text"
        raise BadConfig(f"{where}: `{name}` must be {what}, and not empty")
    return value if name in ("prompt", "text") else [{"role": "user", "content": value}]


def _first_field(row: Any, where: str) -> str:
    for name in FIELDS:
        if isinstance(row, dict) and row.get(name) is not None:
            return name
    has = "none of them"
    if isinstance(row, dict) and row:
        has = f"only {', '.join(map(repr, row))}"
    raise BadConfig(f"{where}: needs one of the fields {', '.join(FIELDS)}, and has {has}")


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value)

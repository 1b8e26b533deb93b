"""JSON and TOML of files, whatever is in them."""

from __future__ import annotations

import json
import tomllib
from typing import Any

DEEP = "it is nested too deeply"


def json_of(text: str | bytes) -> Any:
    """The value that a text of JSON stands for. Raises JSONDecodeError, also where it is nested so
    deeply that the parser gives up, and UnicodeDecodeError: ValueErrors both.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError(DEEP, "", 0) from error


def toml_of(text: str) -> dict[str, Any]:
    """The same of a text of TOML. Raises ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(DEEP) from error

"""JSON and TOML of files, whatever is in them."""

from __future__ import annotations

import json
import tomllib
from typing import Any

DEEP = "it is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """Parses a text of JSON. Raises JSONDecodeError, also where it is nested so deeply that the
    parser gives up, and UnicodeDecodeError: ValueErrors both.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError(DEEP, "", 0) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parses a text of TOML. Raises ValueError, also where it is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(DEEP) from error

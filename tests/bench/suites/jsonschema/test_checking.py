"""Answers against their schemas."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from foretell.bench.suites.jsonschema.checking import Checker
from foretell.errors import Unsupported

PAIR = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": True}
TUPLE = {"items": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "status", "why"),
    [
        (PAIR, "[1, 2]", "valid", ""),
        (PAIR, "[1, 1]", "invalid", "uniqueItems: "),
        (PAIR, '["a"]', "invalid", "type: "),
        (PAIR, "[1, 2", "invalid", "not JSON: "),
        (PAIR, "[1] x", "invalid", "not JSON: "),
        ({"format": "ipv4"}, '"1.2.3.4"', "valid", ""),
        ({"format": "ipv4"}, '"1.2.3"', "invalid", "format: "),
        ({"type": "nothing"}, "1", "unchecked", "not a valid schema: "),
        ({"$ref": "http://localhost:1234/integer.json"}, "1", "unchecked", ""),
        ({"pattern": "\\p{L}"}, '"a"', "unchecked", "error: "),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", **TUPLE},
            '["a", 1]',
            "invalid",
            "",
        ),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, '{"type": 1}', "invalid", ""),
    ],
)
def test_answers_are_judged(schema: Any, text: str, status: str, why: str) -> None:
    found, reason = Checker().judge(schema, text)
    assert found == status and reason.startswith(why) and (status == "valid") == (not reason)
    assert "\n" not in reason


def test_without_the_package_it_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(Unsupported, match=r"pip install 'foretell\[bench\]'"):
        Checker()

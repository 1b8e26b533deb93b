"""Spec strings: what their fields may be. (Names and rules: test_registry.py.)"""

from __future__ import annotations

import pytest

from foretell.errors import BadConfig
from foretell.spec import given, resolve, split


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "ON"])
def test_what_is_true(text: str) -> None:
    assert resolve(f"suffix:shared={text}")[1] == resolve("suffix:shared=1")[1]
    assert resolve(f"suffix:shared={text}")[1].drafter.shared is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["0", "false", "no", "Off"])
def test_what_is_false(text: str) -> None:
    assert resolve(f"suffix:shared={text}")[1].drafter.shared is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "ja", "2", "y", "truth"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=f"suffix:shared='{text}': must be one of 1, true, yes, on"):
        resolve(f"suffix:shared={text}")


def test_common_fields_come_last() -> None:
    for field in ("nodes=4", "rule=coin"):
        with pytest.raises(BadConfig, match="write it after the last, suffix"):
            resolve(f"ngram:{field}+suffix")
        assert resolve(f"ngram+suffix:{field}")[0] == "ngram+suffix"
    with pytest.raises(BadConfig, match="only drafters can be joined"):
        resolve("ngram+plain")


@pytest.mark.parametrize(
    ("text", "mark", "parts"),
    [
        ("a,b=1", ",", ["a", "b=1"]),
        ("a=(b,c),d", ",", ["a=(b,c)", "d"]),
        ("a=(b=(c,d),e),f", ",", ["a=(b=(c,d),e)", "f"]),
        ("x:a=(b+c)+d", "+", ["x:a=(b+c)", "d"]),
        ("path=a(b,c)", ",", ["path=a(b", "c)"]),
        ("source=(),k=2", ",", ["source=()", "k=2"]),
        ("", ",", [""]),
    ],
)
def test_what_stands_in_parentheses_is_one_value(text: str, mark: str, parts: list[str]) -> None:
    assert split(text, mark) == parts


def test_what_a_spec_says_includes_the_specs_within_it() -> None:
    spec = "suffix+cascade:inner=(cascade:inner=rest:path=x,length=2),nodes= 3"
    assert list(given(spec)) == [
        ("cascade", "inner", "(cascade:inner=rest:path=x,length=2)"),
        ("cascade", "inner", "rest:path=x"),
        ("rest", "path", "x"),
        ("cascade", "length", "2"),
        ("cascade", "nodes", "3"),
    ]

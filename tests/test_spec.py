"""Spec strings: what their fields may be. (Names and rules: test_registry.py.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from foretell import spec
from foretell.core.drafter import Drafter
from foretell.core.text import TokenIds
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.model.rsd_c import RsdC
from foretell.errors import BadConfig, UnknownMethod
from foretell.spec import iterate_fields, resolve_method, split_outside, strip_parentheses
from foretell.speculation.strategy import Speculative
from foretell.verification.coin import Coin
from foretell.verification.walk import Walk


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "ON"])
def test_what_is_true(text: str) -> None:
    assert resolve_method(f"suffix:shared={text}")[1] == resolve_method("suffix:shared=1")[1]
    assert resolve_method(f"suffix:shared={text}")[1].drafter.shared is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["0", "false", "no", "Off"])
def test_what_is_false(text: str) -> None:
    assert resolve_method(f"suffix:shared={text}")[1].drafter.shared is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "ja", "2", "y", "truth"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=f"suffix:shared='{text}': must be one of 1, true, yes, on"):
        resolve_method(f"suffix:shared={text}")


def test_common_fields_come_last() -> None:
    for field in ("nodes=4", "rule=coin"):
        with pytest.raises(BadConfig, match="write it after the last, suffix"):
            resolve_method(f"ngram:{field}+suffix")
        assert resolve_method(f"ngram+suffix:{field}")[0] == "ngram+suffix"
    with pytest.raises(BadConfig, match="only drafters can be joined"):
        resolve_method("ngram+plain")


def test_a_drafter_s_own_rule_holds_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ngram, "rule", "coin")
    for config in ("ngram:n=2", "ngram:n=2,rule=default", Ngram(2), Speculative(Ngram(2))):
        assert resolve_method(config)[1] == Speculative(Ngram(2), Coin())
    assert resolve_method("ngram:rule=walk,nodes=3")[1] == Speculative(Ngram(), Walk(), 3)
    assert resolve_method(Speculative(Ngram(), Walk()))[1] == Speculative(Ngram(), Walk())
    assert resolve_method("ngram+suffix")[1].rule is None  # type: ignore[attr-defined]
    monkeypatch.setattr(Ngram, "rule", "coyn")
    with pytest.raises(UnknownMethod, match="unknown rule 'coyn'; did you mean coin"):
        resolve_method("ngram")


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", (3,)), ("3 2 1", (3, 2, 1)), ("(4  2)", (4, 2)), (" 7 ", (7,))]
)
def test_numbers_stand_with_spaces_between(text: str, numbers: tuple[int, ...]) -> None:
    drafter = resolve_method(f"rsd-c:branches={text}")[1].drafter  # type: ignore[attr-defined]
    assert drafter == RsdC(branches=numbers)


@pytest.mark.parametrize("text", ["x", "3;2", "1.5", "@essay.txt", "two"])
@pytest.mark.parametrize("method", ["rsd-c", "optimal-draft"])
def test_what_is_no_list_of_numbers_is_told_so(method: str, text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        resolve_method(f"{method}:branches={text}", lambda text: [1])
    assert str(caught.value) == (
        f"{method}:branches={text!r}: must be whole numbers with spaces between, as in 3 2 1"
    )


@pytest.mark.parametrize("text", ["", "()", "0", "2 65"])
def test_numbers_that_the_method_cannot_use_are_refused_by_it(text: str) -> None:
    with pytest.raises(BadConfig, match=r"rsd-c:branches=.*: must be numbers between 1 and 64"):
        resolve_method(f"rsd-c:branches={text}")


@dataclass(frozen=True)
class Mine(Drafter):
    """A method of one's own."""

    text: TokenIds = ()
    counts: tuple[int, ...] = ()


def test_only_a_text_s_tokens_may_come_from_a_file() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "load_method", lambda name, kind: Mine)
        assert spec.build_method("mine", "drafter", {"text": "1 2", "counts": "2 1"}) == Mine(
            (1, 2), (2, 1)
        )
        with pytest.raises(BadConfig, match=r"mine:text='x': must be token ids .* text file"):
            spec.build_method("mine", "drafter", {"text": "x"})
        with pytest.raises(BadConfig, match="mine:counts='x': must be whole numbers"):
            spec.build_method("mine", "drafter", {"counts": "x"})


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
    assert split_outside(text, mark) == parts


@pytest.mark.parametrize(
    ("text", "value"),
    [("(a,b)", "a,b"), ("a", "a"), ("(a)(b)", "(a)(b)"), ("(a)|(b)", "(a)|(b)"), ("((a))", "(a)"),
     ("()", ""), ("(", "("), (")(", ")("), ("a(b)", "a(b)"), ("", "")],
)  # fmt: skip
def test_parentheses_around_a_value_are_no_part_of_it(text: str, value: str) -> None:
    assert strip_parentheses(text) == value


def test_a_text_may_stand_in_parentheses() -> None:
    made: Any = resolve_method("extract:passage=(Paris, not Rome),longest=(3)")[1]
    assert made.passage == "Paris, not Rome" and made.longest == 3


def test_what_a_spec_says_includes_the_specs_within_it() -> None:
    spec = "suffix+cascade:inner=(cascade:inner=rest:path=x,length=2),nodes= 3"
    assert list(iterate_fields(spec)) == [
        ("cascade", "inner", "(cascade:inner=rest:path=x,length=2)"),
        ("cascade", "inner", "rest:path=x"),
        ("rest", "path", "x"),
        ("cascade", "length", "2"),
        ("cascade", "nodes", "3"),
    ]

"""Spec strings: what their fields may be. (Names and rules: test_registry.py.)"""

from __future__ import annotations

import pytest

from foretell.core.strategy import Speculative
from foretell.drafters.ngram import Ngram
from foretell.errors import BadConfig, UnknownMethod
from foretell.rules.coin import Coin
from foretell.rules.walk import Walk
from foretell.spec import resolve


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


def test_a_drafter_s_own_rule_holds_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ngram, "rule", "coin")
    for config in ("ngram:n=2", "ngram:n=2,rule=default", Ngram(2), Speculative(Ngram(2))):
        assert resolve(config)[1] == Speculative(Ngram(2), Coin())
    assert resolve("ngram:rule=walk,nodes=3")[1] == Speculative(Ngram(), Walk(), 3)
    assert resolve(Speculative(Ngram(), Walk()))[1] == Speculative(Ngram(), Walk())
    assert resolve("ngram+suffix")[1].rule is None  # type: ignore[attr-defined]
    monkeypatch.setattr(Ngram, "rule", "coyn")
    with pytest.raises(UnknownMethod, match="unknown rule 'coyn'; did you mean coin"):
        resolve("ngram")

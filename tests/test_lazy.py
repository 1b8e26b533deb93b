"""Modules by the names that they had before, and methods by their kind's folder."""

from __future__ import annotations

import importlib
import sys

import pytest

import foretell

OLD = {
    "foretell.core.engine": "foretell.engine.engine",
    "foretell.families.toy": "foretell.testing.toy",
    "foretell.stats": "foretell.core.stats",
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_leads_to_the_module_and_says_where_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{name} is {OLD[name]} now$"):
        module = importlib.import_module(name)
    assert module is importlib.import_module(OLD[name])
    monkeypatch.delitem(sys.modules, name)


def test_a_method_is_imported_by_its_kind_s_folder() -> None:
    ngram = importlib.import_module("foretell.drafters.ngram")
    assert ngram is importlib.import_module("foretell.drafters.lookup.ngram")
    assert foretell.drafters.ngram is ngram  # type: ignore[attr-defined]
    quest = importlib.import_module("foretell.kv.quest")
    assert quest is importlib.import_module("foretell.kv.select.quest")


@pytest.mark.parametrize(
    "name", ["foretell.drafters.nothing", "foretell.nothing", "foretell.kv.ngram"]
)
def test_another_name_is_none(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)

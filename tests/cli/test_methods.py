"""`foretell methods`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foretell
from foretell import registry


def test_methods_are_listed(run: Any) -> None:
    code, out, _ = run("methods", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "foretell.methods/1"
    cards = {card["name"]: card for card in document["methods"]}
    others = registry.method_names("kv", "guidance", "processor", "reward", "constraint")
    assert set(cards) == {card.name for card in foretell.methods()} | set(others)
    assert cards["momentum"]["kind"] == "processor" and cards["cfg"]["kind"] == "guidance"
    assert cards["ngram"]["defaults"]["k"] == 10 and Path(cards["ngram"]["file"]).is_file()
    code, out, _ = run("methods")
    assert code == 0 and all(name in out for name in cards)
    code, out, _ = run("methods", "ngram")
    assert code == 0 and "guarantee: exact" in out and "n=3, k=10" in out
    assert "differs: \n" not in out and "('" not in out, "departures are a list, one a line"
    for name in ("ngram", "cfg", "momentum"):
        assert json.loads(run("methods", name, "--json")[1])["methods"] == [cards[name]]

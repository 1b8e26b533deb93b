"""Means, differences and tables of a document that is written down here."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.longbench import report


def answer(number: int, kv: str, budget: str, scores: list[float], **more: Any) -> dict[str, Any]:
    return {
        "task": "keys",
        "mode": "turns",
        "length": 1000,
        "number": number,
        "kv": kv,
        "budget": budget,
        "place": None,
        "scores": scores,
        "first_s": [0.5, 0.1],
        "token_s": [0.02, None],
        "held": [{"rows": 100.0, "bytes": 1e6}, {"rows": 200.0, "bytes": 3e6}],
    } | more


def text(number: int, kv: str, bits: list[float]) -> dict[str, Any]:
    one = answer(number, kv, "", [], task="perplexity", mode="text", bits=bits)
    return {name: one[name] for name in one if name not in ("scores", "first_s", "token_s")}


@pytest.fixture
def document() -> dict[str, Any]:
    answers = [
        answer(0, "none", "", [1.0, 1.0]),
        answer(1, "none", "", [1.0, 0.0]),
        answer(0, "quest", "10%", [1.0, 0.0]),
        answer(1, "quest", "10%", [0.0, 0.0]),
        answer(2, "quest", "10%", [1.0, 1.0]),  # whose whole cache has failed
        answer(2, "none", "", [], error="it <broke>"),
        answer(0, "quest", "20%", [1.0, 1.0]),
        text(0, "none", [2.0, 4.0]),
        text(0, "quest", [3.0, 5.0]),
    ]
    machine = {"processor": "a processor", "cores": 2, "threads": 1}
    return {
        "answers": answers,
        "settings": {"model": "tiny"},
        "machine": machine,
        "versions": {"torch": "2", "transformers": "5"},
        "version": "1",
        "date": "today",
        "bandwidth": None,
    }


def test_cells_are_means_and_pairs_of_the_same_contexts(document: dict[str, Any]) -> None:
    whole, quest, more, plain, changed = report.summarize_cells(document)
    assert whole["score"] == 0.75 and "more" not in whole and whole["contexts"] == 2
    assert quest["score"] == 0.5 and quest["turns"] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert quest["more"]["mean"] == -0.5  # contexts 0 and 1 only
    assert more["more"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert (quest["first_s"], quest["token_s"]) == (pytest.approx(0.3), 0.02)
    assert (quest["rows"], quest["bytes"]) == (150, 2e6)
    assert (plain["bits"], plain["perplexity"], plain["parts"]) == (3, 8, [2, 4])
    assert changed["more"]["mean"] == 1


def test_needles_are_told_apart_by_depth(document: dict[str, Any]) -> None:
    depths = [0.1, 0.5, 0.1]
    document["answers"] = [
        answer(number, "none", "", [float(number == 2)], place=depth, task="needles")
        for number, depth in enumerate(depths)
    ]
    (cell,) = report.summarize_cells(document)
    assert cell["depths"] == {"10%": 0.5, "50%": 0.0}
    ((title, (head, row)),) = report.result_tables(document)
    assert title == "needles, turns, 1,000 tokens: 3 contexts"
    assert dict(zip(head, row, strict=True))["at 10%"] == "50%"


def test_tables_show_every_contender(document: dict[str, Any]) -> None:
    (title, (head, *rows)), (_, texts) = report.result_tables(document)
    assert title == "keys, turns, 1,000 tokens: 2 contexts"
    assert [row[0] for row in rows] == ["none", "quest at 10%", "quest at 20%"]
    quest = dict(zip(head, rows[1], strict=True))
    assert (quest["score"], quest["turn 1"], quest["turn 2"]) == ("50.0%", "67%", "33%")
    assert quest["more than none"].startswith("-50.0% (")
    assert (quest["first token"], quest["a token"]) == ("0.30 s", "20.0 ms")
    assert (quest["rows"], quest["MB"]) == ("150", "2.00")
    assert texts[2][:4] == ["quest", "16.00", "4.000", "+1.000 (+1.000 to +1.000)"]
    assert all(len(row) == len(head) for row in rows)


def test_a_page_has_plots_and_escapes(document: dict[str, Any]) -> None:
    page = report.render_html(document)
    assert page.count("<svg") == 3 and page.count("<table") == 2  # rows and turns; parts
    assert "it &lt;broke&gt;" in page and "<broke>" not in page
    assert report.failure_lines(document) == [
        "keys, turns, 1000 tokens, context 2, none: it <broke>"
    ]

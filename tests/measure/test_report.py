"""The report: well-formed, self-contained, everything in it, every text escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from foretell.measure import bench, report
from foretell.measure.bench import Settings
from foretell.measure.bench.runner import Group
from tests import tiny

VOID = {"meta", "br"}
EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Checks that every tag is closed in order; keeps the texts."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings = Settings(
        models=("tiny",),
        methods=("ngram:n=2,k=4,nodes=3", "draft:nodes=3", "rest", "superposed"),
        max_new_tokens=16,
        rounds=1,
    )
    sets = {
        "code": ["def add(a, b):\n    return a + b\n\ndef sub(a, b):"] * 4,
        "prose": ["The fox, and the fox"] * 4,
    }
    found = bench.begin(settings, sets)
    found["bandwidth"] = {"bytes_per_s": 2e10, "device": "cpu"}
    return bench.bench(settings, sets, lambda model, dtype: tiny.lm(), found)


def test_the_page_is_whole_and_needs_nothing(document: dict[str, Any]) -> None:
    text = report.html(document)
    page = Page(text)
    said = " ".join(page.words)
    for name in (
        "plain",
        "ngram:n=2,k=4,nodes=3",
        "draft:nodes=3",
        "rest",
        "all at once",
        "code",
        "prose",
        "20 GB/s",
    ):
        assert name in said, name
    for title in (
        "Speed-up by method",
        "Acceptance by position",
        "Cost of a forward",
        "Where the time of a step goes",
        "One generation, step by step",
        "How it was measured",
        "Failed",
    ):
        assert title in said, title
    assert page.tags.count("svg") == 5 and page.tags.count("html") == 1
    assert not re.search(r"<script|<link|@import|src=|url\(|href=", text)
    assert "prefers-color-scheme: dark" in text and "nan" not in text.lower().replace("nano", "")


def scaled(document: dict[str, Any]) -> dict[str, Any]:
    """The same with more requests and contexts: speeds invented, times 2 and 3."""
    more = []
    for factor, change in ((2, {"requests": 4}), (3, {"requests": 16})):
        for cell in document["cells"]:
            speeds = {k: v * factor for k, v in (cell.get("tokens_per_s") or {}).items()} or None
            more.append(
                cell | change | ({"tokens_per_s": speeds} if cell["status"] == "ok" else {})
            )
    for context in (256, 1024):
        more += [
            c | {"context": context, "set": "mixed"}
            for c in document["cells"]
            if c["set"] == "code"
        ]
    return document | {"cells": document["cells"] + more}


def test_scaling_is_drawn_with_what_was_drafted(document: dict[str, Any]) -> None:
    whole = scaled(document)
    page = Page(report.html(whole))
    said = " ".join(page.words)
    assert "Cost of a token by context" in said and "Cost of a token by requests at once" in said
    assert page.tags.count("svg") == 5 + 2, "the other plots are of the fewest requests only"
    assert (
        "16 requests at once" in said
        and "1,024" in said
        and said.count("drafted") > 6
        and "host" in said
    )
    tables = report.tables(whole)
    assert [(t.requests, t.context) for t in tables] == [
        (1, None),
        (4, None),
        (16, None),
        (1, 256),
        (1, 1024),
    ]
    assert tables[3].title.endswith(", one request, behind 256 tokens")
    one, four = (report._cost(table, "plain") for table in tables[:2])
    assert one is not None and four is not None
    assert four == pytest.approx([v / 2 for v in one]) and one[1] <= one[0] <= one[2]
    assert report._cost(tables[0], "rest") is None
    alone = Page(report.html(document))
    assert "Cost of a token by" not in " ".join(alone.words)


def test_memory_is_shown_beside_what_should_be_enough(document: dict[str, Any]) -> None:
    limit = {"weights": 2_000_000, "caches": 5_000_000, "bytes": 307_300_000}
    said = " ".join(
        Page(report.html(document | {"peak_memory": 123_000_000, "memory_limit": limit})).words
    )
    assert "123 MB; 2 MB of weights x 1.15, 5 MB of caches and 300 MB are 307 MB" in said
    said = " ".join(
        Page(report.html(document | {"peak_memory": 123_000_000, "memory_limit": None})).words
    )
    assert "all contenders in it together: 123 MB." in said


def test_the_host_has_its_share_in_table_and_plot(document: dict[str, Any]) -> None:
    page = report.html(document)
    assert "<th>host</th>" in page and re.search(r">\d+\.\d\d \(host \d+ %\)<", page)


def test_what_failed_is_told(document: dict[str, Any]) -> None:
    (line,) = report.failures(document)
    assert (
        line.startswith("rest on tiny: ")
        and line.endswith("(code, prose)")
        and "foretell datastore" in line
    )


def test_a_table_has_a_line_for_everybody(document: dict[str, Any]) -> None:
    (table,) = report.tables(document)
    head, plain, ngram, draft, superposed, rest = table.text()
    assert (
        head == ["", "code", "prose", "mean"] and plain[0] == "plain" and plain[1].endswith("tok/s")
    )
    assert plain[3] == "1.00" and "MAT" in ngram[1] and float(draft[3]) > 0
    assert rest == ["rest", "failed", "failed", ""]
    assert superposed == ["superposed", "all at once", "all at once", ""]
    assert table.mean("draft:nodes=3") == pytest.approx(
        (
            table.rows["draft:nodes=3"]["code"]["ratio"]["median"]
            * table.rows["draft:nodes=3"]["prose"]["ratio"]["median"]
        )
        ** 0.5
    )


def test_many_contenders_have_colours_of_their_own() -> None:
    assert len({report._shade(i) for i in range(3 * report.SERIES)}) == 3 * report.SERIES


def test_every_text_is_escaped(document: dict[str, Any]) -> None:
    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: spoil(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoil(v, key) for v in value]
        return value + EVIL if isinstance(value, str) and key not in ("status", "schema") else value

    text = report.html(spoil(document))
    assert EVIL not in text and "<script" not in text and "&lt;script&gt;" in text
    Page(text)


def test_a_document_without_cells_or_measurements_is_a_page() -> None:
    empty = bench.begin(Settings(), {"a": ["b"]})
    page = Page(report.html(empty))
    assert "svg" not in page.tags and "memory not measured" in " ".join(page.words)


def test_a_group_where_all_failed_is_a_page(document: dict[str, Any]) -> None:
    keys = (*Group._fields, "prompts", "contender", "about", "baseline")
    failed = [
        {k: c[k] for k in keys} | {"status": "failed", "reason": "no"} for c in document["cells"]
    ]
    page = Page(report.html(document | {"cells": failed, "models": []}))
    assert "svg" not in page.tags and "plain on tiny: no (code, prose)" in page.words

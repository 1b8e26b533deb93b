"""The pages: well-formed, self-contained, everything in them, every text escaped."""

from __future__ import annotations

import re
from typing import Any

from foretell import bench
from foretell.bench import Settings, report
from foretell.bench.runner import Group
from tests.bench.report.page import Page

EVIL = '<script>alert("x")</script>'


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
    assert page.tags.count("svg") == 5
    assert page.tags.count("html") == 1
    assert not re.search(r"<script|<link|@import|src=|url\(|href=", text)
    assert "prefers-color-scheme: dark" in text
    assert "nan" not in text.lower().replace("nano", "")


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
    assert "<th>host</th>" in page
    assert re.search(r">\d+\.\d\d \(host \d+ %\)<", page)


def test_every_text_is_escaped(document: dict[str, Any]) -> None:
    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: spoil(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoil(v, key) for v in value]
        return value + EVIL if isinstance(value, str) and key not in ("status", "schema") else value

    text = report.html(spoil(document))
    assert EVIL not in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Page(text)


def test_a_document_without_cells_or_measurements_is_a_page() -> None:
    empty = bench.begin_document(Settings(), {"a": ["b"]})
    page = Page(report.html(empty))
    assert "svg" not in page.tags
    assert "memory not measured" in " ".join(page.words)


def test_a_group_where_all_failed_is_a_page(document: dict[str, Any]) -> None:
    keys = (*Group._fields, "prompts", "contender", "about", "baseline")
    failed = [
        {k: c[k] for k in keys} | {"status": "failed", "reason": "no"} for c in document["cells"]
    ]
    page = Page(report.html(document | {"cells": failed, "models": []}))
    assert "svg" not in page.tags
    assert "plain on tiny: no (code, prose)" in page.words

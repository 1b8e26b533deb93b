"""What a token costs by context and by requests."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.bench import report
from foretell.bench.report import scaling
from tests.bench.report.page import Page


def scaled(document: dict[str, Any]) -> dict[str, Any]:
    """The same with more requests and contexts: speeds invented, times 2 and 3."""
    more = []
    for factor, change in ((2, {"requests": 4}), (3, {"requests": 16})):
        for cell in document["cells"]:
            changed = cell | change
            if cell.get("tokens_per_s"):
                speeds = cell["tokens_per_s"].items()
                changed["tokens_per_s"] = {name: value * factor for name, value in speeds}
            more.append(changed)
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
    assert "Cost of a token by context" in said
    assert "Cost of a token by requests at once" in said
    assert page.tags.count("svg") == 5 + 2, "the other plots are of the fewest requests only"
    assert "16 requests at once" in said
    assert "1,024" in said
    assert said.count("drafted") > 6
    assert "host" in said
    tables = report.tables(whole)
    assert [(t.requests, t.context) for t in tables] == [
        (1, None),
        (4, None),
        (16, None),
        (1, 256),
        (1, 1024),
    ]
    assert tables[3].title.endswith(", one request, after 256 tokens")
    one = scaling._token_cost(tables[0], "plain")
    four = scaling._token_cost(tables[1], "plain")
    assert one is not None
    assert four == pytest.approx([milliseconds / 2 for milliseconds in one])
    assert one[1] <= one[0] <= one[2]
    assert scaling._token_cost(tables[0], "rest") is None
    alone = Page(report.html(document))
    assert "Cost of a token by" not in " ".join(alone.words)

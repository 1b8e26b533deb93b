"""The tables of a document."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.bench.report import failures, tables


def test_what_failed_is_told(document: dict[str, Any]) -> None:
    (line,) = failures(document)
    assert line.startswith("rest on tiny: ")
    assert line.endswith("(code, prose)")
    assert "foretell datastore" in line


def test_a_table_has_a_line_for_everybody(document: dict[str, Any]) -> None:
    (table,) = tables(document)
    head, plain, ngram, draft, superposed, rest = table.text()
    assert head == ["", "code", "prose", "mean"]
    assert plain[0] == "plain"
    assert plain[1].endswith("tok/s")
    assert plain[3] == "1.00"
    assert "MAT" in ngram[1]
    assert float(draft[3]) > 0
    assert rest == ["rest", "failed", "failed", ""]
    assert superposed == ["superposed", "all at once", "all at once", ""]
    assert table.mean("draft:nodes=3") == pytest.approx(
        (
            table.rows["draft:nodes=3"]["code"]["ratio"]["median"]
            * table.rows["draft:nodes=3"]["prose"]["ratio"]["median"]
        )
        ** 0.5
    )

"""The words of the package keep their limits, and a breach of each is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import words

PLAIN = (
    "def count_rows(cache_rows: int) -> int:\n    row_count = cache_rows\n    return row_count\n"
)


def test_the_package_keeps_its_words() -> None:
    assert words.above_limits() == []


@pytest.mark.parametrize(
    ("what", "source"),
    [
        ("vague names", "found = 1\n"),
        ("vague names", "def count(kept: int) -> None: ...\n"),
        ("vague functions", "def _joined() -> None: ...\n"),
        ("elliptic docstrings", 'def count() -> None:\n    """The same of rows."""\n'),
        ("elliptic docstrings", 'class Rows:\n    """What is held."""\n'),
    ],
)
def test_a_breach_is_noticed(what: str, source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PLAIN)
    assert words.above_limits(tmp_path) == []
    (tmp_path / "b.py").write_text(source)
    (sentence,) = words.above_limits(tmp_path)
    assert sentence.startswith(f"{what}: ")


def test_functions_of_one_name_in_many_modules_are_noticed(tmp_path: Path) -> None:
    count = int(words.LIMITS["function names that three modules share"]) + 1
    source = "\n".join(f"def count_{i}() -> None: ..." for i in range(count))
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").write_text(source)
    assert words.above_limits(tmp_path) == [
        f"function names that three modules share: {count}.0, and {count - 1} at most"
    ]

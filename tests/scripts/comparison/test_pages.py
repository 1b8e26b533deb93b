"""The tables that the documentation shows."""

from __future__ import annotations

from comparison import pages

from tests.scripts.comparison.documents import AUTO, PLAIN, document, part


def rows(text: str) -> dict[str, list[str]]:
    """The cells of all rows of tables by the first one."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_the_summary_has_each_library_at_its_best_and_what_we_lose_by() -> None:
    text = pages.summary(document(part(sets=("chat", "code"))))
    found = rows(text)
    assert found == {
        "greedy": ["chat", "code", "mean"],
        "transformers `generate`, 16 bits": ["15.0 tokens/s", "15.0 tokens/s", "1.00"],
        "llama.cpp BF16 prompt lookup 10, 16 bits": ["4.00", "4.00", "4.00"],
        "foretell `plain`, 16 bits": ["3.00", "3.00", "3.00"],
        "foretell `auto`, 16 bits": ["**6.00**", "**6.00**", "6.00"],
        "`auto` to the best peer, 16 bits": ["1.50", "1.50", "1.50"],
        "openvino int8, 8 bits": ["**5.00**", "**5.00**", "5.00"],
    }
    assert "memory read at 20.0 GB/s (10.0 to 40.0)" in text
    assert "`tiny`, greedy, 8 tokens, rounds: 2, 2 threads of 2 cores (a processor)" in text


def test_the_page_has_every_contender_on_every_set() -> None:
    text = pages.page(document())
    found = rows(text.partition("## Over all sets")[0])
    assert found["foretell `auto`"] == [
        "16",
        "90.0 (60.0 to 120.0)",
        "6.00",
        "1.50",
        "2.00",
        "2.00",
        "2 of 4",
    ]
    assert "llama.cpp BF16 prompt lookup 10, the best peer" in found
    prefill = rows(text.partition("## A prompt of 2000 tokens")[2].partition("## ")[0])
    assert prefill["foretell `plain`"] == ["16", "2.00", "1000", "0.50"]
    loading = rows(text.partition("## Loading")[2].partition("## ")[0])
    sizes = ["1.00", "2.00", "0.50", "400", "500", "", "200"]
    assert loading["foretell bfloat16"] == sizes
    steps = rows(text.partition("## What a step costs")[2].partition("## ")[0])
    assert steps["foretell bfloat16"] == ["20.0 ms (1.00)", "30.0 ms (1.50)", "0.50"]
    who = rows(text.partition("## Who took part")[2])
    assert who["ctranslate2 int8"] == ["absent: not installed"]


def test_a_table_of_our_methods_and_the_rows_of_one() -> None:
    found = rows(pages.methods(document()))
    assert found["`auto`, 16 bits"] == ["**2.00**, MAT 2.00", "2.00"]
    assert not any("plain`," in name for name in found)
    head, lines = pages.method_rows(document(), "auto")
    assert [line[:2] for line in lines] == [["chat", "16 bits"]]
    assert len(head) == len(lines[0])
    assert pages.method_rows(document(), "ngram")[1] == []


def test_a_part_without_us_or_without_transformers_is_shown_too() -> None:
    for left in ({PLAIN: 1.0, AUTO: 1.0}, {"openvino int8": 1.0}):
        bare = part(left) | {"prefill": [], "steps": {}, "memory_rate": [], "absent": {}}
        whole = document(bare)
        assert "| chat |" in pages.summary(whole)
        assert "What a step costs" not in pages.page(whole)

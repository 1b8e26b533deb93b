"""The correction task: which sentences are taken, and what is done to them."""

from __future__ import annotations

from pathlib import Path

from foretell.train.corrections import (
    LONGEST,
    NEIGHBOURS,
    read_sentences,
    split_sentences,
    spoil_sentence,
)

SOURCE = '''"""Reads a file. It does so line by line, and it
keeps the last one.

>>> doctest()

Too short.
"""


class Thing:
    """A thing of some sort, which has no name of its own."""

    def act(self):
        """Does what the thing can do, and says nothing of it."""
        return "This is no docstring but a value of some kind."
'''


def test_sentences_are_prose_of_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("def broken(:\n")
    (tmp_path / "c.txt").write_text(
        f"A thing of some sort, which has no name of its own. {'x ' * 60}."
    )
    found = [sentence for sentence, _ in read_sentences([str(tmp_path)], 0.0)]
    assert found == [
        "It does so line by line, and it keeps the last one.",
        "A thing of some sort, which has no name of its own.",
        "Does what the thing can do, and says nothing of it.",
    ]
    assert all(back for _, back in read_sentences([str(tmp_path)], 1.0))
    assert not list(split_sentences(["This has code_like x = 1 in it, so no."]))
    assert not list(split_sentences([("Word " * LONGEST).title() + "end."]))


def test_mistakes_are_the_same_every_time_and_others_each_round() -> None:
    sentence = "It does so line by line, and it keeps the last one of them all."
    wrong = [spoil_sentence(sentence, 0.3, 1, round) for round in range(40)]
    assert wrong == [spoil_sentence(sentence, 0.3, 1, round) for round in range(40)]
    assert len(set(wrong)) > 30 and spoil_sentence(sentence, 0.3, 2) != wrong[0]
    assert spoil_sentence(sentence, 0.0, 1) == sentence
    counts = [len(text.split()) - len(sentence.split()) for text in wrong]
    assert min(counts) < 0 < max(counts)
    words = set(sentence.split())
    kept = sum(word in words for text in wrong for word in text.split()) / (
        40 * len(sentence.split())
    )
    assert 0.6 < kept < 0.95
    assert spoil_sentence("Word", 1.0, 0)


def test_neighbours_are_those_of_a_keyboard() -> None:
    assert set(NEIGHBOURS["s"]) == {"a", "d"} and NEIGHBOURS["q"] == "w" and len(NEIGHBOURS) == 26

"""train/preferences/infty.py: rounds of a text by hand, and files with a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.errors import BadConfig
from foretell.train.preferences.infty import Cut, pack_steps, steps_of, write_rounds

THOUGHTS = "One two.\n\nand more.\n\nThree four five.\n\n\n\nÉtape six seven.\n\n8 nine."


def test_thoughts_are_cut_before_capital_letters() -> None:
    steps = steps_of(THOUGHTS)
    assert [step.strip() for step in steps] == [
        "One two.\n\nand more.", "Three four five.", "Étape six seven.\n\n8 nine.",
    ]  # fmt: skip
    assert "".join(steps) == THOUGHTS
    sizes = {
        most: len(pack_steps(steps, lambda text: len(text.split()), most)) for most in (4, 7, 12)
    }
    assert sizes == {4: 3, 7: 2, 12: 1}
    assert pack_steps(steps, lambda text: 99, 4) == [step.strip() for step in steps]


class Scripted:
    """Counts what it is shown; comes to an end at the second try, or never."""

    def __init__(self, never: bool = False):
        self.never = never

    def prompt_ids(self, text: str) -> list[str]:
        return text.split()

    def generate(self, turns: list[dict[str, str]], **options: Any) -> Any:
        assert turns[0] == {"role": "user", "content": "Why?"}
        done = options["seed"] == 6 and not self.never
        text = f"* {len(turns[1]['content'].split())} words\n"
        return SimpleNamespace(text=text, finish_reason="stop" if done else "length")


def test_rounds_are_written(tmp_path: Path) -> None:
    source, out = tmp_path / "texts.jsonl", tmp_path / "rounds.jsonl"
    answers = [f"<think>\n{THOUGHTS}\n</think>\nTen.", "Ten.", "<think>\nOne.\n</think> Two."]
    lines = [json.dumps({"prompt": "Why?", "answer": answer}) for answer in answers]
    source.write_text("\n".join(lines))
    cut = Cut(segment=16, seed=5)
    object.__setattr__(cut, "segment", 4)  # below what a user may ask for
    told: list[int] = []
    counts = write_rounds(
        Scripted(), source, out, cut, lambda what, done, of: told.append(done)  # type: ignore[arg-type]
    )  # fmt: skip
    assert counts == {"texts": 3, "rows": 4, "without_thoughts": 1, "unfinished": 0}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert told == [1, 2, 3] and {row["prompt"] for row in rows} == {"Why?"}
    assert [row["history"] for row in rows] == [
        "", "<history>* 4 words</history>", "<history>* 7 words</history>", "",
    ]  # fmt: skip
    assert [row["target"] for row in rows] == [
        "<think>\nOne two.\n\nand more.\n</think>\n<summary>\n* 4 words\n</summary>",
        "<think>\nThree four five.\n</think>\n<summary>\n* 7 words\n</summary>",
        "<think>\nÉtape six seven.\n\n8 nine.\n</think>\nTen.",
        "<think>\nOne.\n</think> Two.",
    ]
    never = Scripted(never=True)
    counts = write_rounds(never, source, out, cut, lambda *told: None)  # type: ignore[arg-type]
    assert counts == {"texts": 3, "rows": 1, "without_thoughts": 1, "unfinished": 1}


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "Why?"}\n')
    with pytest.raises(BadConfig, match=r"texts.jsonl, row 1: `answer` must be a text"):
        write_rounds(
            Scripted(), tmp_path / "texts.jsonl", tmp_path / "out", Cut(), lambda *told: None  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(BadConfig, match="tries=0"):
        Cut(tries=0)

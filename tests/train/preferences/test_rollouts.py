"""train/preferences/rollouts.py: prompts are read with their rewards, and drawn answers come with
theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import BadConfig, BadFile, Unsupported
from foretell.rewards.base import Reward
from foretell.rewards.bleu import Bleu, bleu_score
from foretell.rewards.keywords import Keywords
from foretell.rewards.r3 import R3
from foretell.rewards.reward_anything import RewardAnything
from foretell.train.preferences.rollouts import (
    Question,
    bleu_of_first,
    check_ranked,
    draw_answers,
    keep_json,
    measure_parts,
    questions_digest,
    read_questions,
    sampling_method,
    with_references,
)
from tests import tiny


@dataclass(frozen=True)
class Letters(Reward):
    """The share of a text's characters that are lower-case letters; none of a text that has a 7."""

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        found = []
        for text in texts:
            small = sum("a" <= one <= "z" for one in text)
            found.append(float("nan") if "7" in text else small / max(1, len(text)))
        return found


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_rows_have_prompts_rewards_and_references(tmp_path: Path) -> None:
    lm = tiny.lm()
    path = written(
        tmp_path / "p.jsonl",
        {"prompt": "one", "references": "a b"},
        {"prompt": "two", "references": ["c", "d\n---\ne"]},
        {"prompt": "three", "reward": "keywords:words=dog", "references": ["f"]},
        {"prompt": "a much longer prompt than the others are"},
        {"messages": [{"role": "user", "content": "four"}]},
    )
    found = read_questions(lm, [path], "bleu", 12, 8)
    assert [list(one.ids) for one in found] == [
        lm.encode(t) for t in ("one", "two", "three", "four")
    ]
    assert found[0].reward == Bleu("a b") and found[2].reward == Keywords("dog")
    assert found[2].references == ("f",) and found[3].reward == Bleu()
    # A reference's own line of --- does not divide it.
    score = found[1].reward.scores("", ["d --- e", "c"])
    assert (
        score == [bleu_score(text, ["c", "d\n---\ne"]) for text in ("d --- e", "c")]
        and score[0] < 1
    )
    assert len(read_questions(lm, [path, path], "bleu", 512, 8)) == 10
    longest = tiny.CONTEXT - len(lm.encode("one"))
    assert len(read_questions(lm, [path], "bleu", 512, longest)) == 3  # "three" has more tokens


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "references": 3}, "row 2: `references` must be a text or a list"),
        ({"prompt": "a", "references": ["a", " "]}, "row 2: `references` must be"),
        ({"prompt": "a", "reward": "blue"}, "row 2: .*blue.*bleu"),
        ({"prompt": "a", "reward": "keywords:words="}, "row 2: keywords"),
        ({"prompt": "a", "reward": 3}, "row 2: reward=3"),
    ],
)
def test_a_wrong_row_is_told_with_its_number(row: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(BadConfig, match=words):
        read_questions(tiny.lm(), [path], "bleu", 99, 9)


def test_a_reward_takes_references_by_the_field_it_has() -> None:
    assert with_references(R3("folder"), ["a", "b"]) == R3("folder", reference="a")
    assert (
        with_references(Keywords("a"), ["b"]) == Keywords("a")
        and with_references(Bleu(), []) == Bleu()
    )


def test_answers_are_samples_with_their_rewards_whatever_drafts() -> None:
    lm = tiny.lm()
    questions = [Question((5, 6, 7), Letters()), Question((8, 9), Keywords("a"))]
    options: dict[str, Any] = {"tokens": 12, "temperature": 0.8}
    groups = draw_answers(lm, questions, 6, 3, **options)
    for question, group in zip(questions, groups, strict=True):
        assert group.prompt == question.ids and len(group.answers) <= 6
        texts = [lm.decode([one for one in answer if one]) for answer in group.answers]
        assert group.rewards == pytest.approx(question.reward.scores("", texts))
        assert all(len(answer) == 12 or answer[-1] == 0 for answer in group.answers)
    assert len({tuple(answer) for answer in groups[0].answers}) > 3
    assert draw_answers(lm, questions, 6, 3, **options) == groups
    assert (
        draw_answers(lm, questions[1:], 6, 4, **options) == groups[1:]
    )  # a prompt's seed is its own
    assert draw_answers(lm, questions, 6, 4, **options) != groups
    assert sampling_method(3, "") == "best-of:n=3"
    stats = lm.generate([5, 6, 7], sampling_method(3, "draft:length=2"), max_new_tokens=8).stats
    assert stats.calls["draft"] > 0
    assert draw_answers(lm, [], 6, 3, **options) == []


def test_answers_without_a_reward_are_left_out() -> None:
    lm = tiny.lm()

    @dataclass(frozen=True)
    class Some(Reward):
        def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
            return [float("nan"), 1.0, 2.0]

    (group,) = draw_answers(lm, [Question((5, 6), Some())], 3, 0, tokens=4, temperature=1.0)
    assert sorted(group.rewards) == [1, 2] and len(group.answers) == 2


def test_what_a_request_fails_with_is_raised() -> None:
    lm = tiny.lm()

    @dataclass(frozen=True)
    class Cannot(Reward):
        def check(self, ctx: Any) -> None:
            raise Unsupported("there is no sandbox here")

    with pytest.raises(Unsupported, match="no sandbox"):
        draw_answers(lm, [Question((5, 6), Cannot())], 3, 0, tokens=4, temperature=1.0)


def test_the_first_answer_is_compared_with_the_references() -> None:
    lm = tiny.lm()
    said = lm.generate([5, 6, 7], "plain", max_new_tokens=9).text
    questions = [Question((5, 6, 7), Bleu(), (said,)), Question((5, 6, 7), Bleu(), ("no",))]
    assert bleu_of_first(lm, questions, 9) == pytest.approx(
        [bleu_score(said, [said]), bleu_score(said, ["no"])]
    )


def test_rewards_of_groups_have_no_ranks() -> None:
    check_ranked([Question((1,), Keywords("a")), Question((1,), Bleu("a"))])
    for reward in (Bleu(), RewardAnything(principle="be kind")):
        with pytest.raises(BadConfig, match=r"calibrate: the reward .* compares the answers"):
            check_ranked([Question((1,), reward)])


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    questions = [Question((number,), Bleu()) for number in range(70)]
    asked: list[int] = []

    def measure(part: Sequence[Question], first: int) -> list[Any]:
        asked.append(first)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [[one.ids[0] / 3] for one in part]

    with pytest.raises(KeyboardInterrupt):
        measure_parts(tmp_path, "some thing", questions, measure)
    assert measure_parts(tmp_path, "some thing", questions, measure) == [[n / 3] for n in range(70)]
    assert asked == [0, 32, 64, 64]
    (tmp_path / "some-thing-00001.json").write_text("[1,", "utf-8")
    with pytest.raises(BadFile, match=r"some-thing-00001\.json: cannot be read"):
        measure_parts(tmp_path, "some thing", questions, measure)
    assert (
        keep_json(tmp_path / "new.json", lambda: "a")
        == keep_json(tmp_path / "new.json", lambda: "b")
        == "a"
    )


def test_other_prompts_or_rewards_have_another_fingerprint() -> None:
    some = [Question((1, 2), Bleu("a"), ("a",))]
    others = [Question((1, 3), Bleu("a"), ("a",)), Question((1, 2), Bleu(), ("a",)),
              Question((1, 2), Bleu("a"))]  # fmt: skip
    marks = {questions_digest([one]) for one in [*some, *others]}
    assert len(marks) == 4 and questions_digest(some) == questions_digest(list(some))

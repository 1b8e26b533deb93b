"""train/preferences/pairs.py: pairs that a scripted model finds of its own answers, and files of
pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell import spec
from foretell.api.outputs import Output, list_outputs
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.scheduler import FairPlan
from foretell.errors import BadConfig, PromptTooLong, RequestFailed
from foretell.train.preferences.pairs import Search, pair_of, read_pairs, row_of, write_pairs
from foretell.train.preferences.preferences import Reader
from tests import tiny
from tests.speaking import Speaking, spell, tokens_of
from tests.strategies.samples.test_spar import ASKED, Twin, script

SPEC = "spar:branch=2,votes=3,tries=2,critique=60,refined=40"
PROMPTS = [[{"role": "user", "content": ASKED[0][1]}]] * 8


@cache
def searched(seed: int, method: str, longest: int, t: float) -> Output:
    # What is read of a question beside steps is a matter of time, unless there is plenty of it.
    engine = Engine({"target": Speaking(script)}, eos=(0,), plan=FairPlan(between_tokens=1e9))
    sampling = Sampling(seed=seed, max_new_tokens=longest, temperature=t)
    live = engine.add(
        Request(tokens_of(ASKED), spec.resolve_method(method)[1], sampling, text=spell)
    )
    list(engine.run())
    found = list_outputs(live, [], spell)
    found[0].samples = found
    return found[0]


class Scripted:
    """As much of an LM as the search asks for."""

    def __init__(self) -> None:
        self.asked: list[int] = []  # seeds

    def generate(self, prompts: Sequence[Any], method: str, **options: Any) -> list[Output]:
        assert len(prompts) == len(options["seed"])
        self.asked += options["seed"]
        if len(prompts) > 1 and "too long" in prompts:
            raise PromptTooLong("one is too long")
        if prompts == ["too long"]:
            raise PromptTooLong("this is too long")
        longest, t = options["max_new_tokens"], options["temperature"]
        return [searched(seed, method, longest, t) for seed in options["seed"]]


def quiet(what: str, done: int, total: int | None) -> None:
    assert what and total == len(PROMPTS) and 0 <= done <= total


BARE = {"chosen": None, "rejected": None}
SEARCH = Search(method=SPEC, max_new_tokens=6, temperature=1.0, seed=5)


def test_a_pair_is_the_first_answer_and_its_best_refinement(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = write_pairs(Scripted(), PROMPTS, path, SEARCH, quiet)  # type: ignore[arg-type]
    assert rows == [json.loads(line) for line in path.read_text().splitlines()]
    found = 0
    for number, row in enumerate(rows):
        how: Any = spec.resolve_method(SPEC)[1]
        twin = Twin(how, SEARCH.seed + number)
        first, best = twin.tree[0], twin.best
        assert row["messages"] == PROMPTS[0]
        if best is first or best.score <= 0.5 or 6 in (len(best.text), len(first.text)):
            assert row["chosen"] is row["rejected"] is None
        else:
            assert (row["chosen"], row["rejected"]) == (best.text, first.text)
            assert row["scores"] == [best.score, first.score] and best.score > first.score
            found += 1
    assert 1 < found < len(rows) - 1


def test_a_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.train.preferences.pairs.AT_ONCE", 3)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    write_pairs(Scripted(), PROMPTS, whole, SEARCH, quiet)  # type: ignore[arg-type]
    parts.write_text("".join(whole.read_text().splitlines(keepends=True)[:3]))
    lm = Scripted()
    write_pairs(lm, PROMPTS, parts, SEARCH, quiet)  # type: ignore[arg-type]
    assert lm.asked == [8, 9, 10, 11, 12] and parts.read_bytes() == whole.read_bytes()
    with pytest.raises(BadConfig, match="holds pairs of other prompts"):
        write_pairs(lm, ["Hi"] * 8, parts, SEARCH, quiet)  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_is_no_matter_of_others(tmp_path: Path) -> None:
    prompts = [PROMPTS[0], "too long", PROMPTS[0]]
    rows = write_pairs(
        Scripted(), prompts, tmp_path / "pairs.jsonl", SEARCH, lambda *told: None  # type: ignore[arg-type]
    )  # fmt: skip
    assert rows[1] == {**BARE, "prompt": "too long", "error": "this is too long"}
    for number in (0, 2):
        alone = searched(SEARCH.seed + number, SPEC, 6, 1.0)
        assert rows[number] == row_of(PROMPTS[0], alone, 0.5)


def output(text: str, score: float | None, reason: str = "stop") -> Output:
    return Output(text, [1], reason, foretell.core.stats.Stats(), score=score)


def test_what_is_equal_unfinished_or_unjudged_is_no_pair() -> None:
    def found(best: Output, *others: Output, first: int = 1) -> Any:
        best.samples = [best, *others]
        best.stats.notes["first"] = first
        return pair_of(best, 0.5)

    best, other = output("b", 0.8), output("a", 0.2)
    assert found(best, other) == (best, other)
    assert found(best, output("c", 0.6), other, first=2) == (best, other)
    assert found(best, other, output("c", 0.0)) == (best, other)
    assert found(best, other, first=0) is None
    assert found(output("b", 0.5), other) is None
    assert found(output("b", 0.8), output("a", 0.8)) is None
    assert found(output("b\n", 0.8), output(" b", 0.2)) is None
    assert found(output("b", 0.8, "length"), other) is None
    assert found(best, output("a", 0.2, "length")) is None
    assert found(output("b", None), other) is None
    failed = output("", None)
    failed.error = RequestFailed("it failed")
    row = row_of("Hi", failed, 0.5)
    assert row == {"prompt": "Hi", "chosen": None, "rejected": None, "error": "it failed"}


def test_files_of_pairs_are_read_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    good = [
        {"prompt": "The dog", "chosen": " is", "rejected": " was"},
        {"prompt": "The dog", "chosen": None, "rejected": None},
        {"messages": [{"role": "user", "content": "Hi"}], "chosen": "a", "rejected": "b"},
    ]

    def read(*rows: Any) -> Reader:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        reader = Reader(tiny.lm(), 64, "here")
        read_pairs(path, reader)
        return reader

    reader = read(*good)
    assert len(reader.pairs) == 2 and reader.left_out == {"without a pair": 1}
    for name, value in (("chosen", 3), ("rejected", ""), ("rejected", None)):
        with pytest.raises(BadConfig, match=f"pairs.jsonl, row 2: `{name}` must be a text"):
            read(good[0], {**good[0], name: value})
    with pytest.raises(BadConfig, match="row 1: `chosen` must be a text"):
        read({"prompt": "The dog"})
    with pytest.raises(BadConfig, match="line 1: needs one of the fields prompt"):
        read({"chosen": "a", "rejected": "b"})
    with pytest.raises(BadConfig, match=r"gone.jsonl: cannot be read"):
        read_pairs(tmp_path / "gone.jsonl", reader)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"method": "plain"}, "method='plain': must be spar"), ({"above": 1.0}, "above=1.0: must be")],
)
def test_what_cannot_be_searched_is_told(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        Search(**fields)

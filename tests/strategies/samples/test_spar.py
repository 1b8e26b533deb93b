"""The search against plain loops over what a scripted model says with the same draws."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.types import Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.scheduler import FairPlan
from foretell.errors import BadConfig, BadModel, PromptTooLong, Unsupported
from foretell.guidance.cfg import Cfg
from foretell.strategies.plain import Plain
from foretell.strategies.samples.refinement import JUDGE, REFINE
from foretell.strategies.samples.spar import Spar
from foretell.testing.toy import Toy
from tests.speaking import Speaking, chat, one_of, said, spell, tokens_of

SPECS = ["spar:depth=0"]
ASKED = [("user", "Say b, often.")]
PROMPT = tokens_of(ASKED)
TEXT = spell(PROMPT)  # as questions have it
SMALL = {"depth": 3, "branch": 2, "keep": 2, "votes": 3, "tries": 2, "critique": 60, "refined": 40}
LONGEST = 6


def script(question: str, written: str) -> dict[str, float]:
    """The more b an answer has, the more often it is found good; refinements mostly add one."""
    if question.startswith(chat(ASKED)):
        return one_of({"a": 2, "ab": 2, "abb": 1, "c": 1}, written)
    found = re.search(r"The answer:\n(.*?)<end>", question)
    assert found is not None and TEXT in question
    answer = found[1]
    good = answer.count("b") / 5
    if not question.endswith(chat([("user", REFINE)])):
        votes = {"Final Judgement: Yes\n": good, "Final Judgement: No, not\n": 1.0 - good}
        votes["Hm."] = 2.0 if "c" in answer else 0.4
        return one_of({f"It has {answer}. {vote}": part for vote, part in votes.items()}, written)
    assert re.search(r"<assistant>It has \w+\. Final Judgement: (Yes|No)<end>", question)
    new = {f"More.[[start]]{answer}b[[end]]": 4.0, "[[start]]  ac\n[[end]]": 1.0, "So?": 2.0}
    return one_of(new, written)


def ask(seed: int, **more: Any) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, max_new_tokens=LONGEST, **more)


def run(
    config: Any,
    seed: int,
    beside: Sequence[Any] = (),
    budget: Spending | None = None,
    model: Any = None,
    **more: Any,
) -> Live:
    # What is read of a question beside steps is a matter of time, unless there is plenty of it.
    plan = FairPlan(between_tokens=1e9)
    engine = Engine({"target": model or Speaking(script)}, eos=(0,), plan=plan)
    live = engine.add(Request(PROMPT, config, ask(seed, **more), text=spell, budget=budget))
    for number, other in enumerate(beside):
        engine.add(Request(PROMPT, other, ask(50 + number), text=spell))
    list(engine.run())
    if live.error is not None:
        raise live.error
    return live


@dataclass
class Answer:
    text: str
    score: float = 0.0
    critique: str = ""


class Twin:
    """The search by the paper, one question after another."""

    def __init__(self, config: Spar, seed: int):
        self.config, self.seed = config, seed
        self.branches = 2  # the answer's, and an empty one
        self.dropped = self.refinements = self.judgements = 0
        first = said(script, chat(ASKED), Rng(seed), 1.0, LONGEST, lambda text: False)
        self.tree = [Answer(first)]
        self.known = {first}
        level = self.judged(self.tree[:])
        for self.levels in range(config.depth):
            if not level or max(one.score for one in level) > config.gate:
                return
            best = sorted(level, key=lambda one: (one.score, level.index(one)), reverse=True)
            level = self.judged(self.refined(best[: config.keep]))
            self.tree += level

    @property
    def best(self) -> Answer:
        return max(enumerate(self.tree), key=lambda pair: (pair[1].score, pair[0]))[1]

    def say(self, turns: list[list[tuple[str, str]]], copies: list[int], over: Any) -> Any:
        """Branches are numbered as they come: of each question the first, then the others."""
        firsts = range(self.branches, self.branches + len(turns))
        later = self.branches + len(turns)
        found = []
        for first, one, number in zip(firsts, turns, copies, strict=True):
            handles = [first, *range(later, later + number - 1)]
            later += number - 1
            most = self.config.refined if len(one) > 1 else self.config.critique
            texts = [said(script, chat(one), Rng(self.seed, handle), self.config.t, most, over)
                     for handle in handles]  # fmt: skip
            found.append(texts)
        self.branches = later
        return found

    def question(self, answer: str) -> list[tuple[str, str]]:
        return [("user", JUDGE.format(prompt=TEXT, answer=answer))]

    def judged(self, level: list[Answer]) -> list[Answer]:
        over = re.compile(r"Final Judgement: (Yes|No)\W").search
        left, done = list(level), []
        for _ in range(self.config.tries):
            if not left:
                break
            turns = [self.question(one.text) for one in left]
            self.judgements += len(left) * self.config.votes
            for one, texts in zip(
                left[:], self.say(turns, [self.config.votes] * len(left), over), strict=True
            ):
                yes = [text for text in texts if "Judgement: Yes" in text]
                no = [text for text in texts if "Judgement: No" in text]
                if len(yes) != len(no):
                    one.score = len(yes) / len(yes + no)
                    vote = "Yes" if len(yes) > len(no) else "No"
                    full = (yes if len(yes) > len(no) else no)[0]
                    one.critique = full[: full.index(f"Judgement: {vote}") + 11 + len(vote)]
                    left.remove(one)
                    done.append(one)
        self.dropped += len(left)
        return [one for one in level if one in done]

    def refined(self, level: list[Answer]) -> list[Answer]:
        lacking = {one.text: self.config.branch for one in level}
        fresh = []
        for _ in range(self.config.tries):
            asked = [one for one in level if lacking[one.text]]
            if not asked:
                break
            turns = [[*self.question(one.text), ("assistant", one.critique), ("user", REFINE)]
                     for one in asked]  # fmt: skip
            copies = [lacking[one.text] for one in asked]
            self.refinements += sum(copies)
            for one, texts in zip(
                asked, self.say(turns, copies, lambda text: text.endswith("[[end]]")), strict=True
            ):
                for text in texts:
                    if not text.endswith("[[end]]"):
                        continue
                    lacking[one.text] -= 1
                    self.branches += 1
                    new = text[text.index("[[start]]") + 9 : -7].strip()[:LONGEST]
                    if new not in self.known:
                        self.known.add(new)
                        fresh.append(Answer(new))
        return fresh


def test_it_is_the_search_of_the_paper() -> None:
    passed = dropped = deep = retried = 0
    for seed in range(5):
        config = Spar(**SMALL)
        twin = Twin(config, seed)
        live = run(config, seed)
        want = twin.best
        assert spell(live.ctx.output) == want.text
        assert live.reason == ("length" if len(want.text) == LONGEST else "stop")
        told = [(spell(tokens), score) for tokens, score, _ in live.answers]
        assert told[0] == (want.text, want.score)
        assert sorted(told) == sorted((one.text, one.score) for one in twin.tree)
        notes = live.ctx.stats.notes
        assert told[int(notes.get("first", 0))] == (twin.tree[0].text, twin.tree[0].score)
        assert notes["judgements"] == twin.judgements
        assert notes.get("refinements", 0) == twin.refinements
        assert list(live.ctx.branches) == [0] and not live.caches
        passed += want.score > config.gate
        dropped += twin.dropped > 0
        deep += twin.levels > 1
        retried += twin.judgements > config.votes * len(twin.tree)
    assert passed > 1 and dropped and deep and retried


def test_a_slip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores the earlier one, in place of the later."""
    monkeypatch.setattr(
        "foretell.strategies.samples.spar.sort_best_first",
        lambda nodes: sorted(nodes, key=lambda one: -one.score),
    )
    config = Spar(**SMALL)
    assert any(spell(run(config, seed).ctx.output) != Twin(config, seed).best.text
               for seed in range(6))  # fmt: skip


def test_without_depth_it_is_the_sample() -> None:
    for seed in range(3):
        live = run(Spar(depth=0), seed)
        assert live.ctx.output == run(Plain(), seed).ctx.output and not live.answers


def test_a_drafter_changes_no_text_and_saves_forwards() -> None:
    plain = run(Spar(**SMALL), 1)
    drafted = run(Spar(**SMALL, inner=Ngram()), 1)
    assert drafted.answers == plain.answers
    assert drafted.ctx.stats.calls["target"] < plain.ctx.stats.calls["target"]


def test_other_requests_change_nothing() -> None:
    config = Spar(**SMALL)
    alone = run(config, 1)
    assert run(config, 1, beside=[Plain(), config]).answers == alone.answers


def test_a_budget_ends_it_with_the_best_so_far() -> None:
    seed = next(seed for seed in range(9) if Twin(Spar(**SMALL), seed).levels > 1)
    whole = run(Spar(**SMALL), seed)
    every = {spell(tokens): score for tokens, score, _ in whole.answers}
    needed = whole.ctx.stats.calls["target"]
    scores = []
    for forwards in (needed // 8, needed // 2, needed * 9 // 10):
        live = run(Spar(**SMALL), seed, budget=Spending(forwards=forwards))
        assert live.reason == "budget"
        # Questions that were asked before it was spent are long, and read in several forwards.
        assert live.ctx.stats.calls["target"] < forwards + 4
        told = [(spell(tokens), score) for tokens, score, _ in live.answers]
        assert told[0][1] == max(score for _, score in told)
        assert all(score in (every[text], 0.0) for text, score in told), "0: not judged yet"
        scores.append(len(told))
    assert scores[0] == 1 < scores[-1] < len(every), "what was judged by then counts"
    early = run(Spar(**SMALL), seed, budget=Spending(forwards=1))
    assert early.reason == "budget" and len(early.ctx.output) <= 1


def test_an_answer_that_cannot_be_judged_is_the_answer() -> None:
    def mute(question: str, written: str) -> dict[str, float]:
        return one_of({"a": 1.0} if question == chat(ASKED) else {"Not yes, nor no.": 1.0}, written)

    live = run(Spar(**SMALL), 0, model=Speaking(mute))
    assert spell(live.ctx.output) == "a" and live.answers[0][1] == 0.0
    assert live.ctx.stats.notes == {"judgements": 6}


class Letters:
    """A form: a constraint of texts of these letters, with an end anywhere."""

    def __init__(self, letters: str):
        self.letters = {ord(letter) for letter in letters}

    def track(self) -> Any:
        form = self.letters

        class Track:
            def permits(self, output: Sequence[int]) -> bool:
                return {*output} <= form

            whole = permits

            def allowed(self, output: Sequence[int]) -> torch.Tensor:
                mask = torch.zeros(128, dtype=torch.bool)
                mask[sorted(form)] = True
                return mask

            def forced(self, output: Sequence[int]) -> list[int]:
                return []

        return Track()


def test_refinements_of_another_form_are_left_out() -> None:
    others = 0
    for seed in range(2):
        live = run(Spar(**SMALL), seed, constraint=Letters("ab"))
        texts = [spell(tokens) for tokens, _, _ in live.answers]
        assert all({*text} <= {*"ab"} for text in texts), "a refinement `ac` is of no use"
        others += len(texts) > 1
    assert others


def test_numbers_that_are_none_are_the_models_fault() -> None:
    def broken(question: str, written: str) -> dict[str, float]:
        return one_of({"a": 1.0}, written) if question == chat(ASKED) else {"a": np.nan}

    with pytest.raises(BadModel, match="not numbers"):
        run(Spar(**SMALL), 0, model=Speaking(broken))


def test_what_cannot_be_is_refused() -> None:
    for fields in ({"depth": 17}, {"branch": 0}, {"keep": 0}, {"votes": 65}, {"gate": 1.5},
                   {"tries": 0}, {"t": -1}, {"critique": 1}, {"refined": 1}):  # fmt: skip
        with pytest.raises(BadConfig, match=f"spar:{next(iter(fields))}"):
            Spar(**fields)
    with pytest.raises(Unsupported, match="spar cannot run on toy: it needs a tokenizer that can"):
        run(Spar(), 0, model=Toy(128))
    with pytest.raises(PromptTooLong, match=r"takes a context of .* holds 600; lower max_new"):
        run(Spar(), 0, model=Speaking(script, context=600))
    with pytest.raises(BadConfig, match="cannot honour logprobs"):
        run(Spar(), 0, logprobs=1)
    request = Request(PROMPT, Spar(), ask(0), text=spell, source=Cfg())
    with pytest.raises(BadConfig, match="spar reads the target itself"):
        Engine({"target": Speaking(script)}).add(request)
    with pytest.raises(Unsupported, match=r"spar cannot run on .*: it needs a tokenizer"):
        Engine({"target": Speaking(script)}).add(Request(PROMPT, Spar(), ask(0)))

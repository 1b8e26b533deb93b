"""Reasoning in rounds against plain loops over what a scripted model says with the same draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.guidance.cfg import Cfg
from foretell.strategies.plain import Plain
from foretell.strategies.samples.infty_think import InftyThink
from foretell.strategies.samples.segments import LIST, UPDATE, Plan
from foretell.testing.toy import Toy
from tests.cache.users import Evictor
from tests.speaking import Chat, Script, Speaking, chat, drawn, logits, one_of, spell, tokens_of

SPECS = ["infty-think:rounds=1"]
ASKED = [("user", "How many?")]
PROMPT = tokens_of(ASKED)
BEFORE, BEHIND, CLOSE = "<history>", "</history>", "\n</summary>\n"
SET = InftyThink(segment=90, summary=40, ask=False)
TOLD = InftyThink(segment=520, summary=60)


def trained(question: str, written: str) -> dict[str, float]:
    """Counts one further a round, now and then without an end of its summary, up to four."""
    if question != chat(ASKED):  # a draft after special tokens
        return {"": 1.0}
    known = written.partition(BEHIND)[0].count("*") if BEHIND in written else 0
    stem = written[: written.index(BEHIND) + len(BEHIND)] if known else ""
    if known == 4:
        return one_of({f"{stem}<think>\nok\n</think>\nFour.": 1.0}, written)
    thought = f"{stem}<think>\n{'hm, ' * (known + 1)}\n</think>\n<summary>\n{'*a' * (known + 1)}"
    ends = {f"{thought}\n</summary>": 3.0, f"{thought[:-1]}b": 1.0, f"{stem}<think>\nno": 0.3}
    return one_of(ends, written)


def untrained(question: str, written: str) -> dict[str, float]:
    """Goes on for ever, unless its history is rich; says what it is asked."""
    if question.startswith(chat(ASKED)) and question != chat(ASKED):
        before = question.count("*") - LIST.count("*") * (LIST in question)
        before -= UPDATE.count("*") * (UPDATE in question)
        stars = "*" * (before + 1)
        return one_of({f"{stars} so": 2.0, f"<summary>{stars}</summary>": 1.0, " ": 0.5}, written)
    begun = written.rpartition(BEHIND)[2]
    if written.count("*") >= 3 and len(begun) >= 12:
        return {"": 1.0}
    place = written.rpartition("<summary>\n")
    if place[1] and "</summary>" not in place[2]:
        return one_of(
            {f"{'*' * len(begun)}"[:3] + "\n</summary>": 1.0, "**": 1.0, " \n": 0.3}, place[2]
        )
    return {"a": 1.0, "b": 1.0, "c": 0.5}


def run(
    config: Any,
    script: Script,
    seed: int = 0,
    beside: Sequence[Any] = (),
    model: Any = None,
    budget: Spending | None = None,
    policy: Any = None,
    prompt: Sequence[int] = PROMPT,
    **options: Any,
) -> Live:
    engine = Engine(
        {"target": model or Speaking(script)}, eos=(0,), plan=FairPlan(between_tokens=1e9)
    )
    costs = engine.costs_of(engine.models["target"])
    costs.seconds = {1: 1.0, 8: 1.05, 16: 1.1, 128: 3.0}  # no clock decides what is drafted
    costs.freeze_curve()
    asked = {"max_new_tokens": 4000, "temperature": 1.0, "seed": seed, **options}
    request = Request(prompt, config, Sampling(**asked), text=spell, budget=budget, policy=policy)
    live = engine.add(request)
    for number, other in enumerate(beside):
        engine.add(Request(prompt, other, Sampling(max_new_tokens=300, seed=number), text=spell))
    live.events = list(engine.run())  # type: ignore[attr-defined]
    if live.error is not None:
        raise live.error
    return live


@dataclass
class Twin:
    """The loop of the paper, a character at a time; `longest` counts tokens before the model."""

    config: InftyThink
    script: Script
    seed: int
    text: str = ""
    reason: str = "length"
    rounds: int = 0
    forced: int = 0
    longest: int = 0
    histories: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        most = self.config.summary - len(BEFORE + BEHIND)
        opened = "\n</think>\n<summary>\n"
        tails = ["<end><user>" + words + "<end><assistant>" for words in (LIST, UPDATE)]
        sizes = [len(words) + 4 for words in (LIST, UPDATE)]  # four special tokens
        reserve = most + (max(sizes) if self.config.ask else len(opened) + len(CLOSE))
        history = ""
        while self.rounds < self.config.rounds:
            self.rounds += 1
            rng = Rng(self.seed, self.rounds if self.rounds > 1 else 0)
            begin = f"{BEFORE}{history}{BEHIND}" if history else ""
            size = len(PROMPT) + len(begin)
            last = self.rounds == self.config.rounds
            new, limit, found = "", self.config.segment - (0 if last else reserve), None
            while len(new) < limit:
                token = self.draw(chat(ASKED), begin + new, rng, len(new))
                if token == "" and found is None:
                    self.reason = "stop"
                    self.longest = max(self.longest, size + len(new) + 1)
                    self.text += new
                    return
                if token == "":
                    break
                new += token
                if found is None and new.endswith("<summary>"):
                    found = len(new)
                    limit = min(self.config.segment, found + most + len(CLOSE))
                elif found is None and new.endswith("</think>"):
                    limit = self.config.segment
                if found is not None and new.endswith("</summary>"):
                    break
            self.text += new
            count = len(new)
            if found is not None:
                summary = new[found:]
                self.text += "" if new.endswith("</summary>") else CLOSE
            elif last or "</think>" in new:
                self.longest = max(self.longest, size + count)
                return
            else:
                self.forced += 1
                opened = "\n</think>\n<summary>\n" if "<think>" in new else "\n<summary>\n"
                self.text += opened
                later = bool(history)
                asked = chat(ASKED) + begin + new + tails[later]
                count += sizes[later] if self.config.ask else len(opened)
                summary = ""
                while len(summary) < most + (0 if self.config.ask else len(CLOSE)):
                    before = ("", asked) if self.config.ask else (begin + new + opened, chat(ASKED))
                    token = self.draw(before[1], before[0] + summary, rng, count)
                    if token == "":
                        break
                    summary += token
                    count += 1
                    if summary.endswith("</summary>"):
                        break
                self.text += summary
                self.text += "" if summary.endswith("</summary>") else CLOSE
            self.longest = max(self.longest, size + count)
            summary = summary.split("</summary>")[0].split("<summary>")[-1].strip()
            history = summary[:most] or history
            self.histories.append(history)

    def draw(self, question: str, written: str, rng: Rng, position: int) -> str:
        token = drawn(logits(self.script(question, written)), 1.0, rng, position)
        return chr(token) if token else ""


CASES = [
    (SET, trained, 3),
    (replace(SET, rounds=6), untrained, 3),
    (replace(TOLD, rounds=4), untrained, 1),
]


@pytest.mark.parametrize(("config", "script", "seeds"), CASES)
def test_it_is_the_loop_of_the_paper(config: InftyThink, script: Script, seeds: int) -> None:
    rounds = forced = 0
    for seed in range(seeds):
        live, twin = run(config, script, seed), Twin(config, script, seed)
        assert spell(live.ctx.output) == twin.text and live.reason == twin.reason
        notes = live.ctx.stats.notes
        assert (notes["rounds"], notes["forced"]) == (twin.rounds, twin.forced)
        assert abs(notes["longest"] - twin.longest) <= 1  # an end after a summary is a token too
        rounds += twin.rounds
        forced += twin.forced
    assert rounds >= 3 * seeds and bool(forced) == (script is untrained)


def test_a_slip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first summary is kept, in place of the newest."""
    slipped = Plan.history
    monkeypatch.setattr(Plan, "history", lambda plan, tokens: slipped(plan, tokens)[:1])
    assert spell(run(SET, trained).ctx.output) != Twin(SET, trained, 0).text


def rows(live: Live) -> int:
    """That all of a request's caches hold, scratch rows included."""
    return sum(cache.base + len(cache.tokens) for cache in live.caches.values())


@pytest.mark.parametrize("config", [SET, replace(SET, inner=Ngram()), TOLD])
def test_rows_are_never_above_question_summary_and_segment(config: InftyThink) -> None:
    bound = len(PROMPT) + config.summary + config.segment
    engine = Engine({"target": Speaking(endless)}, eos=(0,))
    asked = Sampling(max_new_tokens=2 * config.segment + 200, temperature=1.0)
    live = engine.add(Request(PROMPT, config, asked, text=spell))
    most = 0
    while engine.live:
        engine.step()
        most = max(most, rows(live))
        assert len(live.caches) <= 1 and rows(live) <= bound
    notes = live.ctx.stats.notes
    assert notes["rounds"] > 2 and live.reason == "length"
    assert most >= notes["longest"] - 1 >= bound - 10, "the bound was put to the test"


def endless(question: str, written: str) -> dict[str, float]:
    """Never comes to an end, of thoughts and summaries alike."""
    return {"a": 1.0, "b": 2.0, "c": 0.5}


def test_a_text_of_one_round_is_that_of_plain_decoding() -> None:
    for seed in range(2):
        for config, script in ((SET, untrained), (InftyThink(rounds=1), endless)):
            plain = run(Plain(), script, seed, max_new_tokens=50)
            live = run(config, script, seed, max_new_tokens=50)
            assert live.ctx.output == plain.ctx.output and live.reason == plain.reason
            assert live.ctx.stats.calls == plain.ctx.stats.calls
            assert live.ctx.stats.steps == plain.ctx.stats.steps


def test_it_is_streamed_as_it_is_written() -> None:
    live = run(SET, trained, 2)
    events = live.events  # type: ignore[attr-defined]
    assert [token for event in events for token in event.tokens] == live.ctx.output
    assert all(len(event.tokens) == len(event.sources) for event in events)
    assert len(events) == live.ctx.stats.steps + 2, "one a step, the marks, and the end"
    assert list(live.ctx.branches) == [0] and not live.caches
    assert live.ctx.stats.mat == pytest.approx(243 / 232, abs=0.01)
    marks = [source for event in run(SET, endless, max_new_tokens=200).events  # type: ignore[attr-defined]
             for source in event.sources]  # fmt: skip
    assert marks.count("infty-think") == 2 * len("\n<summary>\n" + CLOSE)


def test_a_drafter_changes_no_text_and_saves_forwards() -> None:
    accepted = 0
    for script in (trained, untrained):
        plain = run(SET, script, 2, max_new_tokens=260)
        drafted = run(replace(SET, inner=Ngram()), script, 2, max_new_tokens=260)
        assert drafted.ctx.output == plain.ctx.output
        for note in ("rounds", "forced"):
            assert drafted.ctx.stats.notes[note] == plain.ctx.stats.notes[note]
        assert drafted.ctx.stats.notes["rounds"] > 2
        accepted += drafted.ctx.stats.accepted
        if script is trained:
            assert drafted.ctx.stats.calls["target"] < plain.ctx.stats.calls["target"]
    assert accepted


def test_a_cache_policy_holds_in_every_round() -> None:
    toy = Toy(128, 2, copy=20.0)
    toy.tokenizer = Chat()
    options: dict[str, Any] = {"model": toy, "max_new_tokens": 200, "temperature": 0.0}
    whole = run(SET, trained, **options).ctx.output
    plain = run(SET, trained, policy=Evictor(), **options)
    drafted = run(replace(SET, inner=Ngram()), trained, policy=Evictor(), **options)
    assert drafted.ctx.output == plain.ctx.output != whole
    assert plain.ctx.stats.notes["rounds"] > 2 and drafted.ctx.stats.accepted


def test_other_requests_change_nothing() -> None:
    alone = run(SET, trained, 2, max_new_tokens=150)
    beside = run(SET, trained, 2, beside=[SET, Plain()], max_new_tokens=150)
    assert beside.ctx.output == alone.ctx.output and alone.ctx.stats.notes["rounds"] > 2


def test_a_length_or_a_budget_ends_it_anywhere() -> None:
    whole = run(SET, trained, 2).ctx.output
    for count in (91, 150, 239):
        live = run(SET, trained, 2, max_new_tokens=count)
        assert live.reason == "length" and len(live.ctx.output) == count
    for forwards in (20, 150):
        live = run(SET, trained, 2, budget=Spending(forwards=forwards))
        assert live.reason == "budget" and live.ctx.output == whole[: len(live.ctx.output)]
        assert live.ctx.stats.calls["target"] <= forwards
    early = Engine({"target": Speaking(trained)}, eos=(0,))
    live = early.add(Request(PROMPT, SET, Sampling(max_new_tokens=400), text=spell))
    for _ in range(100):
        early.step()
    early.end(live)
    assert not live.caches and not early.live


def test_options_hold_in_all_rounds() -> None:
    stopped = run(SET, trained, 2, stop=("hm, hm, hm",))
    assert stopped.reason == "stop" and spell(stopped.ctx.output).endswith("hm, hm, hm")
    assert stopped.ctx.stats.notes["rounds"] == 3
    early, late = run(SET, untrained, 1), run(SET, untrained, 1, min_new_tokens=150)
    assert len(early.ctx.output) < 150 <= len(late.ctx.output)
    assert early.ctx.stats.notes["rounds"] > 1, "tokens of all rounds are counted"
    assert late.ctx.output[: len(early.ctx.output) - 1] == early.ctx.output[:-1]
    banned = run(SET, endless, 0, bad_words=[[ord("a")]], max_new_tokens=200)
    assert "a" not in spell(banned.ctx.output).replace("summary", "")


def test_a_history_stands_before_thoughts_that_the_prompt_opens() -> None:
    seen = []

    def script(question: str, written: str) -> dict[str, float]:
        seen.append(written)
        return endless(question, written)

    opened = [*PROMPT, *b"<think>\n"]
    live = run(SET, script, prompt=opened, max_new_tokens=200)
    text = spell(live.ctx.output)
    assert text.count("\n</think>\n<summary>\n") == live.ctx.stats.notes["forced"] == 2
    later = [text for text in seen if text.startswith(BEFORE)]
    assert later and all("</history><think>\n" in text for text in later)


def test_what_cannot_be_is_refused() -> None:
    for fields in ({"rounds": 0}, {"segment": 1}, {"summary": 1}):
        with pytest.raises(BadConfig, match=f"infty-think:{next(iter(fields))}"):
            InftyThink(**fields)  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match=r"infty-think:summary=12: must be at least 20"):
        run(InftyThink(summary=12), trained)
    with pytest.raises(BadConfig, match=r"infty-think:segment=90: must be above 93, which"):
        run(InftyThink(segment=90, summary=80, ask=False), trained)
    small = Speaking(trained, context=140)
    with pytest.raises(PromptTooLong, match=r"takes a context of .*holds 140; lower infty-think:s"):
        run(SET, trained, model=small, max_new_tokens=300)
    run(SET, trained, model=Speaking(trained, context=150), max_new_tokens=300)
    with pytest.raises(BadConfig, match="infty-think cannot honour logprobs"):
        run(SET, trained, logprobs=1)
    with pytest.raises(BadConfig, match="infty-think cannot honour constraint"):
        run(SET, trained, constraint=Anything())
    with pytest.raises(Unsupported, match="infty-think cannot run on toy: it needs a tokenizer"):
        run(SET, trained, model=Toy(128))
    request = Request(PROMPT, SET, Sampling(max_new_tokens=999), text=spell, source=Cfg())
    with pytest.raises(BadConfig, match="infty-think reads the target itself"):
        Engine({"target": Speaking(trained)}).add(request)


class Anything:
    """A form that all texts have."""

    def track(self) -> Any:
        return self

    def permits(self, output: Sequence[int]) -> bool:
        return True

    whole = permits

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        return torch.ones(128, dtype=torch.bool)

    def forced(self, output: Sequence[int]) -> list[int]:
        return []

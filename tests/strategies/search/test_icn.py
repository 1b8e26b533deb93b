"""In-context navigation against loops over the toy's rows and texts put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.tokenizer_bytes import Words
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.plain import Plain
from foretell.strategies.search.icn import Icn, Listing
from foretell.testing.toy import Toy
from tests import laws
from tests.cache.users import Evictor
from tests.engine.users import Guidance

SPECS = ["icn:runs=2,each=3,navigate=no"]
PIECES = (b"1", b"2", b"3", b". ", b'"', b"\n", b"a", b"b", b"c", b"ab", b"d", b"a", b"4")
END = len(PIECES)
WORDS = Words(PIECES)
TEXT = 'ab\n1. "'
STOPPED = Sampling(max_new_tokens=6, stop=('"',))


def spell(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens if token != END).decode()


def toy(seed: int) -> Toy:
    model = Toy(END + 1, seed, sharpness=3.0)
    model.tokenizer = WORDS
    return model


def write(config: Any, seed: int, sampling: Sampling = STOPPED, prompt: str = TEXT) -> Live:
    engine = Engine({"target": toy(seed)}, eos=(END,))
    live = engine.add(Request(WORDS.encode(prompt.encode()), config, sampling, text=spell))
    list(engine.run())
    assert live.error is None, live.error
    return live


def continued(seed: int, token: int, count: int) -> list[int]:
    """Greedily after the prompt and this token."""
    output = [token]
    while len(output) < count and output[-1] != END and '"' not in spell(output):
        row = laws.row(toy(seed), [*WORDS.encode(TEXT.encode()), *output])
        output.append(row.index(max(row)))
    return output


def expected(config: Icn, seed: int) -> list[list[int]]:
    """All answers; each list is written anew, as a text."""
    answers: list[list[int]] = []
    used: set[str] = set()
    for _ in range(config.runs):
        text = "ab\n"
        for number, answer in enumerate(answers if config.navigate else [], 1):
            text += f'{number}. "{spell(answer).partition(chr(34))[0]}"\n'
        text += f'{len(answers) + 1 if config.navigate else 1}. "'
        ids = WORDS.encode(text.encode())
        row = laws.row(toy(seed), ids)
        fresh: list[list[int]] = []
        for token in sorted(range(END), key=lambda token: -row[token]):
            if len(fresh) < config.each and spell([token]) not in used:
                used.add(spell([token]))
                fresh.append(continued(seed, token, 6))
        answers += fresh
    return answers


@pytest.mark.parametrize("config", [Icn(2, 2), Icn(3, 1), Icn(2, 3, navigate=False)])
def test_the_answers_are_those_of_plain_loops(config: Icn) -> None:
    moved = 0
    for seed in range(8):
        live = write(config, seed)
        answers = expected(config, seed)
        assert [tokens for tokens, _, _ in live.answers] == answers
        assert live.ctx.output == answers[0] and not live.caches
        firsts = [spell(tokens[:1]) for tokens in answers]
        assert len(set(firsts)) == len(firsts) == config.runs * config.each
        moved += answers != expected(replace(config, navigate=not config.navigate), seed)
        for tokens, _, reason in live.answers:
            ended = tokens[-1] == END or '"' in spell(tokens)
            assert reason == ("stop" if ended else "length")
    assert moved, "the list changed no ranking: nothing was tested"


def test_the_first_answer_is_that_of_greedy_decoding() -> None:
    alike = 0
    for seed in range(8):
        sampling = replace(STOPPED, logprobs=2)
        plain, many = write(Plain(), seed, sampling), write(Icn(2, 2), seed, sampling)
        one = write(Icn(1, 1), seed, sampling)
        assert one.ctx.output == plain.ctx.output and one.logprobs == plain.logprobs
        assert one.ctx.stats.calls == plain.ctx.stats.calls
        if plain.ctx.output[0] != END:
            assert many.ctx.output == plain.ctx.output and many.logprobs == plain.logprobs
            alike += 1
    assert alike > 4


def test_the_answers_of_a_run_share_their_forwards() -> None:
    live = write(Icn(3, 4), 1)
    longest = 3 * STOPPED.max_new_tokens
    assert live.ctx.stats.calls["target"] <= longest + 2 and len(live.answers) == 12
    assert live.ctx.stats.notes == {"runs": 3}


def test_runs_end_where_there_are_no_new_first_tokens() -> None:
    live = write(Icn(10, 5), 0)
    assert len(live.answers) == len(set(PIECES)) and live.ctx.stats.notes["runs"] == 3


def test_where_the_budget_is_spent_the_answers_so_far_are_told() -> None:
    whole = write(Icn(3, 4), 1)
    request = Request(WORDS.encode(TEXT.encode()), Icn(3, 4), STOPPED, text=spell)
    engine = Engine({"target": toy(1)}, eos=(END,))
    live = engine.add(replace(request, budget=Spending(forwards=10)))
    list(engine.run())
    assert live.reason == "budget" and 0 < len(live.answers) < 12
    assert list(live.answers) == list(whole.answers)[: len(live.answers)]


def test_a_list_is_made_of_the_last_line() -> None:
    def listed(prompt: str, stop: tuple[str, ...], *answers: str) -> str:
        sampling = Sampling(stop=stop, max_new_tokens=3)
        ctx = write(Plain(), 0, sampling, prompt).ctx
        listing = Listing(ctx, WORDS)
        paths = [Answer(WORDS.encode(answer.encode())) for answer in answers]
        return spell(listing.prompt(paths))  # type: ignore[arg-type]

    assert listed(TEXT, ('"',), 'a"', 'c"\n') == 'ab\n1. "a"\n2. "c"\n3. "'
    assert listed("d\nb", (), "a", "c") == "d\nba\nbc\nb"
    assert listed("dab", ("\n",), "a\n", "c") == "daba\ndabc\ndab"
    assert listed("ab\n", (), "a", "c") == "ab\na\nc\n"
    assert listed("a\n12", ("c",), "b") == "a\n12bc\n12"


class Answer:
    def __init__(self, tokens: list[int]):
        self.tokens = tokens


def test_what_it_cannot_honour_is_refused_by_name() -> None:
    engine = Engine({"target": toy(0)})
    with pytest.raises(BadConfig, match="icn cannot honour temperature"):
        engine.add(Request([0, 1], Icn(), Sampling(temperature=1.0), text=spell))
    with pytest.raises(BadConfig, match="icn reads the target itself"):
        engine.add(Request([0, 1], Icn(), text=spell, source=Guidance()))
    with pytest.raises(BadConfig, match="under the cache policy"):
        engine.add(Request([0, 1], Icn(), text=spell, policy=Evictor()))
    with pytest.raises(Unsupported, match="icn cannot run on toy: it needs a tokenizer"):
        engine.add(Request([0, 1], Icn()))
    with pytest.raises(BadConfig, match="runs"):
        Icn(runs=0)
    with pytest.raises(BadConfig, match="each"):
        Icn(each=257)

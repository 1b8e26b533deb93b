"""The comment cue: the answer is plain decoding's after prompt and cue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.suffix import Suffix
from foretell.engine.engine import Engine
from foretell.errors import PromptTooLong, Unsupported
from foretell.strategies.plain import Plain
from foretell.strategies.samples.mango import Mango
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws, tiny

SPECS = ["mango:cue=ab,inner=suffix"]
CODE = "Add two numbers.\n"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("inner", [None, Suffix()])
def test_the_answer_is_that_behind_prompt_and_cue(inner: Suffix | None, temperature: float) -> None:
    lm = tiny.lm()
    cue = "# add them\n"
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 16, "seed": 5}
    options |= {"ignore_eos": True, "logprobs": 2}
    output = lm.generate(CODE, Mango(cue, inner), **options)
    plain = lm.generate(lm.encode(CODE + cue), "plain", **options)
    assert len(output.tokens) == 16 and output.finish_reason == plain.finish_reason == "length"
    if not temperature:
        assert output.tokens == plain.tokens
        values = [[one["logprob"] for one in each.logprobs or ()] for each in (output, plain)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
        assert output.tokens != lm.generate(CODE, "plain", **options).tokens
    assert [piece.tokens for piece in lm.stream(CODE, Mango(cue, inner), **options) if piece.tokens]


def test_without_a_cue_it_is_plain_decoding() -> None:
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_new_tokens=9, temperature=temperature, logprobs=1)
        engine = Engine({"target": Toy(5, 1, copy=1.0)})
        lives = [
            engine.add(Request([0, 1, 2], config, sampling)) for config in (Mango(""), Plain())
        ]
        list(engine.run())
        off, plain = lives
        assert off.ctx.output == plain.ctx.output and off.logprobs == plain.logprobs
        assert off.ctx.stats.calls == plain.ctx.stats.calls


def run(config: Mango, target: Toy | ToyRecurrent, prompt: Sequence[int], **more: int) -> list[int]:
    engine = Engine({"target": target})
    live = engine.add(Request(prompt, config, Sampling(**more), text=laws.spell))  # type: ignore[arg-type]
    list(engine.run())
    if live.error is not None:
        raise live.error
    assert not live.caches and list(live.ctx.branches) == [0]
    return live.ctx.output


def test_chains_are_enough_and_the_limit_is_the_answers_own() -> None:
    assert len(run(Mango("abc"), ToyRecurrent(5), [1, 2], max_new_tokens=4)) == 4
    assert len(run(Mango("abc"), Toy(5, context=8), [1, 2], max_new_tokens=40)) == 3
    with pytest.raises(PromptTooLong):
        run(Mango("abcabc"), Toy(5, context=8), [1, 2], max_new_tokens=4)


class Seeing(Toy):
    """A toy that takes pictures, and looks at none."""

    caps = Toy.caps | {"pictures"}


def test_prompts_that_are_more_than_text_are_refused() -> None:
    target = Toy(5)
    target.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="mango cannot run on toy: it needs a tokenizer"):
        run(Mango(), target, [1, 2])
    with pytest.raises(Unsupported, match="this request has pictures"):
        Engine({"target": Seeing(5)}).add(Request([1, 2], Mango(), inputs={"pictures": [1]}))

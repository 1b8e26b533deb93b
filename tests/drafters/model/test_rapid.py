"""RAPID: what is retrieved, what is drafted from it, and that the text's law stays; its exactness
in general is in test_laws.py, that of its rule in verification/test_augmented.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.rapid import Rapid, State, bm25_scores, retrieve_context
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["rapid:length=2,context=4,chunk=1,query=2"]
SHORT = Rapid(length=3, context=6, chunk=2, query=2)
PROMPT = [5, 1, 2, 0, 3, 3, 1, 7, 4, 6, 0, 2, 1, 6, 1, 3]
READ = [5, 1, 3, 3, 1, 3]  # of these, with SHORT: the chunk 3 3 has more in common with 1 3


# --- what is retrieved


def test_the_first_chunk_the_question_and_what_answers_it_are_kept_in_order() -> None:
    assert retrieve_context(PROMPT, 6, 2, 2) == READ
    assert retrieve_context(PROMPT, 8, 2, 2) == [5, 1, 3, 3, 1, 7, 1, 3]
    assert retrieve_context(PROMPT, 15, 2, 2) == [5, 1, 3, 3, 1, 7, 1, 6, 1, 3], (
        "nothing without a hit"
    )
    assert retrieve_context(PROMPT, 16, 2, 2) == PROMPT == retrieve_context(PROMPT, 99, 2, 2)
    assert retrieve_context(PROMPT, 3, 2, 2) == PROMPT[-3:], "there is no room for the first chunk"
    assert retrieve_context(PROMPT, 3, 9, 20) == PROMPT[-3:]
    for room in range(1, 20):
        assert len(retrieve_context(PROMPT, room, 3, 2)) <= room


def test_scores_are_those_of_the_formula() -> None:
    chunks = [[1, 2, 3], [1, 1, 4], [5, 6, 5], [2, 2]]
    query = [1, 2, 2, 9]
    for place, chunk in enumerate(chunks):
        want = 0.0
        for token in {1, 2, 9}:
            found = sum(token in other for other in chunks)
            n = chunk.count(token)
            weight = math.log(1 + (4 - found + 0.5) / (found + 0.5))
            norm = 1.5 * (1 - 0.75 + 0.75 * len(chunk) / (11 / 4))
            want += weight * n * 2.5 / (n + norm)
        assert bm25_scores(chunks, query)[place] == pytest.approx(want, abs=1e-12)
    assert bm25_scores(chunks, query)[2] == 0


# --- what is drafted


@pytest.mark.parametrize("model", ["draft", "target"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_models_own_over_what_was_retrieved(model: str, temperature: float) -> None:
    """At every step: positions, the text that was written since, options, and the laws told."""
    steps = []

    class Watched(Rapid):
        def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
            tree = yield from super().steps(ctx, state, budget)
            steps.append((list(ctx.output), tree))
            if state.branch >= 0:
                assert ctx.branches[state.branch].tokens == [*READ, *ctx.output]
            return tree

    drafter = Watched(model, 3, 6, 2, 2)
    sampling = Sampling(temperature=temperature, repetition_penalty=1.3, max_new_tokens=25)
    models: dict[str, Model] = {"target": Toy(8, copy=2.0), "draft": Toy(8, 4, copy=2.0)}
    live = laws.generate(Speculative(drafter, nodes=3), PROMPT, laws.Setting(sampling), models)
    toy = models[model]
    assert isinstance(toy, Toy)

    def rows(output: Sequence[int]) -> list[float]:
        return laws.row(toy, [*READ, *output])

    drafted = 0
    for output, tree in steps:
        for node in range(1, len(tree)):
            text = [*output, *tree.tokens_to(tree.parents[node])]
            want = laws.expected_law(toy, PROMPT, text, laws.Setting(sampling), rows)
            law = tree.laws[node]
            if law is None:
                assert want[tree.tokens[node]] == 1.0
            else:
                assert law.probs.tolist() == pytest.approx(want, abs=1e-12)
            drafted += 1
    assert drafted > 12 and live.ctx.stats.accepted


@pytest.mark.parametrize("setting", ["plain", "top-p", "penalties", "end", "form"])
@pytest.mark.parametrize("model", ["draft", "target"])
def test_the_target_over_the_whole_prompt_decides(model: str, setting: str) -> None:
    drafter = Rapid(model, length=2, context=4, chunk=1, query=2)
    laws.check_law(Speculative(drafter, nodes=2), setting, 2)


def test_the_target_drafts_for_itself_in_any_batch() -> None:
    strategy = Speculative(Rapid("target", 2, 3, 1, 2), nodes=2)
    laws.check_greedy([strategy], 24)
    laws.check_batch([strategy])
    laws.check_close(strategy, 1.0, tokens=5)


def test_the_draft_model_takes_in_no_more_than_the_short_context() -> None:
    models: dict[str, Model] = {"target": Toy(8, copy=2.0), "draft": Toy(8, copy=2.0, noise=0.3)}
    engine = Engine(models)
    strategy = Speculative(SHORT, nodes=3)
    live = engine.add(Request(PROMPT, strategy, Sampling(max_new_tokens=12)))
    lengths: set[int] = set()
    while engine.live:
        engine.step()
        for (name, _), cache in live.caches.items():
            if name == "draft":
                lengths.add(cache.length - len(live.ctx.output))
    laws.finish(engine, live)
    assert lengths and max(lengths) <= len(READ)


def test_rooms() -> None:
    models: dict[str, Model] = {"target": Toy(8), "draft": Toy(8, noise=0.3, context=9)}
    setting = laws.Setting(Sampling(max_new_tokens=20))
    plain = laws.generate(laws.build("plain"), PROMPT, setting, models)
    live = laws.generate(Speculative(SHORT, nodes=3), PROMPT, setting, models)
    assert live.ctx.output == plain.ctx.output and 0 < live.ctx.stats.drafts < 10
    alone = laws.generate(Speculative(Rapid("target")), PROMPT, setting, models)
    assert not alone.ctx.stats.drafted, "the prompt is no longer than the short context"
    request = Request(list(range(8)) * 2000, Speculative(Rapid(context=256)), Sampling())
    ctx = Context(Engine({"target": Toy(8, context=1 << 16), "draft": Toy(8)}), request)
    assert len(Rapid(context=256).start(ctx).context) == 3 * 128 <= 16000 // 32


@pytest.mark.parametrize("size", [2, 5])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    prompt = [0, 1, 0, 1, 1, 0]
    law = laws.enumerate_law(laws.build(SPECS[0]), prompt, setting, models)
    assert law.distance(laws.reference(models["target"], prompt, setting)) < 1e-9
    assert law.accepted


# --- slips


class WrongLaw(Rapid):
    """Tells the law that the draft model has over the whole prompt."""

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        reply = yield Ask(TokenTree(ctx.tokens[-1]), self.model, ctx.branch)
        if len(tree) > 1:
            tree.laws[1] = Law(ctx.sampler.law(reply.logits[0], ctx.output))
        return tree


def test_the_law_of_another_context_is_caught() -> None:
    laws.check_law(Speculative(Rapid("draft", 1, 4, 1, 2), nodes=2), "plain", 2)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(Speculative(WrongLaw("draft", 1, 4, 1, 2), nodes=2), "plain", 2)


@pytest.mark.parametrize(
    ("field", "value", "allowed"), [("context", 200, "at least 256, a chunk and the query")]
)
def test_a_bad_value_is_told_with_field_value_and_range(
    field: str, value: int, allowed: str
) -> None:
    with pytest.raises(BadConfig, match=f"rapid:{field}={value}: must be {allowed}"):
        Rapid(**{field: value})  # type: ignore[arg-type]

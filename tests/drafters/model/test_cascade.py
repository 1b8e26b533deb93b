"""The cascade: what it drafts is what its draft model would, in that model's law, whatever speeds
it up; its exactness with one draft model is also in test_laws.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Open, Reply, Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.model.cascade import Cascade
from foretell.drafters.model.draft import Draft
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, UnknownMethod, Unsupported
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws

SPECS = ["cascade:inner=ngram", "cascade:inner=(suffix:shared=1+token-recycling),length=3,size=4"]
TWO = "cascade:inner=(draft:length=2,drafts=2),model=middle,length=2,size=2"
PROMPT = [1, 2, 0, 1, 2]


def inner(spec: str) -> Drafter:
    strategy = resolve_method(f"cascade:inner={spec},model=middle")[1]
    assert isinstance(strategy, Speculative) and isinstance(strategy.drafter, Cascade)
    return strategy.drafter.drafter


# --- its law


@pytest.mark.parametrize("setting", ["plain", "top-p", "penalties", "end", "form"])
def test_three_levels_that_draw_have_the_targets_law(setting: str) -> None:
    law = laws.check_law(laws.build(TWO), setting, 2)
    assert law.accepted


def chains(drafter: Cascade, models: Mapping[str, Model], options: Sampling) -> Counter[Any]:
    """The probability of each chain that one step drafts; their laws are compared with the rows."""
    found: Counter[Any] = Counter()
    draft = models[drafter.model]
    assert isinstance(draft, Toy)

    def once(door: Enumerator) -> TokenTree:
        ctx = Context(Engine(models), Request(PROMPT, Speculative(drafter), options, rng=door))
        ctx = ctx.scope_to(drafter)
        tree = by_hand(drafter.steps(ctx, drafter.start(ctx), 9), models, ctx.tokens)
        tree.check()
        for node in range(1, len(tree)):
            law = tree.laws[node]
            assert law is not None
            above = tree.tokens_to(tree.parents[node])
            want = laws.expected_law(draft, PROMPT, above, laws.Setting(options))
            assert law.probs.tolist() == pytest.approx(want, abs=1e-12)
        return tree

    for weight, tree in Enumerator.walk_outcomes(once):
        found[tuple(tree.tokens[1:])] += weight  # type: ignore[assignment]
    return found


def by_hand(steps: Drafting, models: Mapping[str, Model], text: list[int]) -> TokenTree:
    """Runs the drafting of a step, asking the models without an engine."""
    reply = None
    while True:
        try:
            ask = steps.send(reply)
        except StopIteration as end:
            assert isinstance(end.value, TokenTree)
            return end.value
        assert isinstance(ask, Ask) and ask.rows is not None
        nodes = list(ask.rows)
        reply = Reply(models[ask.model].score(text, ask.tree)[nodes], {}, nodes)


@pytest.mark.parametrize("spec", ["(draft:length=2)", "(draft:length=1,drafts=2)", "(ngram:n=1)"])
def test_a_draft_has_the_draft_models_law_whatever_the_inner_drafter_proposes(spec: str) -> None:
    options = Sampling(temperature=1.0, repetition_penalty=1.2, stop_token_ids=(0,))
    drafter = Cascade(inner(spec), length=2, model="middle", size=2)
    models = {"target": Toy(3, 1), "middle": Toy(3, 2), "draft": Toy(3, 2, noise=0.7)}
    found = chains(drafter, models, options)
    want = laws.reference(
        models["middle"],
        PROMPT,
        replace(laws.Setting(options), sampling=replace(options, max_new_tokens=2)),
    )
    assert found.keys() == want.keys() and len(want) > 4
    assert max(abs(found[text] - want[text]) for text in want) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("spec", ["ngram", "(suffix:depth=8)", "token-recycling", "(ngram+suffix)"])
def test_seed_by_seed_it_gives_the_tokens_of_draft_in_fewer_forwards(
    spec: str, temperature: float
) -> None:
    models = {"target": Toy(8, copy=4.0), "draft": Toy(8, noise=0.3, copy=4.0, name="draft")}
    forwards: Counter[str] = Counter()
    for seed in range(2):
        sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=30)
        lives = [
            laws.generate(Speculative(drafter, nodes=6), PROMPT, laws.Setting(sampling), models)
            for drafter in (Draft(length=6), Cascade(inner(spec), length=6, size=5))
        ]
        assert lives[0].ctx.output == lives[1].ctx.output
        assert lives[0].ctx.stats.accepted == lives[1].ctx.stats.accepted
        for name, live in zip(("draft", "cascade"), lives, strict=True):
            forwards[name] += live.ctx.stats.calls["draft"]
    assert forwards["cascade"] < 0.8 * forwards["draft"], forwards


# --- its inner drafter


@dataclass(frozen=True)
class Opens(Drafter):
    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        yield Open([1, 2])
        return TokenTree(ctx.tokens[-1])


@dataclass(frozen=True)
class Taps(Drafter):
    taps = (-1,)


@dataclass(frozen=True)
class Head(Drafter):
    models = ("head",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        head = Toy(4)
        head.feeds = (1,)
        return {"head": head}


def test_what_cannot_be_an_inner_drafter_is_refused_in_a_line() -> None:
    with pytest.raises(BadConfig, match=r"cascade:inner: Opens writes a text of its own.*choose"):
        laws.check_greedy([Speculative(Cascade(Opens(), size=2), nodes=2)], 1)
    with pytest.raises(BadConfig, match=r"cascade:inner=.*reads neither hidden"):
        Cascade(Taps())
    with pytest.raises(BadConfig, match=r"cascade:inner=.*reads neither hidden"):
        laws.check_greedy([Speculative(Cascade(Head()))], 1)
    for model in ("target", "draft"):
        with pytest.raises(BadConfig, match=f"cascade:model='{model}': must be another model"):
            Cascade(Draft(), model=model)


def test_a_draft_model_that_takes_chains_drafts_behind_chains_only() -> None:
    models = {"target": ToyRecurrent(8), "draft": ToyRecurrent(8, noise=0.2, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=30))
    plain = laws.generate(laws.build("plain"), PROMPT, setting, models)
    live = laws.generate(laws.build("cascade:inner=ngram,size=4"), PROMPT, setting, models)
    assert live.ctx.output == plain.ctx.output and live.ctx.stats.accepted
    with pytest.raises(Unsupported, match=r"cascade:inner cannot run on draft: it needs.*'tree'"):
        laws.generate(laws.build("cascade:inner=suffix"), PROMPT, setting, models)


@pytest.mark.parametrize("size", [2, 5])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    strategy = laws.build("cascade:inner=token-recycling,size=4,length=2")
    law = laws.enumerate_law(strategy, [0, 1, 0], setting, models)
    assert law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9
    assert law.accepted


# --- in the engine


def test_two_draft_models_alone_as_in_a_batch_and_closed_at_any_step() -> None:
    strategy = laws.build(TWO)
    laws.check_batch([strategy, laws.build("plain")], tenants=False)
    laws.check_close(strategy, 1.0, tokens=4)
    deeper = laws.build(f"cascade:inner=({TWO.replace('middle', 'small')}),model=middle", nodes=4)
    laws.check_greedy([deeper], 10)
    assert deeper.models == ("middle", "small", "draft")


# --- spec strings


def test_specs_within_specs() -> None:
    assert inner("ngram") == inner("(ngram)") == Ngram()
    assert inner("ngram:n=2") == inner("(ngram:n=2)") == Ngram(n=2)
    assert inner("(ngram:n=2,k=8)") == Ngram(n=2, k=8)
    assert len(inner("(ngram:n=2+suffix:depth=9)").parts) == 2  # type: ignore[attr-defined]
    strategy = resolve_method(
        "cascade:inner=(cascade:inner=(ngram:n=2,k=8),model=b),length=6,nodes=3"
    )[1]
    assert strategy == Speculative(Cascade(Cascade(Ngram(2, 8), model="b"), 6), nodes=3)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("cascade", "cascade:inner=None: must be a drafter, as in cascade:inner=suffix"),
        ("cascade:inner=(ngram:n=2", "a parenthesis is not closed"),
        ("cascade:inner=plain", "cascade:inner='plain': must be a drafter"),
        ("cascade:inner=(ngram:nodes=3)", "rule and nodes are for the whole method"),
        ("cascade:inner=(ngram:rule=coin)", "rule and nodes are for the whole method"),
    ],
)
def test_bad_specs_are_told_in_a_line(spec: str, told: str) -> None:
    with pytest.raises(BadConfig, match=r"^[^\n]*$") as caught:
        resolve_method(spec)
    assert told in str(caught.value)


def test_an_unknown_inner_method_is_told_by_name() -> None:
    with pytest.raises(UnknownMethod, match="ngramm"):
        resolve_method("cascade:inner=ngramm")

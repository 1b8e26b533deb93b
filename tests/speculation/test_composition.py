"""Drafters joined by `+`: one tree, one budget, everybody's state as if alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.copyspec import Copyspec
from foretell.drafters.lookup.lookahead import Lookahead
from foretell.drafters.lookup.ngram import Ngram
from foretell.drafters.lookup.token_recycling import Store, TokenRecycling
from foretell.drafters.model.draft import Draft
from foretell.engine.engine import Engine
from foretell.engine.scheduler import FairPlan
from foretell.errors import BadConfig
from foretell.spec import resolve_method
from foretell.speculation.composition import Composition, JointPayoff
from foretell.speculation.costs import Payoff, Promise
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws

SPECS = [
    "ngram+token-recycling",
    "ngram:n=2,k=4+draft:length=2",
    "draft:drafts=2,length=2+token-recycling:k=2",
]


@dataclass(frozen=True)
class Fixed(Drafter):
    """Proposes always the same chains."""

    chains: tuple[tuple[int, ...], ...]
    name: str = "fixed"
    drawn: bool = False

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.drawn

    def start(self, ctx: Context) -> list[Feedback]:
        return ctx.shared(list)

    def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        for chain in self.chains:
            at = 0
            for token in chain[: ctx.depth]:
                if len(tree) < budget:
                    law = Law(torch.full((8,), 1 / 8, dtype=torch.float64)) if self.drawn else None
                    at = tree.add(at, token, law, 0.5 * tree.values[at], self.name)
        return tree

    def observe(self, ctx: Context, state: list[Feedback], step: Feedback) -> None:
        state.append(step)


def propose(
    drafter: Composition, budget: int, nodes: int = 6, new: int = 20, temperature: float = 0.0
) -> tuple[TokenTree, Context, Any]:
    strategy = Speculative(drafter, nodes=nodes)
    sampling = Sampling(max_new_tokens=new, temperature=temperature)
    engine = Engine({"target": Toy(8), "draft": Toy(8)})
    ctx = Context(engine, Request([1, 2, 3], strategy, sampling))
    state = drafter.start(ctx)
    steps = drafter.steps(ctx, state, budget)
    with pytest.raises(StopIteration) as done:
        next(steps)
    return done.value.value, ctx, state


def test_the_tree_is_the_union_and_tells_who_proposed_what() -> None:
    tree, _, _ = propose(Composition((Fixed(((1, 2), (3,)), "a"), Fixed(((1, 4), (5,)), "b"))), 9)
    tree.check()
    found = {tuple(tree.tokens_to(n)): tree.sources[n] for n in range(1, len(tree))}
    assert found == {(1,): "a+b", (1, 2): "a", (3,): "a", (1, 4): "b", (5,): "b"}


def test_the_budget_is_for_all_of_them() -> None:
    parts = Fixed(((1, 2, 3, 4),), "a"), Fixed(((5, 6, 7, 1),), "b")
    sizes = []

    def plan(waiting: Any, costs: Any) -> Any:
        sizes.extend(len(entry.ask.tree) for entry in waiting)
        return FairPlan()(waiting, costs)

    engine = Engine({"target": Toy(8)}, plan=plan)
    strategy = Speculative(Composition(parts), nodes=5)
    laws.finish(engine, engine.add(Request([1], strategy, Sampling(max_new_tokens=12))))
    assert max(sizes) == 6, "eight nodes were proposed, five may be verified"


def test_a_drawn_part_comes_first_and_the_others_get_what_it_leaves() -> None:
    drawn = Fixed(((1, 2), (3,)), "drawn", drawn=True)
    parts = Fixed(((5, 6, 7, 1), (1, 3)), "fixed"), drawn
    tree, _, _ = propose(Composition(parts), 6, temperature=1.0)
    tree.check()
    assert [law is not None for law in tree.laws] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ] and len(tree) == 6
    assert tree.sources[1:4] == ["drawn"] * 3


@dataclass(frozen=True)
class Asking(Fixed):
    """One that asks a model, or would."""

    models = ("draft",)


def test_who_asks_a_model_comes_last_where_nothing_is_drawn() -> None:
    asking, sure = Asking(((7, 6), (1, 2)), "model"), Fixed(((1, 2, 3),), "sure")
    tree, _, state = propose(Composition((asking, sure)), 9)
    assert [part.drafter for part in state] == [sure, asking]
    assert tree.sources[1:] == ["sure+model", "sure+model", "sure", "model", "model"]


def test_every_part_has_stores_and_observations_of_its_own() -> None:
    one, two = Fixed(((1, 2),), "a"), Fixed(((3,),), "b")
    engine = Engine({"target": Toy(8)})
    laws.finish(
        engine,
        engine.add(Request([1, 2], Speculative(Composition((one, two)), nodes=4), Sampling())),
    )
    kept = {owner: value for (_, owner, name), value in engine.stores.items() if name == "store"}
    assert (
        set(kept) == {one, two}
        and kept[one] is not kept[two]
        and len(kept[one]) == len(kept[two]) > 10
    )


def test_a_store_is_the_same_alone_and_in_company() -> None:
    engine = Engine({"target": Toy(8)})
    for spec in (
        "token-recycling:nodes=4",
        "ngram+token-recycling:nodes=6",
        "token-recycling:nodes=8",
    ):
        laws.finish(engine, engine.add(Request([1, 2, 1, 2], resolve_method(spec)[1], Sampling())))
    assert sum(isinstance(value, Store) for value in engine.stores.values()) == 1


def test_a_part_that_wins_nothing_is_asked_rarely_unless_the_size_is_given() -> None:
    composition = Composition((Fixed(((1,),), "a"), Fixed(((2,),), "b")))
    for timed in (True, False):
        _, ctx, state = propose(composition, 9)
        ctx.costs.seconds = {1: 1.0}
        for part in state:
            part.payoff.gain, part.payoff.spent, part.payoff.wait = 0.0, 0.0, 0
        ctx.timed = timed
        for _ in range(9):
            state[1].payoff.note_attempt(0.0, 9.0, 1.0)
        assert state[1].payoff.wait == 180  # twenty times what an asking takes
        with pytest.raises(StopIteration) as done:
            next(composition.steps(ctx, state, 9))
        assert sorted(set(done.value.value.sources[1:])) == (["a"] if timed else ["a", "b"])


def test_a_composition_pauses_only_while_all_its_parts_do() -> None:
    parts = [Payoff(), Payoff()]
    joint = JointPayoff()
    joint.parts = [(part, None) for part in parts]
    parts[0].wait, parts[1].wait = 2, 5
    asked = []
    for _ in range(4):
        asked.append(joint.is_due() and [worth.is_due() for worth in parts])
        if asked[-1]:
            parts[0].wait = 9  # it failed again
    assert asked == [False, False, [True, False], False] and parts[1].wait == 1
    parts[1].wait = 0
    assert joint.is_due() and joint.is_due(), "nobody was asked in between"


def test_a_composition_pauses_while_its_head_is_not_looked_at() -> None:
    """Whose trees promise too little: its own pause never began, since it was never asked."""
    copies, head, promise = Payoff(), Payoff(), Promise()
    joint = JointPayoff()
    joint.parts = [(copies, None), (head, promise)]
    copies.wait, promise.rest = 5, 3
    assert [joint.is_due() for _ in range(5)] == [False, False, False, True, True]
    assert copies.wait == 2, "steps that were left out count for all who pause"
    promise.rest = 9
    assert [joint.is_due() for _ in range(3)] == [False, False, True]


def test_what_belongs_to_nobody_is_paid_by_who_was_asked() -> None:
    """Merging and cutting take longer than many drafters do."""
    composition = Composition((Fixed(((1,),), "a"), Fixed(((2,),), "b")))
    tree, ctx, state = propose(composition, 9)
    for part in state:
        part.begun = True
        part.seconds = 1.0
    reply = Reply(torch.zeros(len(tree), 8), {}, list(range(len(tree))))
    step = Feedback(tree, reply, Outcome([], 0), [0], seconds=8.0)
    composition.observe(ctx, state, step)
    assert all(part.payoff.spent > 4.0 for part in state), "six seconds were nobody's"


def test_who_asks_a_model_is_judged_by_what_the_others_promise() -> None:
    """Where a copy is sure its drafts add nothing, elsewhere it is asked as before."""

    class Copying(Fixed):
        sure = True

        def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
            tree = yield from super().steps(ctx, state, budget)
            value = 1.0 if Copying.sure else 0.01
            tree.values[1:] = [value] * (len(tree) - 1)
            return tree

    composition = Composition((Copying(((1, 2, 3),), "copy"), Asking(((4, 5),), "model")))
    _, ctx, state = propose(composition, 9)
    ctx.costs.seconds = {1: 1.0}
    ctx.timed = True

    def asked(sure: bool, gained: float) -> bool:
        Copying.sure = sure
        with pytest.raises(StopIteration) as done:
            next(composition.steps(ctx, state, 9))
        was = "model" in done.value.value.sources
        if was:
            state[1].payoff.note_attempt(gained, 1.0, 1.0)
        return was

    often = dict.fromkeys((True, False), 0)
    for _ in range(100):
        for sure, gained in ((True, 0.0), (False, 3.0)):
            often[sure] += asked(sure, gained)
    assert often[False] == 100 and 4 < often[True] < 20


@pytest.mark.parametrize(
    ("reads", "pause", "won", "steps"),
    [(0, 0, 0.0, 1), (2, 0, 0.0, 2 / 3), (0, 5, 9.0, 20), (0, 0, 1.25, 0), (0, 0, 1.15, 1)],
)
def test_a_model_reads_the_text_when_that_has_paid(
    reads: int, pause: int, won: float, steps: float
) -> None:
    """At once where attempts won 1.2 times what they cost, else when the request has run as long as
    that takes. It may read the last tokens only. Where it did not pay lately, it waits 20 times as
    long.
    """
    composition = Composition((Fixed(((1, 2),), "copy"), Asking(((4, 5),), "model")))
    _, ctx, state = propose(composition, 9)
    model = Toy(8)
    model.reads = reads
    ctx.engine.models["draft"] = ctx.models["draft"] = model
    ctx.costs.seconds = {1: 1.0}
    ctx.timed = True
    for part in state:
        part.begun = False
        part.waited = 0
        for payoff in part.payoffs if part.drafter.models else ():
            payoff.pause, payoff.won, payoff.spent = pause, won, 1.0
    ctx.engine.costs_of(model).seconds = {1: 9.0, 64: 64.0}  # a second a token of a long text
    waited = 0
    while True:
        with pytest.raises(StopIteration) as done:
            next(composition.steps(ctx, state, 9))
        tree = done.value.value
        if "model" in tree.sources:
            break
        waited += 1
        reply = Reply(torch.zeros(len(tree), 8), {}, list(range(len(tree))))
        composition.observe(ctx, state, Feedback(tree, reply, Outcome([], 0), [0]))
    assert waited == steps * len(ctx.tokens), "the text was not read when it had paid to wait"


def test_a_step_without_a_question_counts_against_nobody() -> None:
    composition = Composition((Fixed(((1,),), "a"), Fixed(((2,),), "b")))
    tree, ctx, state = propose(composition, 9)
    before = [part.payoff.gain for part in state]
    reply = Reply(torch.zeros(len(tree), 8), {}, list(range(len(tree))))
    composition.observe(ctx, state, Feedback(tree, reply, Outcome([], 0), [0]))
    assert [part.payoff.gain for part in state] == before, "the first draft takes in the text too"
    with pytest.raises(StopIteration):
        next(composition.steps(ctx, state, 9))
    composition.observe(ctx, state, Feedback(tree, reply, Outcome([], 0), [0]))
    after = [(part.payoff.gain, part.payoff.spent) for part in state]
    assert all(a < b for (a, _), b in zip(after, before, strict=True)), (
        "a draft that was refused counts"
    )
    for _ in range(9):  # the policy did not ask
        composition.observe(
            ctx,
            state,
            Feedback(TokenTree(1), Reply(torch.zeros(1, 8), {}, [0]), Outcome([], 0), [0]),
        )
    assert [(part.payoff.gain, part.payoff.spent) for part in state] == after


def test_what_a_composition_needs_is_what_its_parts_need() -> None:
    joined = Composition((Ngram(), Draft(), TokenRecycling()))
    assert (
        joined.models == ("draft",)
        and set(joined.needs) == {"tree", "rows"}
        and joined.draws
        and not joined.whole
    )
    assert Composition((Ngram(), Lookahead())).whole
    assert not Composition((Ngram(), Copyspec())).draws


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Ngram(), Ngram()), "joined with itself"),
        ((Fixed((), "a", True), Fixed((), "b", True)), "at most one may draw"),
    ],
)
def test_what_cannot_be_joined_is_refused(parts: Sequence[Drafter], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Composition(tuple(parts))


# --- spec strings


def test_a_spec_joins_drafters_and_the_last_part_has_the_budget() -> None:
    name, strategy = resolve_method("ngram:n=2,k=4+token-recycling:k=3,nodes=16,rule=coin")
    assert (
        name == "ngram+token-recycling"
        and isinstance(strategy, Speculative)
        and strategy.nodes == 16
    )
    assert (
        strategy.drafter == Composition((Ngram(2, 4), TokenRecycling(k=3)))
        and strategy.rule is not None
    )
    assert resolve_method(strategy)[1] is strategy
    assert resolve_method(Composition((Ngram(), Copyspec())))[0] == "ngram+copyspec"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngram+plain", "plain"),
        ("plain+ngram", "plain"),
        ("ngram+ngrm", "ngram"),
        ("ngram+", "foretell methods"),
        ("+ngram", "foretell methods"),
        ("ngram:nodes=4+copyspec:nodes=5", "nodes"),
        ("ngram:rule=walk+copyspec", "rule"),
        ("ngram+ngram", "joined with itself"),
    ],
)
def test_a_wrong_composition_is_one_clear_error(spec: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        resolve_method(spec)


# --- exactness


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("setting", ["plain", "penalties", "top-p"])
def test_a_composition_is_exact(spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec, nodes=3), setting, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_a_composition_is_greedy_identical_and_the_same_in_a_batch(spec: str) -> None:
    laws.check_greedy([laws.build(spec)], 40)
    laws.check_batch([laws.build(spec)])


def test_without_draws_it_gives_the_plain_decoders_tokens_seed_by_seed() -> None:
    laws.check_seeds(laws.build("ngram+copyspec+token-recycling"))
    laws.check_seeds(
        resolve_method("ngram+token-recycling")[1]
    )  # however the measured time turns out

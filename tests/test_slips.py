"""The laws have power: known slips are put in on purpose, and the law that is meant to catch each
must do so.

A slip is a monkeypatch of the heart, a drafter that declares a wrong law, or a rule with an error
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import foretell.cache.cache
import foretell.cache.masks
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.random import Door, Rng
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Commit, Kept, Outcome, Reply, Sampling
from foretell.drafters.lookup.token_recycling import TokenRecycling
from foretell.drafters.model.draft import Draft
from foretell.engine import messages
from foretell.engine.engine import Engine
from foretell.engine.live import Live, Task
from foretell.speculation.strategy import Speculative
from foretell.verification.acceptance import Rule, verify_in_order
from tests import laws
from tests.verification.tables import without

TREE = "token-recycling"  # its trees branch, so accepted rows are seldom the first ones
CHAIN = "draft:length=2"


def caught(check: Callable[..., Any], *args: Any, **more: Any) -> None:
    """The check fails, and by its own assertion, not by a crash."""
    with pytest.raises(AssertionError):
        check(*args, **more)


def sound(*strategies: Speculative) -> None:
    """Without a slip the same checks pass, or they would prove nothing."""
    for strategy in strategies:
        laws.check_law(strategy)


# --- rows, masks and positions


def test_stale_rows_kept_after_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.commit

    def commit(self: Cache, tokens: Sequence[int]) -> None:
        before = [rows.clone() for rows in (*self.keys, *self.values)]
        real(self, tokens)
        for rows, old in zip((*self.keys, *self.values), before, strict=True):
            rows[: len(old)] = old  # the length is right, but nothing was moved

    monkeypatch.setattr(Cache, "commit", commit)
    caught(laws.check_law, laws.build(TREE), tokens=3)
    caught(laws.check_greedy, [laws.build(TREE)], 40)
    caught(laws.check_close, laws.build(TREE), 0.0)


def test_the_first_rows_kept_whatever_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a draft model's cache, where it costs acceptance and changes no law, so only the cache's
    own law sees it.
    """
    real = Cache.commit

    def commit(self: Cache, tokens: Sequence[int]) -> None:
        room, scratch = len(tokens) - 1 - self.length, len(self.tokens)
        start = self.length
        real(self, tokens)
        self.length = start + min(room, scratch)

    monkeypatch.setattr(Cache, "commit", commit)
    caught(laws.check_close, laws.build("draft:drafts=2"), 1.0)


def test_siblings_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        foretell.cache.masks,
        "ancestors",
        lambda parents: torch.ones(len(parents), len(parents)).tril() > 0,
    )
    caught(laws.check_law, laws.build(TREE), tokens=3)
    caught(laws.check_greedy, [laws.build(TREE)], 40)


def shift(monkeypatch: pytest.MonkeyPatch, change: Callable[[Job], list[int]]) -> None:
    monkeypatch.setattr(Job, "positions", property(change))


def test_positions_that_count_nodes_instead_of_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    shift(monkeypatch, lambda job: list(range(job.start, job.start + len(job.tokens))))
    caught(laws.check_law, laws.build(TREE), tokens=3)
    caught(laws.check_greedy, [laws.build(TREE)], 40)


def test_positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Job.positions.fget  # type: ignore[attr-defined]
    shift(monkeypatch, lambda job: [position + 1 for position in real(job)])
    caught(laws.check_law, laws.build("ngram"))


def test_rows_one_node_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Target.__init__

    def init(self: Target, rows: torch.Tensor, *rest: Any) -> None:
        real(self, rows.roll(1, 0) if len(rows) > 1 else rows, *rest)

    monkeypatch.setattr(Target, "__init__", init)
    for spec in (TREE, CHAIN, "ngram"):
        caught(laws.check_law, laws.build(spec))
        caught(laws.check_greedy, [laws.build(spec)], 40)


def test_rows_given_to_the_wrong_request(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Model.forward

    def swapped(self: Model, jobs: list[Job], *rest: Any) -> list[Reply]:
        replies = real(self, jobs, *rest)
        if len(replies) > 1 and len(replies[0].logits) == len(replies[1].logits):
            replies[:2] = replies[1::-1]
        return replies

    monkeypatch.setattr(Model, "forward", swapped)
    caught(laws.check_batch, [laws.build("plain"), laws.build("ngram")])


# --- verification


@dataclass(frozen=True)
class ResampleFromP(Rule):
    """The residual is left out: after a refusal the token comes from p itself."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node, tries, outcome = 0, 0, Outcome([], -1)
        while True:
            p, accepted = target.p(node), -1
            for child in tree.tries[node]:
                q, tries = tree.laws[child], tries + 1
                share = 1.0 if q is None else q.token_prob(tree.tokens[child])
                if rng.accept(float(p[tree.tokens[child]]) / share, "accept", position, tries):
                    accepted = child
                    break
            if accepted < 0:
                return Outcome(outcome.path, rng.sample(p, "target", position + tree.depths[node]))
            outcome.path.append(accepted)
            node = accepted


def test_the_residual_left_out() -> None:
    for drafter in (Draft(length=2), TokenRecycling()):
        caught(laws.check_law, Speculative(drafter, ResampleFromP(), 6))


@dataclass(frozen=True)
class RawLeaf(Rule):
    """The token after a fully accepted path is drawn from the unprocessed row."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        processed = target.p
        target.p = lambda n: processed(n) if tree.tries[n] else target.rows[n].softmax(-1)  # type: ignore[method-assign, assignment]
        return verify_in_order(tree, target, rng, position)


def test_a_bonus_token_from_the_unprocessed_row() -> None:
    caught(laws.check_law, Speculative(Draft(length=2), RawLeaf(), 6), "temperature")
    caught(laws.check_law, Speculative(Draft(length=2), RawLeaf(), 6), "grammar")
    laws.check_law(
        Speculative(Draft(length=2), RawLeaf(), 6), "plain"
    )  # there the two are the same


@dataclass(frozen=True)
class OneCoin(Rule):
    """One uniform number serves all tries of a step."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        class Reused:
            sample = staticmethod(rng.sample)

            @staticmethod
            def accept(chance: float, purpose: str, position: int, index: int = 0) -> bool:
                return rng.accept(chance, purpose, position, 1)

        return verify_in_order(tree, target, Reused(), position)  # type: ignore[arg-type]


def test_a_random_number_used_twice() -> None:
    caught(laws.check_law, Speculative(Draft(length=2), OneCoin(), 6))
    caught(laws.check_law, Speculative(Draft(length=1, drafts=3), OneCoin(), 6), tokens=2)


@dataclass(frozen=True)
class Shared(Drafter):
    """A drafter whose draws all use one key."""

    models = ("draft",)

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        real = ctx.rng

        class Reused:
            accept = staticmethod(real.accept)

            @staticmethod
            def sample(p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
                return real.sample(p, purpose, position, 0 if purpose == "draft" else index)

        ctx.rng = Reused()  # type: ignore[assignment]
        draft = Draft(length=1, drafts=2)
        tree = yield from draft.steps(ctx, draft.start(ctx), budget)
        ctx.rng = real
        return tree


def test_draws_that_are_not_independent() -> None:
    caught(laws.check_law, Speculative(Shared(), nodes=6))


def test_a_filter_that_verification_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalties of a node see the committed tokens only, not its own path."""

    def p(self: Target, node: int) -> torch.Tensor:
        return self.sampler.law(self.rows[node], self.output)

    monkeypatch.setattr(Target, "p", p)
    for setting in ("penalties", "grammar", "bias, ends"):
        caught(laws.check_law, laws.build(TREE), setting)
        caught(laws.check_law, laws.build(CHAIN), setting)
    caught(
        laws.check_law,
        laws.build(TREE),
        laws.Setting(Sampling(temperature=1.0, min_new_tokens=2), (2,)),
    )
    laws.check_law(laws.build(TREE), "plain")  # nothing there depends on the path


def test_greedy_tokens_from_the_unprocessed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    laws.check_greedy([laws.build("ngram")], 40, free=True)
    monkeypatch.setattr(Target, "best_token", lambda self, node: int(self.rows[node].argmax()))
    caught(laws.check_greedy, [laws.build("ngram")], 40, free=True)


def test_draws_that_depend_on_batch_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def uniform(self: Rng, purpose: str, position: int, index: int = 0) -> float:
        nonlocal count
        count += 1
        return count * 0.6180339887 % 1

    monkeypatch.setattr(Rng, "uniform", uniform)
    caught(laws.check_batch, [laws.build("plain"), laws.build("ngram")])
    caught(laws.check_seeds, laws.build("ngram", "walk"))


# --- trees with a wrong law


@dataclass(frozen=True)
class Twisted(Drafter):
    """A draft model's tree that `twist` changes after it was drawn."""

    drafter: Drafter
    twist: Callable[[Context, TokenTree], TokenTree]
    models = ("draft",)

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from self.drafter.steps(ctx, self.drafter.start(ctx), budget)
        return self.twist(ctx, tree) if len(tree) > 1 else tree


def twisted(drafter: Drafter, twist: Callable[[Context, TokenTree], TokenTree]) -> Speculative:
    return Speculative(Twisted(drafter, twist), nodes=6)


def law_at(tree: TokenTree, parent: int) -> Law:
    law = tree.laws[tree.tries[parent][0]]
    assert law is not None
    return law


def chosen_but_declared_drawn(ctx: Context, tree: TokenTree) -> TokenTree:
    """The draft's best token, said to be drawn from its law."""
    law = law_at(tree, 0)
    new = TokenTree(tree.tokens[0])
    new.add(0, int(law.probs.argmax()), law)
    return new


def best_two_declared_drawn(ctx: Context, tree: TokenTree) -> TokenTree:
    """The draft's two best tokens, said to be drawn without replacement."""
    law = law_at(tree, 0)
    first, second = law.probs.topk(2).indices.tolist()
    new = TokenTree(tree.tokens[0])
    new.add(0, first, law)
    new.add(0, second, without(law, [first]))
    return new


def sorted_by_probability(ctx: Context, tree: TokenTree) -> TokenTree:
    """Drawn children are tried likeliest first, not in the order they were drawn in."""
    for node, tries in enumerate(tree.tries):
        if len(tries) > 1:
            law = law_at(tree, node)
            tries.sort(key=lambda child: -law.token_prob(tree.tokens[child]))
    return tree


def pruned_afterwards(ctx: Context, tree: TokenTree) -> TokenTree:
    """Drawn tokens that the draft finds unlikely are thrown away."""
    new = TokenTree(tree.tokens[0])
    for child in tree.tries[0]:
        law = law_at(tree, 0)
        if law.token_prob(tree.tokens[child]) > 0.3:
            new.add(0, tree.tokens[child], law)
    return new


def law_of_another_temperature(ctx: Context, tree: TokenTree) -> TokenTree:
    """The declared law is not the one that was drawn from."""
    for child in set(tree.tries[0]):
        law = tree.laws[child]
        assert law is not None
        tree.laws[child] = Law(law.probs.square() / law.probs.square().sum())
    return tree


def without_replacement_declared_with(ctx: Context, tree: TokenTree) -> TokenTree:
    """A second, different child that was drawn from what the first left over, declared with the
    whole law.
    """
    law = law_at(tree, 0)
    first = tree.tokens[tree.tries[0][0]]
    new = TokenTree(tree.tokens[0])
    new.add(0, first, law)
    new.add(0, ctx.rng.sample(without(law, [first]).probs, "draft", len(ctx.output), 99), law)
    return new


TWISTS = [
    chosen_but_declared_drawn,
    best_two_declared_drawn,
    sorted_by_probability,
    pruned_afterwards,
    law_of_another_temperature,
    without_replacement_declared_with,
]


@pytest.mark.parametrize("twist", TWISTS)
def test_a_tree_with_a_wrong_law(twist: Callable[[Context, TokenTree], TokenTree]) -> None:
    drafter = Draft(length=1, drafts=2)
    sound(Speculative(drafter, nodes=6))
    caught(laws.check_law, twisted(drafter, twist), tokens=2)


def test_a_drawn_token_verified_as_a_chosen_one_is_no_slip() -> None:
    """It was drawn without a look at the target, so it may be taken as given: only acceptance is
    lost.
    """

    def undeclared(ctx: Context, tree: TokenTree) -> TokenTree:
        new = TokenTree(tree.tokens[0])
        for child in tree.tries[0]:
            new.add(0, tree.tokens[child])
        return new

    strategy = Speculative(Twisted(Draft(length=1, drafts=2), undeclared), Sequentially(), 6)
    laws.check_law(strategy, tokens=2)


@dataclass(frozen=True)
class Sequentially(Rule):
    """Sequential, whatever the tree."""

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        return verify_in_order(tree, target, rng, position)


def test_a_target_that_is_drafted_from_is_no_draft() -> None:
    """A drafter that peeks at the target's own draw of this step is biased."""

    @dataclass(frozen=True)
    class Peeking(Drafter):
        def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
            if ctx.depth < 1:
                return TokenTree(ctx.tokens[-1])
            chance = 0.7 if ctx.rng.accept(0.5, "accept", len(ctx.output), 1) else 0.3
            return TokenTree(ctx.tokens[-1]).chain([int(chance > 0.5)])

    caught(laws.check_law, Speculative(Peeking(), Sequentially(), 6))


# --- ends


def test_tokens_committed_beyond_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = messages.on_commit

    def on_commit(engine: Engine, live: Live, task: Task, commit: Commit) -> None:
        """Looks for an end only at the last token of a step."""
        sampler = live.ctx.sampler
        stops, sampler.stops = sampler.stops, frozenset()
        real(engine, live, task, commit)
        sampler.stops = stops
        kept: Kept = task.answer
        if kept.reason is None and kept.tokens[-1] in stops:
            kept.reason = live.ctx.branches[0].reason = "stop"

    monkeypatch.setitem(messages.HANDLERS, Commit, on_commit)
    monkeypatch.setattr(Target, "ends", lambda self, node: False)
    for spec in (TREE, CHAIN):
        caught(laws.check_law, laws.build(spec), "end", drafts=False)
        caught(laws.check_ends, laws.build(spec), 1.0)
    caught(laws.check_greedy, [laws.build(TREE)], 40)


def test_a_law_asked_for_behind_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification, or a drafter, goes on below a node that ends the text."""
    sound = laws.build(TREE), laws.build("draft:length=3")
    with monkeypatch.context() as patch:
        patch.setattr(Target, "ends", lambda self, node: False)
        for strategy in sound:
            caught(laws.check_ends, strategy, 1.0)
        caught(laws.check_law, laws.build(TREE), "end")
    monkeypatch.setattr(Context, "ends", lambda self, tree, node: False)
    laws.check_ends(sound[0], 1.0)
    caught(laws.check_ends, sound[1], 1.0)


def test_rows_that_are_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "drop", lambda self: None)
    caught(laws.check_close, laws.build("ngram"), 0.0)


def test_forwards_the_card_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    caught(
        laws.check_cost,
        Speculative(Draft(length=3)),
        "target 1, draft length",
        {"length": 4},
        exact=True,
    )
    caught(laws.check_cost, Speculative(Draft(length=3)), "target 1", {}, exact=True)
    laws.check_cost(
        Speculative(Draft(length=3)), "target 1, draft length", {"length": 3}, exact=True
    )
    bound = "target 1, draft length at most"
    laws.check_cost(Speculative(Draft(length=3)), bound, {"length": 4}, exact=True)
    caught(laws.check_cost, Speculative(Draft(length=3)), bound, {"length": 2}, exact=True)

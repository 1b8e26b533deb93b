"""How much is drafted, with costs set by hand: nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.engine.engine import Engine
from foretell.spec import resolve_method
from foretell.speculation.costs import Costs
from foretell.speculation.draft_size import (
    LIMIT,
    PRIOR,
    PROBE,
    PROBE_LOSS,
    STAY,
    DrawnSizes,
    Policy,
    estimate_nodes,
)
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws


class Line(Costs):
    """Costs that nobody measured."""

    def note_forward(self, tokens: int, seconds: float, rows: int = 0) -> None:
        pass


def make(seconds: dict[int, float], nodes: int = 0, whole: bool = False) -> Policy:
    target = Toy(4)
    engine = Engine({"target": target})
    costs = engine.costs[target, "torch", None] = Line()
    costs.seconds = dict(seconds)
    context = Context(engine, Request([1], laws.build("ngram"), Sampling()))
    context.timed = not nodes
    return Policy(context, nodes, whole)


def judged(policy: Policy, tree: TokenTree) -> list[float]:
    """The probabilities of the nodes, as the policy estimates them."""
    values, policy.kinds = estimate_nodes(tree, policy.chances)
    return values


def certain(policy: Policy, tree: TokenTree, chances: list[float]) -> TokenTree:
    """Makes the policy sure that the nodes of the tree are accepted with these probabilities, once
    their parents are.
    """
    judged(policy, tree)
    for key, chance in zip(policy.kinds[1:], chances, strict=True):
        policy.chances[key] = [1e9, 1e9 * chance]
    return tree


def star(size: int) -> TokenTree:
    tree = TokenTree(0)
    for token in range(1, size + 1):
        tree.add(0, token, value=0.1, source="s")
    return tree


FLAT = dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), 1.0)
STEEP = {n: float(n) for n in (1, 2, 4, 8, 16, 32, 64, 128)}


def test_free_nodes_are_all_drafted_and_dear_ones_none() -> None:
    for costs, size in ((FLAT, 6), (STEEP, 1)):
        policy = make(costs)
        tree = certain(policy, star(5), [0.3, 0.2, 0.1, 0.1, 0.1])
        assert len(policy.fit_tree(tree)) == size


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 0.5), st.floats(1, 3))
def test_the_size_is_the_best_of_all_sizes(
    chances: list[float], slope: float, power: float
) -> None:
    policy = make({n: 1 + slope * (n - 1) ** power for n in (1, 2, 4, 8, 16)})
    tree = certain(policy, star(len(chances)), chances)
    kept = policy.fit_tree(tree)
    curve = policy.ctx.costs.curve(len(tree))
    gains = sorted(chances, reverse=True)
    speed = [(1 + sum(gains[: n - 1])) / curve[n - 1] for n in range(1, len(tree) + 1)]
    if len(kept) == 1:
        assert max(speed) <= STAY * speed[0] + 1e-6
    else:
        assert (
            speed[len(kept) - 1] == pytest.approx(max(speed))
            and speed[len(kept) - 1] >= STAY * speed[0] - 1e-6
        )
        left = sorted(
            (c for t, c in zip(tree.tokens[1:], chances, strict=True) if t in kept.tokens),
            reverse=True,
        )
        assert left == pytest.approx(gains[: len(kept) - 1]), "the best nodes are kept"


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1)), min_size=1, max_size=20),
    st.integers(1, 12),
)
def test_what_is_kept_is_closed_under_parents(shape: list[tuple[int, float]], nodes: int) -> None:
    tree = TokenTree(0)
    for token, (parent, value) in enumerate(shape, 1):
        above = parent % len(tree)
        tree.add(above, token, value=value * tree.values[above], source="ab"[token % 2])
    policy = make(FLAT, nodes=nodes)
    small = policy.fit_tree(tree)
    small.check()
    assert len(small) == min(len(tree), nodes + 1)
    texts = {tuple(tree.tokens_to(n)) for n in range(len(tree))}
    assert {tuple(small.tokens_to(n)) for n in range(len(small))} <= texts


def test_rounding_puts_no_child_before_its_parent() -> None:
    """Of a node that was always accepted the estimate must not come out an ulp above its
    parent's.
    """
    for trials in range(1, 400):
        policy = make(FLAT)
        tree = TokenTree(0).chain([1] * 40, "s")
        tree.values = [1.0] * len(tree)
        judged(policy, tree)
        count = 0.37 * trials
        policy.chances.update({key: [count, count] for key in policy.kinds[1:]})
        policy.chances[policy.kinds[1]] = [5.3, 3.1]
        values = judged(policy, tree)
        assert values == sorted(values, reverse=True)


def test_kinds_are_told_apart_by_source_rank_depth_match_and_the_drafters_own_chance() -> None:
    tree = TokenTree(0).chain([1, 2, 3], "copy", match=3)
    tree.chain([4, 5], "other")
    tree.add(0, 6, source="other")
    policy = make(FLAT)
    judged(policy, tree)
    keys = dict(zip(tree.tokens, policy.kinds, strict=True))
    assert keys[1] == ("copy", 0, 2) and keys[2] == keys[3] == ("copy", 0, 3), (
        "3 tokens matched, then 4 and 5"
    )
    assert keys[4] == ("other", 0, -25) and keys[5] == ("other", 0, -26)
    assert keys[6] == ("other", 1, -25)
    tree.values[4:6] = [0.3, 0.3 * 0.1]
    judged(policy, tree)
    assert policy.kinds[4:6] == [("other", 0, -9), ("other", 0, -2)]


def test_estimates_start_from_the_drafters_and_go_to_what_happens() -> None:
    policy = make(FLAT)
    tree = TokenTree(0)
    tree.add(tree.add(0, 1, value=0.8, source="s"), 2, value=0.4, source="s")
    assert judged(policy, tree) == pytest.approx([1, 0.8, 0.4])
    for _ in range(3):
        policy.fit_tree(tree)
        policy.observe(Outcome([1], 3, [(1, True), (2, False)]))
    first, second = (PRIOR * 0.8 + 3) / (PRIOR + 3), PRIOR * 0.5 / (PRIOR + 3)
    assert judged(policy, tree) == pytest.approx([1, first, first * second], rel=0.02)
    for _ in range(300):
        policy.fit_tree(tree)
        policy.observe(Outcome([], 3, [(1, False)]))
    values = judged(policy, tree)
    assert values[1] < 0.06 and values[2] / values[1] == pytest.approx(second, rel=0.02), (
        "what is not tested is kept"
    )
    again = Policy(policy.ctx, 0)
    assert judged(again, tree) == values, "the requests of a method share what they learn"


def test_what_is_left_out_is_tried_now_and_then() -> None:
    policy = make({1: 1.0, 128: 1.3})
    tree = certain(policy, star(12), [0.001] * 12)
    sizes = [len(policy.fit_tree(tree)) for _ in range(2 * PROBE + 3)]
    assert [i for i, size in enumerate(sizes, 1) if size == 9] == [PROBE, 2 * PROBE]
    assert set(sizes) == {1, 9}
    assert len(policy.fit_tree(TokenTree(0))) == 1 and policy.waited == 3, (
        "nothing proposed does not count"
    )


def test_what_is_left_out_is_tried_more_rarely_where_that_is_expensive() -> None:
    """As where many requests fill every forward."""
    policy = make(STEEP)
    tree = certain(policy, star(12), [0.25] * 12)
    lost = 8 * (1 - 0.25)  # of steps, by 8 nodes each of which costs a step
    pause = round(lost / PROBE_LOSS)
    sizes = [len(policy.fit_tree(tree)) for _ in range(2 * pause + 100)]
    tried = [i for i, size in enumerate(sizes, 1) if size == 9]
    assert tried == [pause + 1, 2 * pause + 2], "rounded up"


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    policy, tree = (
        make({n: 1 + 0.03 * n for n in (1, 2, 4, 8, 16)}),
        TokenTree(0).chain([1] * 10, "s"),
    )
    for accepts in (False, True):
        sizes = []
        for _ in range(150):
            if policy.node_budget() == 1:
                sizes.append(1)
                continue
            cut = policy.fit_tree(tree)
            sizes.append(len(cut))
            nodes = range(1, len(cut))
            policy.observe(
                Outcome(
                    [*nodes] if accepts else [],
                    0,
                    [(n, accepts) for n in (nodes if accepts else [*nodes][:1])],
                )
            )
        assert (sizes[-1] > 8) == accepts and (sizes.count(1) > 75) != accepts


def test_who_wins_nothing_is_asked_rarely_and_who_takes_no_time_always() -> None:
    for seconds, asked in ((0.3, 4), (0.0, 100)):
        policy, count = make(FLAT), 0
        policy.payoff.gain = 0.0
        for _ in range(100):
            if policy.node_budget() > 1:
                policy.fit_tree(TokenTree(0))
                policy.spent += seconds
                count += 1
            policy.observe(Outcome([], 0))
        assert count == pytest.approx(asked, abs=4), f"asked {count} times at {seconds} s"
    policy = make(FLAT, nodes=3)
    policy.payoff.wait = 9
    assert policy.node_budget() == 4, "a given size is always drafted"


def test_what_the_first_draft_takes_does_not_count() -> None:
    """It takes in the whole text, which later ones need not: that is no reason to pause."""
    policy = make(FLAT)
    for took, counted in ((100.0, 0.0), (0.5, 0.5)):
        assert policy.node_budget() > 1
        policy.fit_tree(TokenTree(0), took)
        policy.observe(Outcome([], 0))
        assert policy.payoff.spent == pytest.approx(counted, abs=0.05)  # and what cutting took


def test_others_in_flight_make_a_forward_dearer() -> None:
    knee = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    alone, among = make(knee), make(knee)
    among.ctx.engine.running = 8
    sizes = [
        len(p.fit_tree(certain(p, star(7), [0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05])))
        for p in (alone, among)
    ]
    assert sizes == [8, 1]


def test_the_budget_grows_with_what_is_best() -> None:
    policy, sizes = make(FLAT), []
    certain(policy, TokenTree(0).chain([1] * 80, "s"), [1.0] * 80)
    for _ in range(5):
        sizes.append(policy.node_budget())
        policy.fit_tree(TokenTree(0).chain([1] * (policy.node_budget() - 1), "s"))
    assert sizes == sorted(sizes) and sizes[0] == 17 and sizes[-1] == 81


def test_drawn_trees_whole_ones_and_given_sizes_are_left_alone() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, Law(torch.tensor([0.0, 1.0])))
    assert make(STEEP).fit_tree(tree) is tree, "cutting drawn nodes would bias them"
    long = TokenTree(0).chain([1] * 9)
    assert (
        make(STEEP, nodes=9).fit_tree(long) is long
        and make(STEEP, whole=True).fit_tree(long) is long
    )
    assert make(FLAT, nodes=5).node_budget() == 6 and make(FLAT).node_budget() == 17
    assert (
        make(FLAT, whole=True).node_budget() == LIMIT + 1
        and make(STEEP, whole=True).node_budget() == 17
    )


# --- sizes that are decided before the draw


def drawn(seconds: dict[int, float]) -> DrawnSizes:
    policy = make(seconds)
    if seconds:
        policy.ctx.costs.freeze_curve()
    return DrawnSizes(policy.ctx)


def play(sizes: DrawnSizes, accepted: Callable[[int], int], steps: int = 150) -> list[int]:
    """Nodes drafted in each step, where a draft of n nodes has `accepted(n)` of them accepted."""
    drafted = []
    for _ in range(steps):
        nodes = sizes.node_budget() - 1
        drafted.append(nodes)
        sizes.observe(Outcome([*range(1, accepted(nodes) + 1)], 0))
    return drafted


def test_drawn_trees_have_sixteen_nodes_where_no_costs_were_measured() -> None:
    sizes = drawn({})
    assert set(play(sizes, lambda nodes: 0)) == {16}


def test_drawn_trees_grow_where_nodes_are_free_and_end_where_they_never_pay() -> None:
    grown = play(drawn(FLAT), lambda nodes: nodes // 4)
    assert grown[0] == 16 and grown[-1] == LIMIT and grown.count(LIMIT) > 100
    nothing = play(drawn(STEEP), lambda nodes: 0)
    assert nothing[-1] == 0 and sum(size > 0 for size in nothing) < 12, "it pauses, then tries"
    assert any(nothing[50:]), "a text that becomes predictable is noticed"


def test_drawn_trees_come_back_when_they_pay_again() -> None:
    sizes = drawn({n: 1 + 0.05 * n for n in (1, 2, 4, 8, 16, 32, 64, 128)})
    assert play(sizes, lambda nodes: 0)[-1] == 0
    assert play(sizes, lambda nodes: nodes // 2)[-1] >= 8


def test_the_size_of_a_drawn_tree_does_not_depend_on_what_is_timed_meanwhile() -> None:
    policy = make(FLAT)
    policy.ctx.costs.freeze_curve()
    before = play(DrawnSizes(policy.ctx), lambda nodes: nodes // 3)
    policy.ctx.costs.seconds = dict(STEEP)
    policy.ctx.engine.running = 8
    assert play(DrawnSizes(policy.ctx), lambda nodes: nodes // 3) == before


def unseeded(seconds: dict[int, float], node_seconds: float = 0.0) -> DrawnSizes:
    policy = make(seconds)
    policy.ctx.repeats = False
    sizes = DrawnSizes(policy.ctx)
    fit = TokenTree(0).chain([1] * 16)
    sizes.fit_tree(fit, 16 * node_seconds)
    return sizes


def test_without_a_seed_drawn_trees_shrink_with_load_and_grow_again() -> None:
    knee = {1: 1.0, 16: 1.1, 32: 2.0, 64: 4.0, 128: 8.0, 1024: 64.0}
    sizes = unseeded(knee)
    assert play(sizes, lambda nodes: nodes // 3)[-1] >= 8
    sizes.ctx.engine.running = 16
    crowded = play(sizes, lambda nodes: nodes // 3)
    assert crowded[-1] == 0 and sum(size > 0 for size in crowded) < 12
    sizes.ctx.engine.running = 1
    assert play(sizes, lambda nodes: nodes // 3)[-1] >= 8


def test_without_a_seed_what_drafting_takes_counts() -> None:
    quick, slow = unseeded(FLAT, 0.0), unseeded(FLAT, 1.0)
    assert play(quick, lambda nodes: nodes // 4)[-1] > 16
    assert play(slow, lambda nodes: nodes // 4)[-1] == 0


def test_without_a_seed_requests_begin_where_earlier_ones_were() -> None:
    sizes = unseeded(FLAT, 1.0)
    play(sizes, lambda nodes: 0)
    assert DrawnSizes(sizes.ctx).node_budget() == 1
    sizes.ctx.repeats = True
    assert DrawnSizes(sizes.ctx).node_budget() == 17, "a seed's sizes are its own"


def test_fixed_trees_are_cut_to_the_size_decided_before_unless_they_are_whole() -> None:
    sizes, whole = drawn(FLAT), drawn(FLAT)
    whole.whole = True
    tree = TokenTree(0).chain([1] * 40)
    for policy in (sizes, whole):
        policy.node_budget()
    assert len(sizes.fit_tree(tree)) == 17 and whole.fit_tree(tree) is tree


@pytest.mark.parametrize(
    ("spec", "temperature", "timed"),
    [
        ("ngram", 0.0, True),
        ("ngram", 1.0, True),
        ("ngram:nodes=4", 0.0, False),
        ("ngram:rule=coin", 0.0, True),
        ("ngram:rule=coin", 1.0, False),
        ("draft", 0.0, True),
        ("draft", 1.0, False),
        ("ngram+draft", 1.0, False),
    ],
)
def test_time_decides_nothing_that_would_change_samples(
    spec: str, temperature: float, timed: bool
) -> None:
    seen = []

    @dataclass(frozen=True)
    class Spy(Drafter):
        draws = "draft" in spec

        def start(self, ctx: Context) -> None:
            seen.append(ctx.timed)

        def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
            return TokenTree(ctx.tokens[-1])

    strategy = resolve_method(spec)[1]
    assert isinstance(strategy, Speculative)
    setting = laws.Setting(Sampling(temperature=temperature, max_new_tokens=2))
    laws.generate(
        Speculative(Spy(), strategy.rule, strategy.nodes), [1], setting, {"target": Toy(4)}
    )
    assert seen == [timed]
    sampling = Sampling(temperature=temperature, max_new_tokens=2, seed=None)
    laws.generate(
        Speculative(Spy(), strategy.rule, strategy.nodes),
        [1],
        laws.Setting(sampling),
        {"target": Toy(4)},
    )
    assert seen[1:] == [not strategy.nodes], "without a seed no samples have to come again"


def test_the_engine_says_how_much_of_prompts_fills_its_forwards() -> None:
    engine = Engine({"target": Toy(4, context=1024)})
    engine.add(Request([1, 2], laws.build("plain"), Sampling(max_new_tokens=400)))
    engine.step()
    assert engine.texts == 0, "nobody else's prompt is unfinished"
    engine.add(Request([1, 2] * 300, laws.build("plain"), Sampling(max_new_tokens=1)))
    engine.step()
    assert engine.texts > 0
    while len(engine.live) > 1:
        engine.step()
    engine.step()
    assert engine.texts == 0


def test_rows_beside_a_root_alone_are_paid_for_by_the_draft_made_of_them() -> None:
    """They bring nothing in their own step, and are no attempt: the next draft bears their cost."""
    policy = make({1: 1.0, 4: 1.5, 8: 2.0, 128: 32.0}, whole=True)
    rows, draft = TokenTree(0), star(3)
    rows.beside, draft.beside = 3, 4
    for tree, accepted in ((draft, [1]), (rows, []), (draft, [1, 2])):
        assert policy.node_budget() > 1
        assert policy.fit_tree(tree) is tree
        gain, wait = policy.payoff.gain, policy.payoff.wait
        policy.observe(Outcome(accepted, 1))
        if tree is rows:
            assert (policy.payoff.gain, policy.payoff.wait) == (gain, wait)
    # 4 tokens and 8, each beyond a plain 1, and what cutting took.
    assert policy.payoff.spent == pytest.approx(0.5 + 1.0, abs=0.05)


def test_what_is_learnt_at_one_temperature_says_nothing_of_another() -> None:
    engine = Engine({"target": Toy(4)})
    policies = {}
    for temperature in (0.0, 0.7, 0.72, 1.0):
        sampling = Sampling(max_new_tokens=9, temperature=temperature)
        request = Request([1], resolve_method("ngram")[1], sampling)
        policies[temperature] = Policy(Context(engine, request), 0)
    tree = TokenTree(0).chain([1, 2])
    certain(policies[0.7], tree, [0.25, 0.25])
    policies[0.7].payoff.pause = 9
    values = {heat: judged(policy, tree) for heat, policy in policies.items()}
    assert values[0.7] == values[0.72] == pytest.approx([1, 0.25, 0.0625])
    assert values[0.0] == values[1.0] == [1, 0.75, 0.5625]
    assert [policy.payoff.pause for policy in policies.values()] == [0, 9, 9, 0]

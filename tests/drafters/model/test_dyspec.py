"""Dyspec: the trees it grows, beside plain loops of both algorithms; draws in an order that values
decide are exact, and the law sees it where they are not. More of its exactness is in test_laws.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.dyspec import Dyspec
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws
from tests.drafters.driving import drive_step

SPECS = ["dyspec:levels=no", "dyspec:threshold=0.05,size=4"]
PROMPT = [1, 2, 3]
FAR = 60  # tokens, so that the limit does not bound the depth
DRAWN = Sampling(temperature=1.0, max_new_tokens=FAR)
GREEDY = Sampling(max_new_tokens=FAR)


def toy() -> Toy:
    return Toy(5, seed=2, sharpness=6.0)


def drive(
    drafter: Dyspec, sampling: Sampling, budget: int = 1025, rng: Any = None
) -> tuple[TokenTree, list[Ask], Context]:
    return drive_step(drafter, sampling, toy(), PROMPT, budget, rng)


# --- the algorithms


def row(ctx: Context, tree: TokenTree, node: int) -> torch.Tensor:
    logits = torch.tensor(laws.row(toy(), [*PROMPT, *tree.tokens_to(node)]), dtype=torch.float64)
    return ctx.sampler.law(logits, tree.tokens_to(node))


def add(
    ctx: Context, tree: TokenTree, slot: tuple[float, int, torch.Tensor]
) -> tuple[tuple[float, int, torch.Tensor], tuple[float, int]]:
    """Draws for a slot (value, node, law): the slot after it, and (value, child)."""
    value, node, law = slot
    token = ctx.rng.sample(law, "draft", 0, len(tree))
    share = float(law[token])
    child = tree.add(node, token, law=Law(law), value=value * share)
    rest = law.clone()
    rest[token] = 0
    return (value * (1 - share), node, rest / rest.sum()), (value * share, child)


def token_by_token(ctx: Context, size: int) -> TokenTree:
    """Algorithm 1 of the paper: a row for every node as soon as it is drawn."""
    tree = TokenTree(PROMPT[-1])
    slots = [(1.0, 0, row(ctx, tree, 0))]
    for _ in range(size):
        slot = max(slots, key=lambda slot: slot[0])
        slots = [other for other in slots if other is not slot]
        after, (value, child) = add(ctx, tree, slot)
        slots += [after, (value, child, row(ctx, tree, child))]
    return tree


def by_levels(ctx: Context, size: int, threshold: float) -> TokenTree:
    """The paper's other algorithm, with the best slot of a level first, until `size`."""
    tree = TokenTree(PROMPT[-1])
    level = [(1.0, 0)]
    while level:
        slots = [(value, node, row(ctx, tree, node)) for value, node in level if value >= threshold]
        level = []
        while slots and len(tree) <= size:
            slot = max(slots, key=lambda slot: slot[0])
            slots = [other for other in slots if other is not slot]
            if slot[0] >= threshold:
                after, child = add(ctx, tree, slot)
                slots.append(after)
                level.append(child)
    return tree


def assert_same(tree: TokenTree, want: TokenTree) -> None:
    assert (tree.tokens, tree.parents, tree.tries) == (want.tokens, want.parents, want.tries)
    assert tree.values == pytest.approx(want.values, abs=1e-12)
    for law, other in zip(tree.laws[1:], want.laws[1:], strict=True):
        assert law is not None and other is not None
        assert law.probs.tolist() == pytest.approx(other.probs.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_token_by_token_it_is_the_papers_algorithm(seed: int) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=FAR, seed=seed)
    tree, asks, ctx = drive(Dyspec(size=24, levels=False), sampling)
    assert_same(tree, token_by_token(ctx, 24))
    assert len(tree) == 25 and len(asks) < 20, "forwards that wait for a node of the best slot"


@pytest.mark.parametrize("seed", range(6))
def test_by_levels_it_is_the_papers_algorithm_with_one_forward_a_level(seed: int) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=FAR, seed=seed)
    for size, threshold in ((24, 0.0), (24, 0.01), (64, 0.05)):
        tree, asks, ctx = drive(Dyspec(size=size, threshold=threshold), sampling)
        assert_same(tree, by_levels(ctx, size, threshold or 1 / size))
        assert max(tree.depths) <= len(asks) <= max(tree.depths) + 1
        for depth, ask in enumerate(asks):
            assert ask.rows and {tree.depths[node] for node in ask.rows} == {depth}


def slot_values(tree: TokenTree) -> list[float]:
    """Of each node but the root: the value of the slot it was drawn for."""
    values = []
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        tries = tree.tries[parent]
        spent = sum(tree.values[child] for child in tries[: tries.index(node)])
        values.append(tree.values[parent] - spent)
    return values


@pytest.mark.parametrize("levels", [False, True])
def test_the_best_slots_are_drawn_for_and_no_law_holds_an_earlier_sibling(levels: bool) -> None:
    for seed in range(8):
        sampling = Sampling(temperature=1.0, max_new_tokens=FAR, seed=seed)
        tree, _, _ = drive(Dyspec(size=20, levels=levels), sampling)
        values = slot_values(tree)
        starts = [0]
        if levels:
            assert min(values) >= 1 / 20 - 1e-12
            depths = tree.depths[1:]
            starts = [depths.index(depth) for depth in sorted(set(depths))]
        for start, end in itertools.pairwise([*starts, len(values)]):
            falling = values[start:end]
            for before, after in itertools.pairwise(falling):
                assert after <= before + 1e-12, "a slot of less value came first"
        for tries in tree.tries:
            assert len(set(tries)) == len(tries)
            for rank, child in enumerate(tries):
                law = tree.laws[child]
                assert law is not None and float(law.probs.sum()) == pytest.approx(1, abs=1e-12)
                assert not any(law.token_prob(tree.tokens[elder]) for elder in tries[:rank])


def test_the_tree_is_drawn_with_the_chance_its_laws_claim() -> None:
    """All outcomes of one draft, whose shapes differ: the order of the draws sways none of them."""
    for drafter in (Dyspec(size=3), Dyspec(size=3, levels=False)):
        total, shapes = 0.0, set()

        def draft(door: Any, drafter: Dyspec = drafter) -> TokenTree:
            return drive(drafter, DRAWN, rng=door)[0]

        for weight, tree in Enumerator.walk_outcomes(draft):
            product = 1.0
            for node in range(1, len(tree)):
                law = tree.laws[node]
                assert law is not None
                product *= law.token_prob(tree.tokens[node])
            assert weight == pytest.approx(product, abs=1e-12)
            total += weight
            shapes.add(tuple(tree.parents))
        assert total == pytest.approx(1, abs=1e-9) and len(shapes) > 2


# --- temperature 0


def likeliest(depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """All continuations up to this depth with their probabilities, likeliest first."""
    chances = {(): 1.0}
    found = []
    for _ in range(depth):
        below = {}
        for path, chance in chances.items():
            p = torch.tensor(laws.row(toy(), [*PROMPT, *path]), dtype=torch.float64).softmax(-1)
            below |= {(*path, t): chance * share for t, share in enumerate(p.tolist())}
        chances = below
        found += [(chance, path) for path, chance in below.items()]
    return sorted(found, reverse=True)


def test_at_temperature_zero_it_holds_the_likeliest_continuations() -> None:
    greedy = Sampling(max_new_tokens=5)  # four drafts deep
    want = likeliest(4)
    tree, _, _ = drive(Dyspec(size=20, levels=False), greedy)
    assert not tree.has_draws
    paths = {tuple(tree.tokens_to(node)): tree.values[node] for node in range(1, len(tree))}
    assert paths == pytest.approx({path: chance for chance, path in want[:20]})
    tree, asks, _ = drive(Dyspec(size=999, threshold=0.03), greedy)
    paths = {tuple(tree.tokens_to(node)): tree.values[node] for node in range(1, len(tree))}
    assert paths == pytest.approx({path: chance for chance, path in want if chance >= 0.03})
    assert len(asks) <= 4 and len(tree) > 8


# --- bounds


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("sampling", [DRAWN, GREEDY])
def test_size_budget_and_depth_bound_the_tree(sampling: Sampling, levels: bool) -> None:
    threshold = 1e-6
    drafter = Dyspec(size=9, levels=levels, threshold=threshold)
    assert len(drive(drafter, sampling)[0]) == 10
    assert len(drive(drafter, sampling, budget=4)[0]) == 4
    assert len(drive(drafter, sampling, budget=1)[0]) == 1
    for tokens in (1, 2, 3):
        short = Sampling(temperature=sampling.temperature, max_new_tokens=tokens)
        assert max(drive(drafter, short)[0].depths) == tokens - 1
    assert len(drive(Dyspec(threshold=0.999, levels=levels), DRAWN)[0]) <= 2


@pytest.mark.parametrize("spec", ["dyspec", "dyspec:levels=no"])
def test_it_stays_within_the_draft_models_context(spec: str) -> None:
    models = {"target": Toy(6), "draft": Toy(6, noise=0.3, context=12, name="short")}
    setting = laws.Setting(Sampling(max_new_tokens=24))
    plain = laws.generate(laws.build("plain"), [1, 2], setting, models)
    live = laws.generate(laws.build(spec, nodes=20), [1, 2], setting, models)
    assert live.ctx.output == plain.ctx.output and live.ctx.stats.drafted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spec", ["dyspec:size=3", "dyspec:size=3,levels=no"])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int, spec: str) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build(spec), [0, 1, 0], setting, models)
    want = laws.reference(models["target"], [0, 1, 0], setting)  # type: ignore[arg-type]
    assert law.distance(want) < 1e-9 and law.accepted


# --- the law has power


def rebuilt(tree: TokenTree, keep: Callable[[int], bool]) -> TokenTree:
    """Without the nodes that are not kept, and all below them, although they were drawn."""
    small, place = TokenTree(tree.tokens[0]), {0: 0}
    for node in range(1, len(tree)):
        if tree.parents[node] in place and keep(node):
            parent, law, value = place[tree.parents[node]], tree.laws[node], tree.values[node]
            place[node] = small.add(parent, tree.tokens[node], law=law, value=value)
    return small


def cut_after_the_draw(tree: TokenTree) -> TokenTree:
    """The best two nodes, as known when all tokens are."""
    best = sorted(range(1, len(tree)), key=lambda node: -tree.values[node])[:2]
    return rebuilt(tree, lambda node: node in best)


def drawn_if_likely(tree: TokenTree) -> TokenTree:
    """A threshold on the value with the token's own probability."""
    return rebuilt(tree, lambda node: tree.values[node] >= 0.2)


def sorted_siblings(tree: TokenTree) -> TokenTree:
    for tries in tree.tries:
        tries.sort(key=lambda child: -tree.values[child])
    return tree


def first_law_for_all(tree: TokenTree) -> TokenTree:
    for tries in tree.tries:
        for child in tries:
            tree.laws[child] = tree.laws[tries[0]]
    return tree


@dataclass(frozen=True)
class Slipping(Dyspec):
    """With a tree that is changed after it was drawn."""

    slip: Callable[[TokenTree], TokenTree] = lambda tree: tree

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        return self.slip(tree)


@pytest.mark.parametrize("levels", [False, True])
def test_slips_are_caught(levels: bool) -> None:
    shape = {"size": 4, "levels": levels, "threshold": 0.01}
    laws.check_law(Speculative(Slipping(**shape), nodes=4), tokens=2)  # type: ignore[arg-type]
    for slip in (cut_after_the_draw, drawn_if_likely, sorted_siblings, first_law_for_all):
        strategy = Speculative(Slipping(**shape, slip=slip), nodes=4)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
            laws.check_law(strategy, tokens=2)

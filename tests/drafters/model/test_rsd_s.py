"""RSD-S: its trees have the law of stochastic beam search, worked out in two other ways, and slips
are caught; its exactness in general is in test_laws.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.rsd_s import Race, RsdS
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws
from tests.drafters.driving import drive_step

SPECS = ["rsd-s:length=1,width=3"]
PROMPT = [1, 1, 0]
Text = tuple[int, ...]
Levels = tuple[tuple[Text, ...], ...]  # the texts that are new on each level, in their order


def drive(
    drafter: RsdS, sampling: Sampling, toy: Toy, budget: int = 64, rng: Door | None = None
) -> tuple[TokenTree, list[Ask]]:
    return drive_step(drafter, sampling, toy, PROMPT, budget, rng)[:2]


def levels(tree: TokenTree) -> Levels:
    by_depth: dict[int, list[Text]] = {}
    for node in range(1, len(tree)):
        by_depth.setdefault(tree.depths[node], []).append(tuple(tree.tokens_to(node)))
    return tuple(map(tuple, by_depth.values()))


def law_after(toy: Toy, text: Text) -> list[float]:
    weights = [math.exp(x) for x in laws.row(toy, [*PROMPT, *text])]
    return [w / sum(weights) for w in weights]


def whole_texts(toy: Toy, length: int, ends: tuple[int, ...]) -> dict[Text, float]:
    """Every continuation of `length` tokens, or shorter by an end, with its probability."""
    texts, stack = {}, [((), 1.0)]
    while stack:
        text, chance = stack.pop()
        if len(text) == length or (text and text[-1] in ends):
            texts[text] = chance
        else:
            stack += [((*text, t), chance * q) for t, q in enumerate(law_after(toy, text))]
    return texts


def drawn_texts(
    texts: dict[Text, float], length: int, width: int
) -> Iterator[tuple[Levels, float]]:
    """The levels of the tree when whole texts are drawn without replacement one after the other,
    and each level keeps the first `width` beginnings: every order, with its probability.
    """
    stack: list[tuple[tuple[Text, ...], float]] = [((), 1.0)]
    while stack:
        order, weight = stack.pop()
        beams = []
        for depth in range(1, length + 1):
            beams.append(list(dict.fromkeys(text[:depth] for text in order))[:width])
        if len(order) == len(texts) or all(len(beam) == width for beam in beams):
            new = (
                tuple(text for text in beam if len(text) == depth)
                for depth, beam in enumerate(beams, 1)
            )
            yield tuple(level for level in new if level), weight
            continue
        left = {text: chance for text, chance in texts.items() if text not in order}
        total = sum(left.values())
        stack += [((*order, text), weight * chance / total) for text, chance in left.items()]


def enumerated(drafter: RsdS, sampling: Sampling, toy: Toy) -> dict[Levels, float]:
    """Every tree of the drafter with its probability."""
    found: dict[Levels, float] = {}
    for weight, tree in Enumerator.walk_outcomes(
        lambda door: drive(drafter, sampling, toy, rng=door)[0]
    ):
        found[levels(tree)] = found.get(levels(tree), 0.0) + weight
    return found


@pytest.mark.parametrize(
    ("vocab", "length", "width", "ends"),
    [(3, 2, 2, ()), (2, 3, 2, ()), (2, 2, 3, ()), (2, 3, 2, (1,)), (3, 2, 2, (0,))],
)
def test_trees_are_those_of_whole_texts_drawn_without_replacement(
    vocab: int, length: int, width: int, ends: tuple[int, ...]
) -> None:
    toy = Toy(vocab, 4, sharpness=3.0)
    want: dict[Levels, float] = {}
    for key, weight in drawn_texts(whole_texts(toy, length, ends), length, width):
        want[key] = want.get(key, 0.0) + weight
    sampling = Sampling(temperature=1.0, stop_token_ids=ends)
    found = enumerated(RsdS(length, width), sampling, toy)
    assert found.keys() == want.keys() and len(found) > 2
    assert max(abs(found[key] - want[key]) for key in want) < 1e-12


def test_trees_are_those_of_perturbed_scores() -> None:
    """The paper's own procedure, with truncated Gumbels, drawn many times."""
    toy, rng, count = Toy(3, 4, sharpness=3.0), np.random.default_rng(1), 4000
    scores = {text: np.log(law_after(toy, text)) for text in [(), (0,), (1,), (2,)]}
    seen: Counter[Levels] = Counter()
    for _ in range(count):
        beam: list[tuple[float, float, Text]] = [(0.0, 0.0, ())]  # perturbed, log-probability, text
        tree = []
        for _ in range(2):
            options = []
            for top, phi, text in beam:
                phis = phi + scores[text]
                noisy = phis + rng.gumbel(size=3)
                with np.errstate(divide="ignore"):
                    v = top - noisy + np.log1p(-np.exp(noisy - noisy.max()))
                kept = top - np.maximum(0, v) - np.log1p(np.exp(-np.abs(v)))
                options += [(kept[t], phis[t], (*text, t)) for t in range(3)]
            beam = sorted(options, reverse=True)[:2]
            tree.append(tuple(text for _, _, text in beam))
        seen[tuple(tree)] += 1
    found = enumerated(RsdS(2, 2), Sampling(temperature=1.0), toy)
    assert found.keys() >= seen.keys()
    distance = sum((seen[key] - count * q) ** 2 / (count * q) for key, q in found.items())
    free = len(found) - 1
    assert abs(distance - free) < 4 * math.sqrt(2 * free)  # chi-squared, four deviations


def test_every_node_declares_the_law_that_its_elder_siblings_left() -> None:
    toy = Toy(6, 2, sharpness=4.0)
    shapes = set()
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed)
        tree, asks = drive(RsdS(3, 4), sampling, toy)
        assert [tree.depths.count(d) for d in (1, 2, 3)] == [4, 4, 4] and len(asks) == 3
        shapes.add(tuple(tree.parents))
        for node, tries in enumerate(tree.tries):
            rest = law_after(toy, tuple(tree.tokens_to(node)))
            for child in tries:
                law = tree.laws[child]
                assert law is not None
                want = [q / sum(rest) for q in rest]
                assert law.probs.tolist() == pytest.approx(want, abs=1e-12)
                value = (
                    tree.values[node]
                    * law_after(toy, tuple(tree.tokens_to(node)))[tree.tokens[child]]
                )
                assert tree.values[child] == pytest.approx(value)
                rest[tree.tokens[child]] = 0.0
    assert len(shapes) > 5


def test_at_temperature_zero_it_is_a_beam_search() -> None:
    toy = Toy(5, 2, sharpness=3.0)
    tree, _ = drive(RsdS(3, 3), Sampling(), toy)
    beam: list[Text] = [()]
    chances: dict[Text, float] = {(): 1.0}
    want = []
    for _ in range(3):
        for text, token in itertools.product(beam, range(5)):
            chances[*text, token] = chances[text] * law_after(toy, text)[token]
        options = [(*text, token) for text in beam for token in range(5)]
        beam = sorted(options, key=lambda text: -chances[text])[:3]
        want.append(tuple(beam))
    assert levels(tree) == tuple(want) and not tree.has_draws
    for node in range(1, len(tree)):
        assert tree.values[node] == pytest.approx(chances[tuple(tree.tokens_to(node))])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_small_budget_makes_it_narrower_then_shorter(temperature: float) -> None:
    toy = Toy(5, 2)
    want = {2: [1], 5: [1, 1, 1, 1], 6: [2, 2, 1], 9: [2] * 4, 17: [4] * 4, 99: [4] * 4}
    for budget, widths in want.items():
        tree, _ = drive(RsdS(), Sampling(temperature=temperature), toy, budget)
        assert [len(level) for level in levels(tree)] == widths, budget


def test_one_that_ends_the_text_keeps_its_place() -> None:
    toy = Toy(2, 4, sharpness=0.0)
    for temperature in (0.0, 1.0):
        options = Sampling(temperature=temperature, stop_token_ids=(0,))
        tree, asks = drive(RsdS(4, 2), options, toy)
        ends = [node for node in range(1, len(tree)) if tree.tokens[node] == 0]
        assert ends and not any(tree.tries[node] for node in ends)
        assert not {node for ask in asks for node in ask.rows or ()} & set(ends)
        assert [len(level) for level in levels(tree)][:2] == [2, 1]
    assert len(drive(RsdS(4, 1), Sampling(stop_token_ids=(0, 1)), toy)[0]) == 2


@pytest.mark.parametrize("setting", ["top-p", "penalties", "end"])
def test_three_continuations_have_the_targets_law(setting: str) -> None:
    laws.check_law(Speculative(RsdS(2, 3), nodes=5), setting, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build("rsd-s"), [0, 1, 0], setting, models)
    assert law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9
    assert law.accepted


# --- slips


class Relaid(RsdS):
    """Changes the finished tree."""

    def change(self, tree: TokenTree) -> None:
        raise NotImplementedError

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        self.change(tree)
        return tree


class WithReplacement(Relaid):
    """Declares the first child's law for all children of a node."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            for child in tries:
                tree.laws[child] = tree.laws[tries[0]]


class Reordered(Relaid):
    """Tries the likelier children first, with their own laws."""

    def change(self, tree: TokenTree) -> None:
        for tries in tree.tries:
            tries.sort(key=lambda child: -tree.values[child])


class Truncated(Relaid):
    """Keeps the likelier of the continuations instead of the first ones."""

    def change(self, tree: TokenTree) -> None:
        if len(tree) == 3:
            tree.tries[0].remove(min(tree.tries[0], key=lambda child: tree.values[child]))


@pytest.mark.parametrize("slip", [WithReplacement, Reordered, Truncated])
def test_wrong_laws_and_orders_are_caught(slip: type[Relaid]) -> None:
    laws.check_law(Speculative(RsdS(1, 2), nodes=2), "plain", 2)
    with pytest.raises(AssertionError, match="the law of the first 2 tokens is off"):
        laws.check_law(Speculative(slip(1, 2), nodes=2), "plain", 2)


def test_beginnings_that_wait_too_long_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the race between levels the output is still exact, but the trees are others."""
    real = Race._next_turn

    def turn(self: Race, rates: list[float], waiting: bool) -> int:
        return real(self, [0.0, *rates[1:]], waiting)

    toy = Toy(3, 4, sharpness=3.0)
    right = enumerated(RsdS(2, 2), Sampling(temperature=1.0), toy)
    monkeypatch.setattr(Race, "_next_turn", turn)
    assert enumerated(RsdS(2, 2), Sampling(temperature=1.0), toy).keys() != right.keys()

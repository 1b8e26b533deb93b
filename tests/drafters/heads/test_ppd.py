"""PPD on a toy: when it drafts, from which rows, and how large; its exactness is in test_laws.py,
its numbers on a transformer in tests/drafters/heads/networks/test_anchored.py.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from foretell.core.drafter import Drafter, Feedback, Reading
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.heads.hidden_transfer import HiddenTransfer
from foretell.drafters.heads.ppd import Ppd
from foretell.drafters.heads.prompt_trees import best_trees, full_trees
from foretell.drafters.heads.row_drafter import USUAL
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.composition import Composition
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers

SPECS = ["ppd:limit=10", "ppd:sparse=no"]
Steps = list[tuple[TokenTree, list[int], Any]]


def toy() -> ToyLayers:
    return ToyLayers(12, seed=2, sharpness=6.0)


def steps_of(
    drafter: Drafter, nodes: int = 12, tokens: int = 30, prepare: Any = None
) -> tuple[Steps, Any]:
    """Of each step the tree, the rows below its nodes and the outcome; and the request."""
    seen: Steps = []

    class Spy(type(drafter)):  # type: ignore[misc]
        def observe(self, ctx: Any, state: Any, step: Feedback) -> None:
            super().observe(ctx, state, step)
            step.tree.check()
            seen.append((step.tree, list(map(len, state.below)), step.outcome))

    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}  # type: ignore[arg-type]
    strategy = Speculative(Spy(**fields), nodes=nodes)
    engine = Engine({"target": toy()})
    if prepare is not None:
        prepare(engine)
    sampling = Sampling(max_new_tokens=tokens, temperature=0.0)
    live = engine.add(Request([1, 2, 3], strategy, sampling))
    for _ in engine.run():
        pass
    assert live.error is None, live.error
    return seen, live


def whole(seen: Steps, tokens: int = 40) -> Steps:
    """The steps before the text's end is near, where trees are smaller."""
    found, done = [], 0
    for step in seen:
        if tokens - done < 8:
            break
        found.append(step)
        done += 1 + len(step[2].path)
    assert len(found) > 4
    return found


@pytest.mark.parametrize("drafter", [Ppd(limit=24), HiddenTransfer(limit=24)])
def test_the_rows_of_the_node_where_a_step_ended_choose_the_next_tree(drafter: Drafter) -> None:
    seen, live = steps_of(drafter, tokens=40)
    assert [len(seen[0][0]), seen[0][1]] == [1, [3]]
    trees = best_trees(USUAL, 24, 12).trees
    states = set()
    for (_, rows, outcome), (tree, below, _) in pairwise(whole(seen)):
        state = rows[outcome.path[-1] if outcome.path else 0]
        expected = trees[state - 1]
        assert len(tree) == 1 + len(expected.paths)
        assert tree.depths[1:] == [len(path) for path in expected.paths]
        assert below == list(expected.counts) and tree.beside == sum(below)
        assert len(tree) + tree.beside <= 24
        states.add(state)
    assert len(states) > 1 and live.ctx.stats.accepted > 0


def test_a_token_is_that_of_its_rank_in_its_rows_law() -> None:
    seen, _ = steps_of(Ppd(limit=24))
    for tree, _, _ in whole(seen, 30)[1:]:
        first = [tree.tokens[node] for node in dict.fromkeys(tree.tries[0])]
        assert len(set(first)) == len(first)
        for node in range(1, len(tree)):
            below = [tree.tokens[child] for child in tree.tries[node]]
            again = [
                tree.tokens[c]
                for n in range(1, len(tree))
                for c in tree.tries[n]
                if tree.depths[n] == tree.depths[node]
            ]
            assert all(token in again for token in below)
            assert tree.values[node] <= tree.values[tree.parents[node]]


def test_without_sparse_every_node_has_all_rows() -> None:
    seen, _ = steps_of(Ppd(limit=24, sparse=False), tokens=40)
    tree = full_trees(USUAL, 24, 12).trees[2]
    for found, below, _ in whole(seen)[1:]:
        assert len(found) == 6 and below == [3] * 6 == list(tree.counts)


def test_no_row_is_computed_that_no_draft_could_follow() -> None:
    seen, live = steps_of(Ppd(limit=24), tokens=9)
    assert len(live.ctx.output) == 9
    total = 0
    for tree, below, outcome in seen:
        left = 9 - total - 1  # how deep the draft may be
        assert max(tree.depths) <= max(0, left)
        for node, count in enumerate(below):
            assert count <= max(0, left - tree.depths[node] - 1)
        total += len(outcome.path) + 1


def test_its_size_is_what_pays_by_the_measured_cost() -> None:
    def costs(steep: float) -> Any:
        def measured(engine: Engine) -> None:
            found = engine.costs_of(engine.models["target"])
            found.note_forward = lambda *_: None  # type: ignore[method-assign]
            found.seconds = {1: 1.0, 8: 1.01, 16: 1.02, 32: steep, 128: 4 * steep}

        return measured

    sizes = []
    for steep in (1.03, 2.0):
        seen, _ = steps_of(Ppd(), nodes=0, tokens=10, prepare=costs(steep))
        sizes.append(max(len(tree) + tree.beside for tree, _, _ in seen))
    assert sizes[0] >= 32 and 8 <= sizes[1] <= 16


def test_after_a_pause_rows_alone_come_before_a_draft_and_are_not_judged() -> None:
    """The policy pauses while drafts cost more than they bring, and tries again later."""

    def dear(engine: Engine) -> None:
        found = engine.costs_of(engine.models["target"])
        found.note_forward = lambda *_: None  # type: ignore[method-assign]
        found.seconds = {1: 1.0, 2: 3.0, 128: 300.0}

    seen, _ = steps_of(Ppd(), nodes=0, tokens=120, prepare=dear)
    kinds = ["draft" if len(t) > 1 else "rows" if t.beside else "plain" for t, _, _ in seen[:-4]]
    assert kinds.count("plain") > kinds.count("draft") >= 3
    for before, now in pairwise(kinds):
        assert now != "draft" or before != "plain"
        assert before != "rows" or now == "draft"


def test_it_drafts_what_the_target_would_say_of_rows_that_are_right() -> None:
    """Rows that the target answers like the text itself are accepted: the shift is right."""

    class Known(Ppd):
        def target_rows(
            self, ctx: Any, state: Any, tree: TokenTree, taps: Any, rows_of: Any
        ) -> Reading:
            reply = yield from super().target_rows(ctx, state, tree, taps, rows_of)
            for node, rows in enumerate(state.below):
                text = [*ctx.tokens, *tree.tokens_to(node)]
                for place, row in enumerate(rows):
                    row.zero_()
                    row[plain[len(text) + place + 1 - 3] if len(text) + place - 2 < 30 else 0] = 9
            return reply

    plain = steps_of(Ppd(limit=24))[1].ctx.output
    engine = Engine({"target": toy()})
    strategy = Speculative(Known(limit=40, sparse=False), nodes=40)
    live = engine.add(Request([1, 2, 3], strategy, Sampling(max_new_tokens=30, temperature=0.0)))
    for _ in engine.run():
        pass
    assert live.error is None and live.ctx.output == plain
    assert live.ctx.stats.steps <= 9  # at best 8


def test_it_is_refused_where_its_rows_cannot_be() -> None:
    with pytest.raises(Unsupported, match="layers"):
        Engine({"target": Toy(12)}).add(Request([1], Speculative(Ppd()), name="ppd"))

    @dataclasses.dataclass(frozen=True)
    class Other(Source):
        pass

    engine = Engine({"target": toy()})
    live = engine.add(Request([1, 2], Speculative(Ppd()), source=Other()))
    list(engine.run())
    assert isinstance(live.error, BadConfig) and "reads the target itself" in str(live.error)
    with pytest.raises(BadConfig, match="rows of its own"):
        Composition((Ppd(), Drafter()))


@pytest.mark.parametrize("limit", [-1, 3, 1025])
def test_settings_out_of_range_are_refused(limit: int) -> None:
    for made, name in ((Ppd, "ppd"), (HiddenTransfer, "hidden-transfer")):
        with pytest.raises(BadConfig, match=f"{name}:limit={limit}"):
            made(limit=limit)


def test_it_gives_the_tokens_of_plain_decoding_beside_another() -> None:
    engine = Engine({"target": toy()})
    sampling = Sampling(max_new_tokens=12, temperature=0.8, seed=4)
    strategies = [Plain(), Speculative(Ppd(), nodes=7), Speculative(HiddenTransfer(), nodes=5)]
    lives = [engine.add(Request([1, 2, 3], strategy, sampling)) for strategy in strategies]
    for _ in engine.run():
        pass
    assert lives[0].ctx.output == lives[1].ctx.output == lives[2].ctx.output

"""The draft model: the trees it draws and the rows its cache keeps; its exactness is in
test_laws.py.
"""

from __future__ import annotations

import pytest

from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.draft import Draft
from foretell.errors import BadConfig
from foretell.testing.toy import Toy
from tests import laws
from tests.drafters.driving import drive_step

SPECS = [
    "draft:drafts=2,length=2",
    "draft:confidence=0.4",
    "draft:length=1",
    "draft:best=yes",
    "draft:length=3,online=1",
]


def drive(
    drafter: Draft, sampling: Sampling, budget: int = 64
) -> tuple[TokenTree, list[Ask], Context]:
    return drive_step(drafter, sampling, Toy(5, seed=2, sharpness=6.0), [1, 2, 3], budget)


def test_a_greedy_chain_is_the_draft_models_own_text() -> None:
    tree, asks, _ = drive(Draft(length=4), Sampling())
    plain = laws.generate(
        laws.build("plain"),
        [1, 2, 3],
        laws.Setting(Sampling(max_new_tokens=4)),
        {"target": Toy(5, seed=2, sharpness=6.0)},
    )
    assert tree.tokens[1:] == plain.ctx.output and not tree.has_draws and len(asks) == 4
    assert drive(Draft(length=4, drafts=5), Sampling())[0].tokens == tree.tokens


@pytest.mark.parametrize("seed", range(4))
def test_the_best_chain_is_the_greedy_one_at_any_temperature_and_draws_nothing(seed: int) -> None:
    greedy = drive(Draft(length=4), Sampling())[0]
    sampling = Sampling(temperature=1.0, seed=seed)
    tree = drive(Draft(length=4, best=True), sampling)[0]
    assert (tree.tokens, tree.has_draws) == (greedy.tokens, False)
    models = {"target": Toy(5, seed=3), "draft": Toy(5, seed=2, sharpness=6.0, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=12, temperature=1.0, seed=seed))
    texts = []
    for spec in ("plain", "draft:best=yes"):
        texts.append(laws.generate(laws.build(spec), [1, 2], setting, models).ctx.output)
    assert texts[0] == texts[1], "a seed gives the tokens of plain decoding"


def test_several_drafts_share_their_beginnings_and_one_forward_a_level() -> None:
    for seed in range(20):
        tree, asks, ctx = drive(Draft(length=3, drafts=4), Sampling(temperature=1.0, seed=seed))
        assert len(asks) == 3 and len(tree.tries[0]) == 4
        for node, tries in enumerate(tree.tries):
            if tries and node:
                assert len(tries) == tree.tries[tree.parents[node]].count(node), (
                    "a chain was lost or made up"
                )
            for child in tries:
                law = tree.laws[child]
                want = ctx.sampler.law(
                    Toy(5, seed=2, sharpness=6.0).score([1, 2, 3], tree)[node], tree.tokens_to(node)
                )
                assert law is not None and law.probs.tolist() == pytest.approx(
                    want.tolist(), abs=1e-12
                )


def test_confidence_ends_a_chain_before_the_draw() -> None:
    lengths = {
        len(drive(Draft(length=6, confidence=0.5), Sampling(temperature=1.0, seed=s))[0])
        for s in range(20)
    }
    assert len(lengths) > 1 and max(lengths) <= 7
    assert len(drive(Draft(confidence=0.999), Sampling(temperature=1.0))[0]) == 1


def test_budget_and_depth_bound_the_tree() -> None:
    assert len(drive(Draft(length=9), Sampling(temperature=1.0), budget=3)[0]) == 3
    assert len(drive(Draft(length=9), Sampling(temperature=1.0, max_new_tokens=3))[0]) == 3
    assert len(drive(Draft(length=9), Sampling(temperature=1.0, max_new_tokens=1))[0]) == 1


def test_it_stays_within_the_draft_models_context() -> None:
    strategy = laws.build("draft:length=6", nodes=40)
    models = {"target": Toy(6), "draft": Toy(6, noise=0.3, context=12, name="short")}
    plain = laws.generate(
        laws.build("plain"), [1, 2], laws.Setting(Sampling(max_new_tokens=24)), models
    )
    live = laws.generate(strategy, [1, 2], laws.Setting(Sampling(max_new_tokens=24)), models)
    assert live.ctx.output == plain.ctx.output and live.ctx.stats.drafted


def test_there_is_one_best_chain() -> None:
    with pytest.raises(BadConfig, match="one best chain"):
        Draft(drafts=2, best=True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rule", ["default", "block"])
def test_a_vocabulary_padded_to_another_size_changes_no_law(size: int, rule: str) -> None:
    models = {"target": Toy(3, 3, copy=0.5), "draft": Toy(size, 5, copy=0.5, name="draft")}
    setting = laws.Setting(Sampling(max_new_tokens=2, temperature=1.0))
    law = laws.enumerate_law(laws.build("draft:length=2", rule), [0, 1, 0], setting, models)
    assert (
        law.distance(laws.reference(models["target"], [0, 1, 0], setting)) < 1e-9 and law.accepted
    )
    plain = laws.generate(
        laws.build("plain"), [0, 1, 0], laws.Setting(Sampling(max_new_tokens=20)), models
    )
    greedy = laws.generate(
        laws.build("draft"), [0, 1, 0], laws.Setting(Sampling(max_new_tokens=20)), models
    )
    assert greedy.ctx.output == plain.ctx.output

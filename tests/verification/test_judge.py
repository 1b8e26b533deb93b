"""Acceptance by a judge of the target's states: which tokens it saves, that it judges the token
itself and not the one before it, and where it is the standard rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.distribution import Sampler, Target
from foretell.core.random import Door, Rng
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.model.draft import Draft
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.train.acceptance import read_tokens
from foretell.verification.acceptance import verify_by_default, walk_tree
from foretell.verification.judge import Judge
from foretell.verification.judge_model import LinearJudge, load_judge, save_judge, states_at_nodes
from tests import laws
from tests.verification.tables import chain, copies, differs, enumerate_rule, joint, table, target

WEIGHTS = str(Path(__file__).with_name("judge.safetensors"))
TREE = TokenTree(0).chain([1, 2, 0]).chain([2, 0, 1]).chain([0], at=1)
PLAIN = LinearJudge(torch.tensor([8.0, 0.0]), torch.tensor(0.0))
Judging = Callable[[TokenTree, Target, Door, int], Outcome]


def shown(made: Target, liked: Mapping[int, float]) -> Target:
    """The same with states by which PLAIN gives nodes these probabilities, others hardly any."""
    size = len(made.tree)
    states = torch.zeros(size, 2)
    states[:, 0] = -9.0
    for node, chance in liked.items():
        states[node, 0] = math.log(chance / (1 - chance)) / 8
    # In the reply stand two tokens of the text before the tree.
    hidden = torch.cat([torch.full((2, 2), 9.0), states])
    made.reply = Reply(made.rows, {1: hidden * 0, 2: hidden}, [], list(range(-2, size)))
    return made


def judging(delta: float = 0.5, judge: LinearJudge = PLAIN) -> Judging:
    def rule(tree: TokenTree, made: Target, rng: Door, position: int) -> Outcome:
        return Judge(delta=delta).verify_judged(judge, tree, made, rng, position)

    return rule


def by_hand(made: Target, liked: Mapping[int, float], delta: float) -> tuple[list[int], int]:
    """Greedy, by plain loops: the target's child, else the best one above delta, else the end."""
    tree, path, node = made.tree, [], 0
    while True:
        token = int(made.rows[node].argmax())
        children = [n for n in range(len(tree)) if tree.parents[n] == node]
        same = [n for n in children if tree.tokens[n] == token]
        good = sorted((-liked.get(n, 0.0), n) for n in children if liked.get(n, 0.0) > delta)
        if not same and not good:
            return path, token
        node = same[0] if same else good[0][1]
        path.append(node)


@pytest.mark.parametrize("delta", [0.0, 0.3, 0.5, 0.9])
def test_a_token_stays_that_the_target_or_the_judge_takes(delta: float) -> None:
    lengths, saved = set(), 0
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        chances = torch.rand(len(TREE), generator=draw) * 0.98 + 0.01
        liked = dict(enumerate(chances.tolist()))
        made = shown(target(table(seed, 3), TREE, temperature=0.0), liked)
        outcome = judging(delta)(TREE, made, Rng(seed), 0)
        assert (outcome.path, outcome.token) == by_hand(made, liked, delta)
        assert {n for n, accepted in outcome.tested if accepted} == set(outcome.path)
        assert len(dict(outcome.tested)) == len(outcome.tested)
        lengths.add(len(outcome.path))
        saved += outcome.path != walk_tree(TREE, made, Rng(seed), 0).path
    assert len(lengths) > 1 and saved


def test_with_delta_one_it_is_the_standard_rule_draw_by_draw() -> None:
    for seed in range(30):
        drawn = copies(table(seed + 9, 3), 2, 3)(Rng(seed))
        for tree in (TREE, drawn, chain(table(seed, 3), 3)(Rng(seed)), TokenTree(0)):
            for temperature in (0.0, 1.0):
                made = shown(
                    target(table(seed, 3), tree, temperature=temperature),
                    dict.fromkeys(range(len(tree)), 1 - 1e-9),
                )
                got = judging(1.0)(tree, made, Rng(seed), 4)
                assert got == verify_by_default(tree, made, Rng(seed), 4)


def test_with_delta_zero_a_chain_is_taken_whole() -> None:
    for seed in range(20):
        tree = chain(table(seed + 5, 3), 4)(Rng(seed))
        for temperature in (0.0, 1.0):
            made = shown(target(table(seed, 3), tree, temperature=temperature), {})
            assert judging(0.0)(tree, made, Rng(seed), 0).path == [1, 2, 3, 4]


def test_nothing_is_taken_behind_what_both_refuse_and_the_correction_keeps_its_law() -> None:
    tree, rows = TokenTree(0).chain([1, 2]), table(3, 3)

    def rule(tree: TokenTree, made: Target, rng: Door, position: int) -> Outcome:
        return judging()(tree, shown(made, {2: 0.99}), rng, position)

    outputs, _ = enumerate_rule(rule, tree, rows)
    exact = joint(rows, tree)
    first = {t: sum(p for text, p in outputs.items() if text[0] == t) for t in range(3)}
    assert first == pytest.approx(
        {t: sum(p for text, p in exact.items() if text[0] == t) for t in range(3)}
    )
    below = {text: p for text, p in outputs.items() if text[0] == 1}
    assert {text[1] for text in below} == {2}, "the judge takes what stands below an accepted token"


def test_every_draw_has_a_key_of_its_own_and_probabilities_sum_to_one() -> None:
    """The enumerating door refuses a key that is used twice."""
    for tree in (TREE, copies(table(9, 3), 2, 3)(Rng(1)), chain(table(2, 3), 3)(Rng(2))):
        liked = dict.fromkeys(range(0, len(tree), 2), 0.9)

        def rule(
            tree: TokenTree,
            made: Target,
            rng: Door,
            position: int,
            liked: Mapping[int, float] = liked,
        ) -> Outcome:
            return judging()(tree, shown(made, liked), rng, position)

        outputs, _ = enumerate_rule(rule, tree, table(3, 3))
        assert sum(outputs.values()) == pytest.approx(1.0)
        assert differs(outputs, joint(table(3, 3), tree)) > 0.01


def test_ends_excluded_tokens_and_what_options_forbid_are_not_judged() -> None:
    rows = torch.tensor([[0.0, -1.0, -2.0, -3.0]] * 2).double()
    tree = TokenTree(0).chain([3])
    for temperature in (0.0, 1.0):
        for sampling, excluded in (
            (Sampling(temperature=temperature, stop_token_ids=(3,)), frozenset[int]()),
            (Sampling(temperature=temperature, bad_words=[[3]]), frozenset[int]()),
            (Sampling(temperature=temperature), frozenset({3})),
            (Sampling(temperature=temperature), frozenset({2})),
        ):
            judge = dataclasses.replace(PLAIN, excluded=excluded)
            sampler = Sampler(sampling, [0], (), 4)
            made = shown(Target(rows, sampler, [], tree), {1: 0.99})
            # At temperature 1 a drawn or certain token may be the target's own.
            got = judging(judge=judge)(tree, made, Low(), 0)
            assert bool(got.path) == (excluded == {2}), sampling


class Low(Rng):
    """The target always says its likeliest token."""

    def __init__(self) -> None:
        super().__init__(0)

    def sample(self, p: torch.Tensor, *key: Any) -> int:
        return int(p.argmax())


# --- in the engine


def ran(spec: str, sampling: Sampling) -> Any:
    strategy = resolve_method(spec)[1]
    return laws.generate(strategy, [1, 2, 3], laws.Setting(sampling), laws.world(strategy, 8))


@pytest.mark.parametrize("drafter", ["draft", "ngram", "token-recycling"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_delta_one_texts_are_those_of_the_standard_rule(
    drafter: str, temperature: float
) -> None:
    for seed in range(2):
        sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=24)
        own = ran(f"{drafter}:nodes=5", sampling)
        judged = ran(f"{drafter}:nodes=5,rule=judge,delta=1,weights={WEIGHTS}", sampling)
        assert judged.ctx.output == own.ctx.output
        assert judged.ctx.stats.steps == own.ctx.stats.steps


def test_a_step_gives_more_tokens_the_lower_delta_is() -> None:
    models = {"target": Toy(8, seed=1), "draft": Toy(8, seed=5, name="draft")}  # they disagree
    steps = []
    for delta in (1.0, 0.8, 0.4, 0.0):
        strategy = Speculative(Draft(), Judge(WEIGHTS, delta), 4)
        setting = laws.Setting(Sampling(max_new_tokens=48))
        steps.append(laws.generate(strategy, [1, 2, 3], setting, models).ctx.stats.steps)
    assert steps == sorted(set(steps), reverse=True), steps


@dataclasses.dataclass(frozen=True)
class Seeing(Judge):
    """Notes the states that it is shown, and the text of each."""

    def verify_judged(
        self, judge: LinearJudge, tree: TokenTree, target: Target, rng: Door, position: int
    ) -> Outcome:
        for node in range(1, len(tree)):
            state = self._goodness_of(judge, target, range(node, node + 1))[0]
            SEEN[(*target.output, *tree.tokens_to(node))] = state
        return super().verify_judged(judge, tree, target, rng, position)


SEEN: dict[tuple[int, ...], float] = {}


def test_the_state_is_that_of_the_judged_token_itself() -> None:
    """Of the whole text with the token at its end, as a forward over it alone gives it."""
    SEEN.clear()
    toy, prompt = Toy(8, seed=2), [1, 2, 3]
    models = {"target": toy, "draft": Toy(8, seed=2, name="draft", sharpness=0.5)}
    engine = Engine(models)
    strategy = Speculative(Draft(), Seeing(WEIGHTS), 4)
    engine.add(Request(prompt, strategy, Sampling(max_new_tokens=20)))
    list(engine.run())
    assert len(SEEN) > 12
    for output, chance in SEEN.items():
        text = [*prompt, *output]
        state = read_tokens(toy, text, len(text) - 1, (2,)).hidden[2][-1:]
        assert load_judge(WEIGHTS).good_chances(state) == pytest.approx([chance], abs=1e-6)


def test_a_state_one_token_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(reply: Reply, nodes: range) -> torch.Tensor:
        return states_at_nodes(reply, [node - 1 for node in nodes])

    monkeypatch.setattr("foretell.verification.judge.states_at_nodes", early)
    with pytest.raises(AssertionError):
        test_the_state_is_that_of_the_judged_token_itself()


# --- refusals


def test_a_judge_of_states_of_another_width_is_refused(tmp_path: Path) -> None:
    save_judge(LinearJudge(torch.ones(3), torch.tensor(0.0)), tmp_path / "j")
    with pytest.raises(BadConfig, match=r"it needs states of 3 numbers, .* have 2; make one"):
        ran(f"draft:nodes=5,rule=judge,weights={tmp_path / 'j'}", Sampling())


class Other(Toy):
    """A model for which no judge ships."""

    judge = None  # type: ignore[assignment]


def failed(rule: Judge, model: Toy) -> Exception:
    engine = Engine({"target": model, "draft": Toy(8, name="draft")})
    live = engine.add(Request([1, 2], Speculative(Draft(), rule, 3), Sampling()))
    list(engine.run())
    assert live.error is not None and not model.calls
    return live.error


def test_what_is_missing_is_told_before_any_forward() -> None:
    blind = Toy(8)
    blind.caps = frozenset({"tree", "rows", "rollback"})
    for rule, model, said in (
        (Judge(), Other(8), "rule judge cannot run on toy: it needs a judge, and none ships"),
        (Judge(WEIGHTS), blind, "it needs hidden states of the target; choose another rule"),
        (Judge("nowhere"), Toy(8), "nowhere: cannot be read .* make one with `foretell train"),
    ):
        error = failed(rule, model)
        assert "\n" not in str(error)
        with pytest.raises(type(error), match=said):
            raise error
    assert isinstance(failed(Judge(), Other(8)), Unsupported)


def test_a_judge_is_read_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> LinearJudge:
        calls.append(args)
        return load_judge(WEIGHTS)

    monkeypatch.setattr("foretell.verification.judge.judge_of", counted)
    engine = Engine({"target": Toy(8), "draft": Toy(8, name="draft")})
    for _ in range(3):
        engine.add(Request([1, 2], Speculative(Draft(), Judge(WEIGHTS), 3), Sampling()))
    list(engine.run())
    assert len(calls) == 1

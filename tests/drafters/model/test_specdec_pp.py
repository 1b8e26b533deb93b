"""Chains that end where a head expects a rejection; the general laws are in test_laws.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.acceptance_head import (
    AcceptanceHead,
    load_acceptance_head,
    save_acceptance_head,
)
from foretell.drafters.model.specdec_pp import SpecdecPp, State
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, Unsupported
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws, tiny

SPECS = [
    "specdec-pp:head={here}/specdec_pp.safetensors,shortest=1,threshold=0.5",
    "specdec-pp:estimate=confidence,shortest=1,threshold=0.6",
    "specdec-pp:estimate=entropy",
]
HEAD = str(Path(__file__).with_name("specdec_pp.safetensors"))  # of states of two numbers
PROMPT = [1, 2, 3]
WARM = Sampling(temperature=1.0, max_new_tokens=40)


def world() -> dict[str, Model]:
    toy = Toy(5, seed=2, sharpness=6.0)
    return {"target": toy, "draft": toy}


@torch.inference_mode()
def answered(model: Model, tokens: Sequence[int], ask: Ask) -> Any:
    job, _ = model.cache().prepare(ask, tokens, len(tokens))
    return model.forward([job])[0]


def drive(
    drafter: SpecdecPp, sampling: Sampling, budget: int = 64
) -> tuple[TokenTree, list[Ask], Context]:
    """The draft of one step."""
    models = world()
    ctx = Context(Engine(models), Request(PROMPT, Speculative(drafter), sampling))
    steps = drafter.steps(ctx, drafter.start(ctx), budget)
    asks: list[Ask] = []
    value = None
    while True:
        try:
            ask: Any = steps.send(value)
        except StopIteration as end:
            end.value.check()
            return end.value, asks, ctx
        asks.append(ask)
        value = answered(models["draft"], PROMPT, ask)


def seeded(seed: int) -> Sampling:
    return dataclasses.replace(WARM, seed=seed)


def judged(tokens: Sequence[int]) -> float:
    """What the head says of the last of these tokens, from a forward over all of them."""
    chain = TokenTree(tokens[0]).chain(tokens[1:])
    reply = answered(world()["draft"], tokens[:1], Ask(chain, taps=(2,)))
    return float(load_acceptance_head(HEAD).accept_chance(reply.hidden[2][-1:]))


def test_a_chain_ends_a_token_after_the_product_has_fallen() -> None:
    lengths = set()
    for seed in range(10):
        drafter = SpecdecPp(HEAD, threshold=0.85, shortest=2, longest=9)
        tree, asks, _ = drive(drafter, seeded(seed))
        drafted = tree.tokens[1:]
        product, want = 1.0, 9
        for size in range(2, 10):  # tokens drawn when the product is looked at: the last is unknown
            text = [*PROMPT, *drafted[: size - 1]]
            if len(text) > len(PROMPT) + len(drafted) - 1:
                break
            product *= judged(text)
            if 1 - product > 0.85:
                want = size
                break
        assert len(drafted) == want == len(asks)
        assert all(ask.rows == [i] and ask.taps == (2,) for i, ask in enumerate(asks))
        lengths.add(want)
    assert len(lengths) >= 3, "the head hardly decided anything"


@pytest.mark.parametrize("estimate", ["confidence", "entropy"])
def test_without_a_head_the_law_decides(estimate: str) -> None:
    lengths = set()
    for seed in range(20):
        drafter = SpecdecPp(estimate=estimate, threshold=0.7, shortest=1, longest=9)
        tree, asks, ctx = drive(drafter, seeded(seed))
        product, want = 1.0, 9
        for node in range(len(tree) - 1):
            rows = world()["draft"].score(PROMPT, tree)
            q = ctx.sampler.law(rows[node], tree.tokens_to(node)).tolist()
            entropy = -sum(x * math.log(x) for x in q if x)
            product *= max(q) if estimate == "confidence" else math.exp(-entropy)
            if 1 - product > 0.7:
                want = node + 1
                break
        assert len(tree) - 1 == want == len(asks) and not any(ask.taps for ask in asks)
        lengths.add(want)
    assert len(lengths) > 1


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=40), WARM])
def test_thresholds_of_one_and_zero_are_the_bounds(sampling: Sampling) -> None:
    for options in ({"head": HEAD}, {"estimate": "confidence"}, {"estimate": "entropy"}):
        bounds: dict[str, Any] = {**options, "shortest": 3, "longest": 7}
        assert len(drive(SpecdecPp(threshold=1.0, **bounds), sampling)[0]) == 8
        assert len(drive(SpecdecPp(threshold=0.0, **bounds), sampling)[0]) == 4
        assert len(drive(SpecdecPp(threshold=1.0, **bounds), sampling, budget=3)[0]) == 3


def test_a_greedy_chain_is_the_draft_models_own_text() -> None:
    tree, _, _ = drive(SpecdecPp(HEAD, threshold=1.0, longest=5), Sampling(max_new_tokens=40))
    plain = laws.generate(Plain(), PROMPT, laws.Setting(Sampling(max_new_tokens=5)), world())
    assert tree.tokens[1:] == plain.ctx.output and not tree.has_draws


# --- the law, and slips that it catches


BITS = (1, 1, 0)  # a prompt of a vocabulary of two
FOUR = laws.Setting(Sampling(temperature=1.0, max_new_tokens=4))  # the head decides over a third


def error_of_a_step(drafter: SpecdecPp) -> float:
    """By how much the law of four tokens is off where one step drafts and the rest is plain.

    Of the step every outcome is enumerated, and what may follow it is the target's own law.
    """
    strategy = Speculative(drafter, nodes=3)
    models = laws.world(strategy, vocab=2)
    target = models["target"]
    assert isinstance(target, Toy)

    def once(door: Enumerator) -> tuple[int, ...]:
        engine = Engine(models)
        live = engine.add(Request(BITS, strategy, FOUR.sampling, rng=door))
        while not live.ctx.output:
            engine.step()
        engine.end(live)
        return tuple(live.ctx.output)

    law: dict[tuple[int, ...], float] = {}
    stack = [(output, weight) for weight, output in Enumerator.walk_outcomes(once)]
    while stack:
        output, weight = stack.pop()
        if len(output) == 4:
            law[output] = law.get(output, 0.0) + weight
            continue
        following = laws.expected_law(target, BITS, output, FOUR)
        stack += [((*output, token), weight * p) for token, p in enumerate(following)]
    want = laws.reference(target, BITS, FOUR)
    assert abs(sum(law.values()) - 1) < laws.EXACT
    return max(abs(law[output] - want[output]) for output in want)


@dataclasses.dataclass(frozen=True)
class Counting(SpecdecPp):
    """Notes how many tokens it drafts, by the first one."""

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, state, budget)
        LENGTHS.setdefault(tree.tokens[1], set()).add(len(tree) - 1)
        return tree


LENGTHS: dict[int, set[int]] = {}


def test_the_law_is_the_targets_where_a_drawn_token_decides_the_length() -> None:
    LENGTHS.clear()
    assert error_of_a_step(Counting(HEAD, threshold=0.2, shortest=1)) < laws.EXACT
    assert LENGTHS[0] == {3} and LENGTHS[1] == {2}


class Dropping(SpecdecPp):
    """Takes back the newest token where the head does not like it: the decision sees the draw."""

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree: TokenTree = yield from super().steps(ctx, state, budget)
        text = [*ctx.tokens, *tree.tokens[1:]]
        reply = yield Ask(tree, "draft", ctx.branch, rows=(), taps=state.taps)
        assert state.head is not None and len(text) >= len(reply.new)
        if float(state.head.accept_chance(reply.hidden[state.taps[0]][-1:])) > 0.45:
            return tree
        shorter = TokenTree(tree.tokens[0])
        for node in range(1, len(tree) - 1):
            parent = tree.parents[node]
            shorter.add(parent, tree.tokens[node], tree.laws[node], tree.values[node], "slip")
        return shorter


class Elsewhere(SpecdecPp):
    """Says of its tokens that they were drawn from the law of another place."""

    def _draw(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor, key: int
    ) -> tuple[int, torch.Tensor]:
        child, q = super()._draw(ctx, tree, node, row, key)
        law = tree.laws[child]
        assert law is not None
        law.probs = law.probs.roll(1)
        return child, q


@pytest.mark.parametrize("slip", [Dropping, Elsewhere])
def test_slips_are_caught(slip: type[SpecdecPp]) -> None:
    assert error_of_a_step(slip(HEAD, threshold=0.2, shortest=1)) > 1e-3


# --- real models, and what is refused


def test_greedy_tokens_are_plain_decodings_with_a_random_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    path = tmp_path / "head.safetensors"
    save_acceptance_head(AcceptanceHead(32), path)
    lm = tiny.lm()
    plain = lm.generate("def add(a, b):", "plain", max_new_tokens=24)
    drafted = lm.generate("def add(a, b):", f"specdec-pp:head={path},nodes=9", max_new_tokens=24)
    assert drafted.tokens == plain.tokens and drafted.stats.accepted
    assert drafted.stats.steps < plain.stats.steps


def test_a_head_of_another_model_is_refused_by_name() -> None:
    lm = tiny.lm()
    with pytest.raises(BadConfig, match=r"reads states of 2 numbers and those of .* have 32"):
        lm.generate("def", f"specdec-pp:head={HEAD},nodes=4")
    with pytest.raises(BadFile, match=r"nowhere: cannot be read.*train acceptance-head"):
        lm.generate("def", "specdec-pp:head=nowhere,nodes=4")


def test_a_draft_model_without_hidden_states_is_refused_before_the_first_forward() -> None:
    models: Mapping[str, Model] = {"target": Toy(4), "draft": Toy(4, name="blind")}
    models["draft"].caps = Model.caps
    request = Request([1, 2], Speculative(SpecdecPp(HEAD), nodes=4))
    with pytest.raises(Unsupported, match=r"blind: it needs hidden states; use estimate="):
        Engine(models).add(request)
    assert not any(model.calls for model in models.values())
    live = Engine(models).add(
        Request([1, 2], Speculative(SpecdecPp(estimate="entropy"), nodes=4), WARM)
    )
    laws.finish(live.ctx.engine, live)  # type: ignore[arg-type]
    assert live.ctx.stats.drafted


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "estimate=head needs the file of a head"),
        ({"head": HEAD, "estimate": "entropy"}, "estimate=head needs"),
        ({"estimate": "entropy", "shortest": 21}, "shortest=21: must be at most longest=20"),
    ],
)
def test_a_bad_value_is_told(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        SpecdecPp(**fields)
    assert said in str(caught.value) and "\n" not in str(caught.value)

"""Levels of speculation within a draft: keys, copies of states, and slips of the middle level. That
drafts have the draft model's law is in drafters/test_cascade.py.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from foretell import registry
from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.random import Door, Rng
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Call, Outcome, Sampling, Together
from foretell.drafters.model import nested
from foretell.drafters.model.cascade import Cascade
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.verification.acceptance import verify_in_order, walk_tree
from tests import laws

TWO = "cascade:inner=(draft:length=2,drafts=2),model=middle,length=2,size=2"
PROMPT = [1, 2, 0, 1, 2]


def test_every_draw_of_a_step_has_a_key_of_its_own() -> None:
    p = torch.full((50,), 0.02, dtype=torch.float64)
    door, plain = nested.NumberedDoor(Rng(3)), Rng(3)
    door.begin_step(7)
    first = [door.sample(p, "target", 9), door.sample(p, "target", 9), door.sample(p, "draft", 7)]
    assert first == [plain.sample(p, "draft", 7, index) for index in (1, 2, 3)]
    assert door.accept(0.5, "accept", 9) == plain.accept(0.5, "draft", 7, 4)
    assert torch.equal(door.gumbel(3, 9), plain.gumbel(3, 7, 5))
    door.begin_step(8)
    assert door.sample(p, "target", 9) == plain.sample(p, "draft", 8, 1)
    assert door.at(2).sample(p, "target", 9) == plain.at(2).sample(p, "draft", 0, 1)


# --- slips


def plain_sample(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """TriForce's released code: after a refusal the token comes from the draft model's own law."""
    outcome = verify_in_order(tree, target, rng, position)
    node = outcome.path[-1] if outcome.path else 0
    if outcome.token is not None and any(not accepted for _, accepted in outcome.tested):
        outcome.token = rng.sample(target.p(node), "target", position + len(outcome.path))
    return outcome


def first_law(self: nested.Recorded, node: int, token: int) -> tuple[Law | None, float]:
    """Every token names the law of the first."""
    return Law(self.p(0)), float(self.p(0)[token]) or 0.5


class OneKey(nested.NumberedDoor):
    """Draws are keyed by their place in the text, which a later step reaches again."""

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        return self.door.sample(p, "draft", position, index)


def test_published_and_other_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = laws.build("cascade:inner=(draft:length=2),model=middle,length=2,size=2")

    def check() -> None:
        laws.check_law(strategy, "plain", 3, prompt=(0, 1, 0), vocab=2, warm=False)

    check()
    for module, name, slip in (
        (nested, "verify_by_default", plain_sample),
        (nested.Recorded, "law_of_token", first_law),
        (nested, "NumberedDoor", OneKey),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(module, name, slip)
            check()


def test_the_walk_in_place_of_the_residual_rule_is_no_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exact rule may stand in the middle, or the test above might catch too much."""
    monkeypatch.setattr(nested, "verify_by_default", walk_tree)
    laws.check_law(laws.build(TWO), "plain", 2)


# --- copies of states


@dataclass
class Seen:
    """A copy of it goes its own way."""

    text: list[int] = field(default_factory=list)
    observed: int = 0


@dataclass(frozen=True)
class Witness(Drafter):
    """Asserts what drafters rely on: the text that a state has seen only ever grows.

    Proposes what its own model says, by every kind of message that drafting may need.
    """

    models = ("draft",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return {"brought": models["target"]}

    def start(self, ctx: Context) -> Seen:
        assert ctx.shared(list, "texts") is not None
        return Seen(list(ctx.tokens))

    def look(self, ctx: Context, state: Seen) -> None:
        assert ctx.tokens[: len(state.text)] == state.text, "the text has changed"
        assert ctx.tokens[len(ctx.request.prompt) :] == ctx.output
        state.text = list(ctx.tokens)

    def ask(self, ctx: Context, model: str) -> Generator[Any, Any, int]:
        tree = TokenTree(ctx.tokens[-1])
        reply = yield Ask(tree, model, ctx.branch, rows=[0])
        assert reply.nodes == [0] and reply.new[-1:] in ([0], [])
        return int(reply.logits[0].argmax())

    def steps(self, ctx: Context, state: Seen, budget: int) -> Drafting:
        self.look(ctx, state)
        best = yield Together([self.ask(ctx, "draft"), self.ask(ctx, "target")])
        tree = TokenTree(ctx.tokens[-1])
        tree.add(0, (yield Call(lambda: best[0])))
        if budget > 2:
            tree.add(0, best[1])
        ahead = TokenTree(ctx.tokens[-1]).chain(best[:1])
        first, second = yield [Ask(ahead, "draft", ctx.branch), Ask(ahead, "brought", ctx.branch)]
        assert first.nodes[-1] == second.nodes[-1] == 1
        return tree

    def observe(self, ctx: Context, state: Seen, step: Feedback) -> None:
        self.look(ctx, state)
        assert ctx.tokens[len(ctx.tokens) - len(step.tokens) :] == step.tokens
        assert len(step.reply.logits) == len(step.tree)
        state.observed += 1
        ctx.shared(list, "texts").append(state.observed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_that_an_inner_drafters_state_has_seen_only_grows(temperature: float) -> None:
    models = {"target": Toy(6, copy=2.0), "middle": Toy(6, noise=1.0, copy=1.0)}
    models["draft"] = Toy(6, noise=1.5, copy=1.0)
    strategy = Speculative(Cascade(Witness(), 4, "middle", 2), nodes=4)
    sampling = Sampling(temperature=temperature, max_new_tokens=40)
    engine = Engine(models)
    live = engine.add(Request(PROMPT, strategy, sampling))
    laws.finish(engine, live)
    stats = live.ctx.stats
    assert 0 < stats.accepted < stats.drafted, "one side was not tested"
    (texts,) = [store for key, store in engine.stores.items() if key[2] == "texts"]
    assert len(texts) > stats.steps, "what the draft model said was not observed"


def test_every_drafter_may_be_the_inner_one_or_says_why_not() -> None:
    ran = 0
    setting = laws.Setting(Sampling(max_new_tokens=14))
    models = {"target": Toy(8, copy=3.0), "middle": Toy(8, noise=0.4, copy=3.0)}
    models["draft"] = Toy(8, noise=0.8, copy=3.0)
    want = laws.generate(laws.build("plain"), PROMPT * 2, setting, models).ctx.output
    for name in registry.method_names("drafter"):
        spec = laws.variants(name)[0]
        try:
            strategy = laws.build(f"cascade:inner=({spec}),model=middle,size=4", nodes=4)
            live = laws.generate(strategy, PROMPT * 2, setting, models)
        except (BadConfig, Unsupported) as error:
            assert "cascade:" in str(error) or name in str(error)
            continue
        assert live.ctx.output == want and live.ctx.stats.accepted, spec
        ran += 1
    assert ran > 10

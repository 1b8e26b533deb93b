"""DEL: its numbers worked out by plain loops, and the defects of the authors' code; its exactness
is in test_laws.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.own.del_exit import DelExit, Records
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy_layers import ToyLayers
from tests import laws
from tests.cache.users import run
from tests.drafters.own.test_layerskip import Counting
from tests.drafters.test_every import drafted
from tests.models.decoder.families import tiny

SPECS = ["del-exit:longest=2,stride=2"]
PROMPT = [1, 2, 3, 1, 2]
SAMPLED = Sampling(temperature=0.8, max_new_tokens=30, seed=3)
GREEDY = Sampling(max_new_tokens=30)


@dataclass(frozen=True)
class Watched(DelExit):
    """Keeps its records and what it learnt from."""

    records: list[Records] = field(default_factory=list, hash=False)
    steps_seen: list[Feedback] = field(default_factory=list, hash=False)
    trials: list[float] = field(default_factory=list, hash=False)

    def start(self, ctx: Context) -> Records:
        self.records.append(super().start(ctx))
        return self.records[-1]

    def observe(self, ctx: Context, records: Records, step: Feedback) -> None:
        super().observe(ctx, records, step)
        self.steps_seen.append(step)
        self.trials.append(records.trials)


def recorded(exits: int = 3, **arrays: Any) -> Records:
    records = Records(range(1, exits + 1), exits + 1)
    records.seeded, records.trials = True, 1.0
    for name, value in arrays.items():
        setattr(records, name, np.array(value, dtype=float))
    return records


# --- the choice


def test_the_best_exit_and_length_are_those_of_a_search_by_hand() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        alpha = draw.random(7)
        records = recorded(7, agreed=alpha)
        promise = {}
        for place in range(7):
            tokens = 1.0
            for length in range(18):
                promise[place, length] = tokens / (length * (place + 1) + 8)
                tokens = 1 + alpha[place] * tokens
        assert records.best_draft(17) == max(promise, key=lambda key: promise[key])


def test_of_equal_exits_the_lowest_is_taken() -> None:
    assert recorded(5, agreed=[0.8] * 5).best_draft(17)[0] == 0
    assert recorded(5, agreed=[1.0] * 5).best_draft(17) == (0, 17)
    assert recorded(5, agreed=[0.0] * 5).best_draft(17) == (0, 0), "nothing agrees: a plain step"


def test_the_threshold_is_the_midpoint_of_both_means() -> None:
    records = Records([1, 2], 3)
    assert records.mean_exit(0) is None
    agreed = np.array([[1.0, 0.0], [1.0, 1.0]])
    records.note_step(agreed, agreed > 0, np.array([[0.9, 0.3], [0.6, 0.8]]), 0.5)
    assert records.mean_exit(0) == pytest.approx((0.9 + 0.3) / 2)
    assert records.mean_exit(1) is None, "it was never wrong: 0 / 0 is no threshold"
    records.note_step(agreed[:, :1], agreed[:, :1] > 0, np.array([[0.5], [0.4]]), 0.5)
    assert records.mean_exit(0) == pytest.approx(((0.45 + 0.5) / 1.5 + 0.3) / 2)
    assert records.trials == 2.0 and records.agreed.tolist() == [1.5, 2.0]


def context(sampling: Sampling, model: Any = None) -> tuple[Context, DelExit, Records]:
    drafter = DelExit()
    engine = Engine({"target": model or ToyLayers(8, seed=3)})
    ctx = Context(engine, Request(PROMPT, Speculative(drafter), sampling))
    return ctx, drafter, drafter.start(ctx)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_chosen_length_the_budget_and_the_threshold_end_a_draft(sampling: Sampling) -> None:
    strategy = Speculative(DelExit())
    for agreed, length in (([1.0, 0, 0], 17), ([0.7, 0, 0], 2), ([0.0, 0, 0], 0)):
        ctx, _, records = context(sampling)
        records.seeded, records.trials, records.agreed = True, 1.0, np.array(agreed)
        assert records.best_draft(17) == (0, length)
        assert len(drafted(strategy, ctx, records, 64)) == 1 + length
        assert len(drafted(strategy, ctx, records, 3)) == min(3, 1 + length)
    ctx, _, records = context(sampling)
    records.seeded, records.trials, records.agreed = True, 1.0, np.array([1.0, 0, 0])
    records.counts[:] = 1.0
    records.confidences[:] = 1.0
    tree = drafted(strategy, ctx, records, 64)
    assert len(tree) == 2, "the token of too little confidence is verified, nothing after it"


# --- the records


def test_only_tokens_with_a_right_text_before_them_count() -> None:
    """What follows the first wrong draft changes nothing, without a draft nothing does."""
    found = []
    for tail in ([3, 4], [4, 3], [5, 6]):
        ctx, drafter, records = context(GREEDY)
        tree = TokenTree(PROMPT[-1]).chain([1, *tail])
        ctx.branches[0].output += [1, 7]
        rows = torch.zeros(4, 8)
        rows[torch.arange(4), torch.tensor([1, 7, *tail])] = 1.0
        hidden = {tap: torch.rand(4, 9, dtype=torch.float64) for tap in range(1, 5)}
        for tap, states in hidden.items():
            states[:2] = torch.linspace(0, tap, 18).view(2, 9)
        reply = Reply(rows, hidden, [0, 1, 2, 3], [0, 1, 2, 3])
        step = Feedback(tree, reply, Outcome([1], 7, [(1, True), (2, False)]), [1, 7])
        drafter.observe(ctx, records, step)
        assert records.trials == 2
        found.append((records.agreed.tolist(), records.counts.tolist()))
        found[-1] += tuple(records.confidences.flatten().tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("length", [1, 5, 32, 33, 60])
def test_the_last_tokens_of_the_prompt_count(length: int) -> None:
    watched = Watched()
    prompt = [(3 * i + i * i) % 8 for i in range(length)]
    request = Request(prompt, Speculative(watched, nodes=9), Sampling(max_new_tokens=9))
    run({"target": ToyLayers(8, seed=3)}, request)
    # The row after the last of them is the first of the step.
    first = watched.steps_seen[0]
    assert watched.trials[0] == min(32, length) - 1 + len(first.tokens)
    assert watched.trials[1] == pytest.approx(
        0.95 * watched.trials[0] + len(watched.steps_seen[1].tokens)
    )


def test_shadow_tokens_of_the_exit_used_are_the_drafts_and_of_the_last_layer_the_targets() -> None:
    watched = Watched()
    model = ToyLayers(8, seed=3)
    live = run({"target": model}, Request(PROMPT, Speculative(watched, nodes=9), GREEDY))[0]
    drafts = 0
    for step in watched.steps_seen:
        hidden, new = step.reply.hidden, step.reply.new
        rows = model.head_rows(hidden[4])[[new.index(node) for node in step.reply.nodes]]
        assert torch.equal(rows, step.reply.logits)
        # Some exit drafted the whole chain: what its states say is the chain.
        chain = step.tree.tokens[1:]
        places = [new.index(node) for node in range(len(chain))]
        said = [model.head_rows(hidden[tap])[places].argmax(-1).tolist() for tap in (1, 2, 3)]
        assert not chain or chain in said
        drafts += len(chain)
    assert 0 < live.ctx.stats.accepted < drafts


def test_when_sampling_alpha_is_the_chance_that_a_draft_is_accepted() -> None:
    watched = Watched()
    model = ToyLayers(8, seed=3)
    sampling = Sampling(temperature=0.8, max_new_tokens=1, presence_penalty=0.5)
    run({"target": model}, Request([1], Speculative(watched, nodes=9), sampling))
    step = watched.steps_seen[0]
    p = (step.reply.logits[0] / 0.8).softmax(-1)
    for place, tap in enumerate((1, 2, 3)):
        q = (model.head_rows(step.reply.hidden[tap])[0] / 0.8).softmax(-1)
        assert watched.records[0].agreed[place] == pytest.approx(float(torch.minimum(p, q).sum()))


def test_a_wrong_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(q: torch.Tensor) -> Law:
        return Law(torch.full_like(q, 1 / len(q)))

    monkeypatch.setattr("foretell.drafters.own.early_exit.Law", flat)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(laws.build("del-exit"), "plain", tokens=2)


def test_no_layer_runs_twice_for_a_token() -> None:
    model = Counting(8, seed=3)
    live = run({"target": model}, Request(PROMPT, Speculative(DelExit(), nodes=9), GREEDY))[0]
    stats = live.ctx.stats
    assert stats.drafted and model.pairs == 4 * (len(PROMPT) - 1 + stats.drafted + stats.steps + 1)


def test_a_transformers_tokens_are_those_of_plain_decoding() -> None:
    model = Decoder(tiny("llama"), "llama")
    text = [(11 * i + i * i) % 90 for i in range(9)]
    sampling = Sampling(max_new_tokens=12)
    plain = run({"target": model}, Request(text, Plain(), sampling))[0].ctx.output
    request = Request(text, Speculative(DelExit(), nodes=9), sampling)
    for options in ({"chunk": 4}, {"preempt": 3}):
        live = run({"target": model}, request, **options)[0]
        assert live.ctx.output == plain and live.ctx.stats.drafted


def test_exits_that_the_model_lacks_are_refused() -> None:
    request = Request(PROMPT, laws.build("del-exit:stride=4"), GREEDY)
    with pytest.raises(BadConfig, match=r"stride=4.*below 4 for this model"):
        run({"target": ToyLayers(8)}, request)

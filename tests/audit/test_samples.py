"""Sampled tokens of a real model against the probabilities it gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretell.api.lm import LM
from foretell.audit.copies import served_copy
from foretell.audit.report import FAILED, HELD, NO_CLAIM, UNTESTED, Check
from foretell.audit.runs import Runs
from foretell.audit.samples import ARRIVALS, DEPTH, LEVEL, check_samples, plan_positions
from foretell.core.distribution import Sampler, Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.spec import resolve_method
from foretell.testing.toy import Toy
from foretell.verification import acceptance as verify


def runs(samples: int) -> Runs:
    """A toy model and a draft model that agrees with it in part."""
    target = Toy(8, seed=3, copy=0.5, sharpness=6.0)
    draft = Toy(8, seed=3, copy=0.5, sharpness=6.0, noise=0.5, name="toy-draft")
    lm = LM(target, models={"draft": draft} if draft else {})
    prompts = [[1, 2, 3, 1, 2], [4, 4, 0, 1], [5, 3, 5, 3, 5], [0, 1, 2, 3, 4, 5]]
    return Runs(lm, prompts, [served_copy(lm)], 4, samples)


def check(spec: str, samples: int, claimed: bool = True) -> Check:
    return check_samples(runs(samples), *resolve_method(spec), claimed)


def no_residual(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Draws from the whole law after a refusal, not from what the draft covered too little."""
    outcome = verify.verify_in_order(tree, target, rng, position)
    node = outcome.path[-1] if outcome.path else 0
    depth = position + tree.depths[node]
    outcome.token = rng.sample(target.p(node), "draft", depth, 99)
    return outcome


def test_an_exact_method_s_samples_fit_and_the_power_is_stated() -> None:
    found = check("draft:length=2", 32)
    assert found.verdict == HELD and found.numbers["p"] >= LEVEL
    assert found.numbers["of"] == 4 * 32 and found.numbers["tokens"] >= found.numbers["of"]
    assert (
        f"would find a total variation of 0.1 over its cells in {found.numbers['power']:.0%}"
        in (found.detail)
    )


def test_a_rule_without_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.speculation.strategy.verify_by_default", no_residual)
    found = check("draft:length=2", 128)
    assert found.verdict == FAILED and found.numbers["p"] < LEVEL


def test_what_is_not_claimed_does_not_fail() -> None:
    assert check("draft:rule=typical", 64, claimed=False).verdict == NO_CLAIM


def test_every_sample_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.audit import samples

    used: list[int] = []
    run = samples.run_batch

    def noted(engine, name, strategy, samplings, prompts):  # type: ignore[no-untyped-def]
        used.extend(sampling.seed for sampling in samplings)
        return run(engine, name, strategy, samplings, prompts)

    monkeypatch.setattr(samples, "run_batch", noted)
    check("plain", 20)
    assert len(used) == len(set(used)) == 80


def test_a_certain_model_puts_nothing_to_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    law = Sampler.law
    monkeypatch.setattr(
        Sampler, "law", lambda self, row, output: law(self, (row * 1e6).clamp(-1e30, 1e30), output)
    )
    found = check("plain", 4)
    assert found.verdict == UNTESTED and "certain of every next token" in found.detail


def test_positions_are_planned_where_samples_will_be() -> None:
    toy = Toy(6, seed=1, sharpness=6.0)
    prompt = [1, 2, 3]
    sampler = Sampler(Sampling(temperature=1.0), prompt, (0,), toy.vocab)
    planned = plan_positions(toy, prompt, sampler, 400)
    assert planned.prefixes[0] == () and len(planned.prefixes) > 2
    arrivals = [400.0]
    for prefix, position in zip(planned.prefixes[1:], planned.positions[1:], strict=True):
        assert 0 < len(prefix) < DEPTH and 0 not in prefix, "nothing follows an end"
        parent = planned.prefixes.index(prefix[:-1])
        assert position.parent == parent
        assert planned.token_cells[parent][prefix[-1]] == position.cell
        law = torch.softmax(toy.score([*prompt, *prefix[:-1]])[0], -1)
        arrivals.append(arrivals[parent] * float(law[prefix[-1]]))
        assert arrivals[-1] >= ARRIVALS
    counts = planned.count_cells([[planned.prefixes[1][0], 2, 2, 2], [0]])
    assert [int(count.sum()) for count in counts[:2]] == [2, 1]
    assert all(np.isclose(position.law.sum(), 1) for position in planned.positions)

"""Learned gates: what they mix, what they learn, and that the model stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported
from foretell.kv.select.gates import GATES, select_streaming
from foretell.kv.select.ragged import Ragged
from foretell.train.caches.gates import Gating, Reading, TrainGates, train_gates
from foretell.train.caches.passkeys import Planted
from tests import tiny

CONFIG = TrainGates(
    steps=24, texts=4, keys=1, words=2, shortest=260, longest=300, sinks=4, recent=20, rate=0.05
)
TEXT = Planted(tuple((7 * i + i * i) % 300 for i in range(90)), 70, ((75, 80),))


def lm(seed: int = 0) -> Any:
    model = tiny.llama(seed, max_position_embeddings=512)
    return foretell.wrap(model, tiny.tokenizer(), name="tiny")


def rows_under(policy: Ragged, target: Any) -> torch.Tensor:
    """The model's rows of all tokens of TEXT, by a cache under a policy."""
    cache_ = target.cache()
    cache_.use(policy)
    tokens, rows = list(TEXT.tokens), []
    done = 0
    while done < len(tokens):
        piece = min(len(tokens) - done, cache_.changes_at - cache_.length)
        tree = TokenTree(tokens[done]).chain(tokens[done + 1 : done + piece])
        job, _ = cache_.prepare(Ask(tree), tokens[: done + 1], 99)
        rows.append(target.forward([job])[0].logits)
        done += piece
        cache_.commit([*tokens[:done], 0])
    return torch.cat(rows)


@pytest.mark.parametrize("heads", [[[1, 1], [1, 1]], [[1, 0], [0, 0]], [[0, 1], [1, 1]]])
def test_gates_of_0_and_1_are_the_policy(heads: list[list[int]]) -> None:
    target: Any = lm().models["target"]
    learner = Gating(target, CONFIG)
    chosen = torch.tensor(heads, dtype=torch.bool)
    with torch.no_grad():
        _, rows = learner.full_states(TEXT)
        reading = Reading(CONFIG.sinks, CONFIG.recent, (~chosen).float(), rows)
        states = learner.states(TEXT.tokens[24:], 24, reading)
        policy = Ragged(CONFIG.sinks, CONFIG.recent, 8, whole=False, streaming=chosen)
        want = rows_under(policy, target)[24:]
        assert torch.allclose(states @ target.head.weight.T, want, atol=1e-3)
        full = rows_under(Ragged(4, 20, 8, streaming=chosen & False), target)
        assert not torch.allclose(full[24:], want, atol=0.1)


def test_open_gates_change_nothing_and_halves_are_learned_by() -> None:
    learner = Gating(lm().models["target"], CONFIG)
    assert float(learner.states_difference(TEXT).detach()) < 1e-9
    with torch.no_grad():
        learner.gates.copy_(torch.tensor([[0.5, 0.9], [0.2, 0.7]]))
    learner.states_difference(TEXT).backward()
    assert learner.gates.grad is not None
    step = 1e-2
    for place in ((0, 0), (1, 1)):
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                learner.gates[place] += sign * step
                found.append(float(learner.states_difference(TEXT)))
                learner.gates[place] -= sign * step
        slope = (found[0] - found[1]) / (2 * step)
        assert slope == pytest.approx(float(learner.gates.grad[place]), rel=0.05, abs=1e-4)


def test_gates_are_learned_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    made = lm()
    target: Any = made.models["target"]
    before = {name: part.clone() for name, part in target.hf.state_dict().items()}
    texts = [" ".join(tiny.TEXTS) * 40]
    report = train_gates(made, texts, tmp_path / "g", CONFIG)
    gates, _ = GATES.read_table(tmp_path / "g")
    assert gates.shape == (2, 2) and len(gates.unique()) > 1
    assert report["steps"] == 24 and 0 < report["mean"] < 1
    after = target.hf.state_dict()
    assert all(torch.equal(part, after[name]) for name, part in before.items())
    learner = Gating(target, CONFIG)
    planted = next(CONFIG.planting.texts(lambda t: made.encode(t, special=False), texts, 9))

    def loss(chosen: torch.Tensor) -> float:
        with torch.no_grad():
            learner.gates.copy_((~chosen).float())
            return float(learner.states_difference(planted))

    assert loss(select_streaming(gates, 0.5)) < loss(select_streaming(1 - gates, 0.5))


def test_rates_rise_and_fall() -> None:
    config = TrainGates(steps=50)
    paces = [config.pace(step) for step in range(50)]
    assert paces[0] == 0.1 and max(paces) == paces[20] == 1 and paces[-1] == 0.1
    assert paces[:10] == sorted(paces[:10]) and paces[40:] == sorted(paces[40:], reverse=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"rate": 11.0}, "rate=11"),
        ({"shortest": 384}, "shortest=384: .*above 384"),
        ({"keys": 0}, "keys=0"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        TrainGates(**fields)


def test_models_whose_gates_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    short = tiny.lm(draft=False)
    with pytest.raises(BadConfig, match="longest=300"):
        train_gates(short, [], tmp_path / "g", CONFIG)
    made = lm()
    target: Any = made.models["target"]
    target.narrow = True
    with pytest.raises(Unsupported, match=r"train gates.*--dtype float32"):
        train_gates(made, [], tmp_path / "g", CONFIG)

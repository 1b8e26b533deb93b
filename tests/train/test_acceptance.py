"""The trainer of the acceptance head: labels, mixture, loss, and a head that has learnt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.api.lm import LM
from foretell.drafters.model.acceptance_head import load_acceptance_head
from foretell.errors import BadConfig, Unsupported
from foretell.testing.toy import Toy
from foretell.train import acceptance
from foretell.train.acceptance import (
    TrainHead,
    acceptance_loss,
    answer_laws,
    auc,
    collect_examples,
    draw_examples,
    fit_head,
    train_acceptance_head,
)

QUICK = TrainHead(length=64, examples=1000, epochs=8, rate=0.05)


class Picky(Toy):
    """A target that hardly ever takes a token below 4."""

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        row = super().row(tokens, positions)
        row[:4] -= 4
        return row


class Telling(Toy):
    """A draft model whose states show its tokens."""

    def run(self, ids: torch.Tensor, *rest: Any) -> Any:
        logits, hidden = super().run(ids, *rest)
        angles = ids[0].double() * (2 * torch.pi / self.vocab)
        shown = torch.stack([angles.cos(), angles.sin()], 1)
        return logits, dict.fromkeys(hidden, shown)


def pair() -> dict[str, Toy]:
    return {
        "target": Picky(8, seed=1, sharpness=1.0),
        "draft": Telling(8, seed=1, sharpness=1.0, name="draft"),
    }


def lm() -> LM:
    models = pair()
    return LM(models["target"], models={"draft": models["draft"]})


def texts(count: int, length: int = 64) -> list[tuple[list[int], int]]:
    draw = np.random.default_rng(0)
    return [(draw.integers(0, 8, length).tolist(), 1 + i % 5) for i in range(count)]


def silent(what: str, done: int, total: int | None) -> None:
    pass


def test_an_example_is_a_draw_with_the_chance_that_the_target_accepts_it() -> None:
    models = pair()
    tokens, beginning = texts(3)[2]
    config = TrainHead(mixed=0.3)
    found = draw_examples(
        models["target"],
        models["draft"],
        (tokens, beginning),
        config,
        torch.Generator().manual_seed(5),
    )
    p, q = (answer_laws(models[name], (tokens, beginning), 8, 1.0) for name in ("target", "draft"))
    positions = np.arange(len(tokens), dtype=np.float64)
    for place in (0, 7):
        seen = beginning + place
        want = models["target"].row(np.array(tokens[:seen], float), positions[:seen])
        assert p[place].tolist() == pytest.approx(torch.tensor(want).softmax(-1).tolist(), abs=1e-9)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.multinomial(q, 1, generator=generator)[:, 0]
    kept = torch.rand(len(drawn), generator=generator) < 0.3
    assert 0 < int(kept.sum()) < len(kept) and len(found) == int((~kept).sum())
    chances = (p[range(len(drawn)), drawn] / q[range(len(drawn)), drawn]).clamp(max=1)[~kept]
    assert found.chances.tolist() == pytest.approx(chances.tolist(), abs=1e-6)
    angles = drawn[~kept].double() * (2 * torch.pi / 8)  # the states are those of the draws
    assert found.states[:, 0].tolist() == pytest.approx(angles.cos().tolist(), abs=1e-6)
    assert found.confidence.tolist() == pytest.approx(q.amax(-1)[~kept].tolist(), abs=1e-6)


def test_at_temperature_zero_a_draw_is_accepted_or_not() -> None:
    models = pair()
    config = TrainHead(temperature=0.0)
    found = draw_examples(
        models["target"], models["draft"], texts(1)[0], config, torch.Generator().manual_seed(0)
    )
    assert set(found.chances.tolist()) == {0.0, 1.0}


def test_a_rejection_weighs_more() -> None:
    logits = torch.tensor([[0.3, -0.2], [0.0, 1.0]])
    chances = torch.tensor([0.25, 1.0])
    logs = logits.log_softmax(-1).tolist()
    want = -(6 * 0.75 * logs[0][0] + 0.25 * logs[0][1] + logs[1][1]) / 2
    assert float(acceptance_loss(logits, chances, 6.0)) == pytest.approx(want, rel=1e-6)


def test_the_rank_measure_is_that_of_all_pairs() -> None:
    torch.manual_seed(0)
    scores = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.3, 0.9])
    chances = torch.rand(6)
    above = total = 0.0
    for i, j in itertools.product(range(6), repeat=2):
        weight = float(chances[i] * (1 - chances[j]))
        total += weight
        above += weight * (float(scores[i] > scores[j]) + float(scores[i] == scores[j]) / 2)
    assert auc(scores, chances) == pytest.approx(above / total, rel=1e-6)
    assert auc(torch.tensor([0.2, 0.8]), torch.tensor([0.0, 1.0])) == 1
    assert auc(torch.zeros(4), chances[:4]) == pytest.approx(0.5)
    assert np.isnan(auc(scores, torch.ones(6)))


def test_a_trained_head_tells_accepted_from_rejected(tmp_path: Path) -> None:
    told = []
    path = tmp_path / "head.safetensors"
    report = train_acceptance_head(lm(), texts(30), path, QUICK, lambda *what: told.append(what))
    assert report["auc"] > 0.9 > 0.6 > report["confidence_auc"]
    assert {what for what, _, _ in told} == {"reading", "training"}
    head = load_acceptance_head(path)
    angles = torch.arange(8) * (2 * torch.pi / 8)
    chances = head.accept_chance(torch.stack([angles.cos(), angles.sin()], 1))
    assert float(chances[:4].max()) < float(chances[4:].min()), chances
    weights = [block.linear.weight for block in head.blocks]  # type: ignore[union-attr]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_the_same_seed_gives_the_same_head_and_the_models_stay() -> None:
    models = pair()
    config = TrainHead(length=64, examples=300, epochs=1)
    first, second = (
        fit_head(
            collect_examples(models["target"], models["draft"], texts(9), config, silent)[0],
            config,
            silent,
        )
        for _ in range(2)
    )
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_whole_texts_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def marked(target: Any, draft: Any, text: Any, config: Any, generator: Any) -> Any:
        seen.append(len(seen))
        count = torch.full((5,), float(len(seen) - 1))
        return acceptance.Examples(count[:, None], count, count)

    monkeypatch.setattr(acceptance, "draw_examples", marked)
    models = pair()
    learnt, held = collect_examples(models["target"], models["draft"], texts(16), QUICK, silent)
    assert set(held.chances.tolist()) == {1.0, 9.0} and len(learnt) == 14 * 5


def test_what_cannot_be_learnt_from_is_told() -> None:
    with pytest.raises(BadConfig, match=r"the texts give 1 pieces .* give more, of 8 tokens"):
        train_acceptance_head(lm(), texts(1), Path("unwritten"), QUICK, silent)
    with pytest.raises(BadConfig, match="the texts give 0 pieces"):
        train_acceptance_head(
            lm(), [([1, 2, 3], 1), ([9] * 40, 1)], Path("unwritten"), QUICK, silent
        )
    with pytest.raises(Unsupported, match="a 'draft' model; name one with --draft"):
        train_acceptance_head(LM(Toy(8)), texts(9), Path("unwritten"), QUICK, silent)
    blind = lm()
    blind.models["draft"].caps = frozenset({"tree"})
    with pytest.raises(Unsupported, match="draft: it needs hidden states"):
        train_acceptance_head(blind, texts(9), Path("unwritten"), QUICK, silent)


@pytest.mark.parametrize(("field", "value"), [("blocks", 0), ("mixed", 1.0), ("rate", 0.0)])
def test_settings_have_ranges(field: str, value: float) -> None:
    with pytest.raises(BadConfig, match=f"{field}={value}: must be between"):
        TrainHead(**{field: value})  # type: ignore[arg-type]

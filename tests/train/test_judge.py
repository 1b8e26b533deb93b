"""Labels of a judge, walked by hand, and what is learnt from them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretell.api.lm import LM
from foretell.bench.answer_tasks import Task
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.model.draft import Draft
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, Unsupported
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.train import judge as trainer
from foretell.train.acceptance import auc, read_tokens
from foretell.train.judge import (
    STRENGTHS,
    TrainJudge,
    Walk,
    choose_judge,
    collect_walks,
    fit_logistic,
    labels_of,
    read_walk,
    train_judge,
    walk_task,
)
from foretell.verification.judge import Judge
from foretell.verification.judge_model import load_judge

EOS = 0
CONFIG = TrainJudge(answer_tokens=12)


class Parity(Task):
    """The answer is whether the text says more low tokens than high ones."""

    def answer(self, text: str) -> str | None:
        tokens = [int(word) for word in text.split()]
        return str(sum(token < 4 for token in tokens) > len(tokens) / 2)


def lm(target: Toy | None = None, seed: int = 1) -> LM:
    target = target or Toy(8, seed=seed, sharpness=3.0)
    made = LM(target, models={"draft": Toy(8, seed=seed + 1, sharpness=3.0, name="draft")})
    made.engine.eos = (EOS,)
    made.decode = lambda tokens: " ".join(map(str, tokens))  # type: ignore[method-assign]
    return made


def greedy(model: Toy, text: list[int], room: int) -> list[int] | None:
    """The text to its end, None where it has none in so many tokens."""
    text = list(text)
    for _ in range(room):
        text.append(int(read_tokens(model, text, len(text) - 1).logits[0].argmax()))
        if text[-1] == EOS:
            return text
    return None


def by_hand(model: LM, task: Task, prompt: list[int]) -> tuple[list[int], list[Any]]:
    """AutoJudge's search, as it is told: find a mismatch, put it in, write on, compare, go on."""
    target: Any = model.models["target"]
    draft: Any = model.models["draft"]

    def answer(text: list[int] | None) -> str | None:
        return None if text is None else task.answer(model.decode(text[len(prompt) :]))

    text = greedy(target, prompt, CONFIG.answer_tokens)
    assert text is not None
    wanted, place, judged = answer(text), len(prompt), []
    while place < len(text):
        best = int(read_tokens(draft, text[:place], place - 1).logits[0].argmax())
        if best not in (text[place], EOS):
            room = CONFIG.answer_tokens - (place + 1 - len(prompt))
            other = greedy(target, [*text[:place], best], room)
            judged.append((place, best, answer(other) == wanted))
            if judged[-1][2] and other is not None:
                text = other
        place += 1
    return text, judged


def tasks() -> list[Task]:
    return [Parity([3, 1 + i % 7, 1 + i // 7]) for i in range(35)]  # type: ignore[arg-type]


def walked(model: LM, task: Task, path: Path) -> Walk:
    async def run() -> Walk:
        return [walk async for walk in walk_task(model, task, path, CONFIG)][-1]

    return asyncio.run(run())


def test_labels_are_those_of_the_search_by_hand(tmp_path: Path) -> None:
    model, kinds, ended = lm(), set(), 0
    for number, task in enumerate(tasks()[:14]):
        prompt: Any = task.prompt
        walk = walked(model, task, tmp_path / f"{number}")
        assert walk.prompt == 3 and walk.is_done
        if greedy(model.models["target"], prompt, CONFIG.answer_tokens) is None:  # type: ignore[arg-type]
            assert walk.answer is None and not walk.judged
            continue
        ended += 1
        assert (walk.text, walk.judged) == by_hand(model, task, prompt)
        assert read_walk(tmp_path / f"{number}") == walk
        kinds |= {same for _, _, same in walk.judged}
    assert ended > 3 and kinds == {True, False}


def test_a_label_has_the_states_of_its_own_text() -> None:
    """One forward over a tree gives what a forward over each text alone gives."""
    target = Toy(8, seed=1)
    walk = Walk([3, 1, 2, 5, 6, 4, 0], 2, "x", 7, [(3, 5, True), (4, 1, False), (6, 2, False)])
    labels = labels_of(target, walk)
    assert labels.good.tolist() == [1, 0, 0]
    for row, (place, token, _) in enumerate(walk.judged):
        text = [*walk.text[:place], token]
        alone = read_tokens(target, text, place - 1, (2,))
        assert labels.states[row].tolist() == pytest.approx(alone.hidden[2][-1].tolist(), abs=1e-6)
        assert labels.before[row].tolist() == pytest.approx(alone.hidden[2][-2].tolist(), abs=1e-6)
        logs = alone.logits[0].log_softmax(-1)
        assert float(labels.logprobs[row]) == pytest.approx(float(logs[token]), abs=1e-5)


def test_a_run_goes_on_where_it_was_and_stops_when_it_has_enough(tmp_path: Path) -> None:
    model, told = lm(), []
    few = TrainJudge(labels=50, answer_tokens=12)

    def tell(*what: Any) -> None:
        told.append(what)

    first = collect_walks(model, tasks(), tmp_path, few, tell)
    files = {path: path.read_text() for path in tmp_path.iterdir()}
    total = sum(len(walk.judged) for walk in first)
    assert 50 <= total < 50 + trainer.AT_ONCE + 1 and told[-1] == ("judging", 50, 50)
    again = collect_walks(model, tasks(), tmp_path, few, tell)
    assert [w.judged for w in again] == [w.judged for w in first]
    assert files == {path: path.read_text() for path in tmp_path.iterdir()}
    more = collect_walks(
        model, tasks(), tmp_path, TrainJudge(labels=10_000, answer_tokens=12), tell
    )
    assert sum(len(walk.judged) for walk in more) > total
    apart = collect_walks(
        lm(), tasks(), tmp_path / "apart", TrainJudge(labels=10_000, answer_tokens=12), tell
    )
    assert sorted(w.text for w in more) == sorted(w.text for w in apart)
    foreign = collect_walks(lm(seed=3), tasks()[:1], tmp_path, CONFIG, tell)
    assert len(foreign) <= 1, "walks of other tasks are none of its own"


def test_a_damaged_walk_is_told(tmp_path: Path) -> None:
    for text in ("{", "[]", json.dumps({"text": []})):
        (tmp_path / "w").write_text(text)
        with pytest.raises(BadFile, match=r"is no walk .* remove it, and it is made again"):
            read_walk(tmp_path / "w")


# --- learning


def spread(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(count, 6, generator=draw) * torch.tensor([1.0, 5, 0.1, 1, 1, 1]) + 3
    states[:, 5] = 7.0  # tells nothing
    odds = 2 * (states[:, 0] - 3) - 10 * (states[:, 2] - 3) + 0.7
    return states, (torch.rand(count, generator=draw) < odds.sigmoid()).float()


def test_a_fit_is_where_the_slope_is_zero_and_both_classes_weigh_alike() -> None:
    states, good = spread(200, 0)
    x = (states - states.mean(0)).double()
    for strength in (1e-3, 1.0, 100.0):
        w = fit_logistic(x, good, strength).requires_grad_(True)
        errors = torch.zeros((), dtype=torch.float64)
        for row, label in zip(x, good.tolist(), strict=True):
            z = row @ w[:-1] + w[-1]
            weight = 0.5 / float(good.mean()) if label else 0.5 / (1 - float(good.mean()))
            errors = errors - weight * (z if label else -z).sigmoid().log()
        loss = w[:-1].square().sum() / 2 + strength * errors
        loss.backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None and float(w.grad.abs().max()) < 1e-3 * (1 + 200 * strength)


def test_the_scale_of_the_states_is_folded_in_and_the_best_strength_is_kept() -> None:
    learnt, others = spread(400, 1), spread(300, 2)
    best = choose_judge(learnt, others)
    assert best.strength in STRENGTHS and best.auc == best.rank(*others) > 0.8
    scaled = choose_judge((learnt[0] * 50 - 8, learnt[1]), (others[0] * 50 - 8, others[1]))
    assert scaled.auc == pytest.approx(best.auc, abs=1e-3)
    ours = learnt[0].double() @ best.weight + best.bias
    theirs = (learnt[0] * 50 - 8).double() @ scaled.weight + scaled.bias
    assert theirs.tolist() == pytest.approx(ours.tolist(), abs=0.05)
    assert float(best.weight[5]) == 0
    for strength in STRENGTHS[::6]:
        mean, deep = learnt[0].double().mean(0), learnt[0].double().std(0, correction=0)
        deep[5] = 1
        w = fit_logistic((learnt[0].double() - mean) / deep, learnt[1], strength)
        rank = auc(((others[0] - mean) / deep) @ w[:-1] + w[-1], others[1])
        assert rank <= best.auc + 1e-4


def test_strengths_are_those_of_autojudge() -> None:
    assert len(STRENGTHS) == 19
    assert STRENGTHS[0] == pytest.approx(1e-7) and STRENGTHS[-1] == pytest.approx(100)


def test_of_strengths_that_rank_alike_the_one_with_the_best_chances_is_kept() -> None:
    states = torch.tensor([[-2.0], [-1], [-0.5], [0.5], [1], [2]])
    good = (states[:, 0] > 0).float()
    best = choose_judge((states, good), (states, good))
    assert best.auc == 1 and best.strength == STRENGTHS[-1]
    assert ((best.scores(states) > 0) == (good > 0)).all()


class Fixed(Toy):
    """Says the same low tokens at each place whatever stands before, and ends at place 11; its
    state shows its token.
    """

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        logits, hidden = super().run(ids, positions, rows, *rest)
        places = positions[0][rows]
        best = torch.where(places < 10, 1 + places % 3, EOS)
        fixed = 20 * F.one_hot(best, self.vocab).to(logits)
        angles = ids[0].double() * (2 * torch.pi / self.vocab)
        return fixed, dict.fromkeys(hidden, torch.stack([angles.cos(), angles.sin()], 1))


class Saying(Task):
    """The answer is whether the text says a high token."""

    def answer(self, text: str) -> str | None:
        return str(any(int(word) >= 4 for word in text.split()))


def test_a_trained_judge_is_used_by_the_rule(tmp_path: Path) -> None:
    model = lm(Fixed(8, seed=4), seed=8)
    many: Any = [Saying([1 + i % 7, 1 + i // 7 % 7, 1 + i // 49]) for i in range(98)]
    told: list[Any] = []
    config = TrainJudge(labels=200, answer_tokens=16)
    report = train_judge(model, many, tmp_path, config, lambda *what: told.append(what))
    assert {what for what, _, _ in told} == {"judging", "reading", "fitting"}
    assert report["labels"] >= 200 and 0.1 < report["unimportant"] < 0.9
    assert report["auc"] > 0.99 > 0.8 > report["early_auc"]
    made = load_judge(tmp_path / "judge.safetensors")
    assert made.excluded == frozenset({EOS}) and made.width == 2
    engine = Engine(model.models)
    rule = Judge(str(tmp_path / "judge.safetensors"))
    live = engine.add(Request([1, 2], Speculative(Draft(), rule, 4), Sampling(max_new_tokens=60)))
    list(engine.run())
    assert live.ctx.stats.mat > 1.5 and max(live.ctx.output) < 4


def test_what_cannot_be_learnt_from_is_told(tmp_path: Path) -> None:
    def tell(*what: Any) -> None:
        pass

    with pytest.raises(BadConfig, match=r"gave labels, too few .* more tasks, or more --labels"):
        train_judge(lm(), tasks()[:2], tmp_path, CONFIG, tell)
    with pytest.raises(Unsupported, match="a 'draft' model; name one with --draft"):
        train_judge(LM(Toy(8)), tasks(), tmp_path, CONFIG, tell)
    blind = lm()
    blind.models["target"].caps = frozenset({"tree"})
    with pytest.raises(Unsupported, match="hidden states; use another model"):
        train_judge(blind, tasks(), tmp_path, CONFIG, tell)


@pytest.mark.parametrize(("field", "value"), [("labels", 9), ("answer_tokens", 0)])
def test_settings_have_ranges(field: str, value: int) -> None:
    with pytest.raises(BadConfig, match=f"{field}={value}: must be between"):
        TrainJudge(**{field: value})

"""The search against a loop of its own, without an engine, and its answer against its settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.spending import Spending
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.rewards.base import Reward
from foretell.strategies.plain import Plain
from foretell.strategies.search import pg_td, ucb
from foretell.strategies.search.pg_td import PgTd
from foretell.testing.toy import Toy
from tests import laws
from tests.strategies.choosing import PROMPT, VOCAB, Count, law_after, write

SPECS = ["pg-td:reward=(keywords:words=b),rollouts=4"]
STOP, MOST = 3, 6


def sampling(**more: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": MOST, "stop_token_ids": (STOP,), **more})


@dataclass(frozen=True)
class Noise(Reward):
    """A number for each text that knows nothing of the model's probabilities, at times NaN."""

    calls: list[str] | None = None
    salt: int = 0

    def __hash__(self) -> int:
        return self.salt

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        if self.calls is not None:
            self.calls.extend(texts)
        return [self.score(text) for text in texts]

    def score(self, text: str) -> float:
        number = sum((place + 3 + self.salt) * ord(letter) for place, letter in enumerate(text))
        return math.nan if number % 7 == 0 else number % 11 / 11


def search(config: PgTd, seed: int) -> list[tuple[int, ...]]:
    """All finished texts in the order in which they are found, by dictionaries of texts."""
    toy = Toy(VOCAB, seed, copy=1.0)
    visits: dict[tuple[int, ...], int] = {(): 1}
    edges: dict[tuple[int, ...], list[list[float]]] = {}  # of a child: returns
    finished: list[tuple[int, ...]] = []

    def ended(text: tuple[int, ...]) -> bool:
        return bool(text) and (text[-1] == STOP or len(text) == MOST)

    def kids(text: tuple[int, ...]) -> list[tuple[int, float]]:
        law = law_after(toy, text)
        best = sorted(range(VOCAB), key=lambda token: -law[token])[: config.k]
        total = sum(math.exp(law[token]) for token in best)
        return [(token, math.exp(law[token]) / total) for token in best]

    def whole(text: tuple[int, ...]) -> tuple[int, ...]:
        while not ended(text):
            text = (*text, kids(text)[0][0])
        return text

    for _ in range(config.rollouts):
        text: tuple[int, ...] = ()
        passed = []
        while True:
            if ended(text):
                break
            if text not in edges:
                edges[text] = [[] for _ in kids(text)]
            n = visits[text]
            scores = []
            for (_, chance), returns in zip(kids(text), edges[text], strict=True):
                factor = math.log((n + config.base + 1) / config.base) + config.c
                bonus = factor * chance * math.sqrt(math.log(n)) / (1 + len(returns))
                scores.append(max(returns, default=0.0) + bonus)
            place = scores.index(max(scores))
            passed.append((text, place))
            text = (*text, kids(text)[place][0])
            if text not in visits:
                visits[text] = 1
                break
        done = whole(text)
        if done not in finished:
            finished.append(done)
        score = config.reward.score(laws.spell(done))  # type: ignore[union-attr]
        value = -math.inf if math.isnan(score) else score
        visits[text] += 1
        for at, place in passed:
            edges[at][place].append(value)
            visits[at] += 1
    return finished


def agrees(config: PgTd, seed: int) -> int:
    """Holds the answers to those of the loop; how many there are."""
    finished = search(config, seed)
    reward: Any = config.reward
    values = [reward.score(laws.spell(text)) for text in finished]
    values = [-math.inf if math.isnan(value) else value for value in values]
    order = sorted(range(len(finished)), key=lambda place: -values[place])
    live = write(config, sampling(), seed)
    expected = [(list(finished[place]), values[place]) for place in order]
    assert [(tokens, value) for tokens, value, _ in live.answers] == expected
    assert live.ctx.branches[live.result].output == expected[0][0]
    assert live.reason == ("stop" if expected[0][0][-1] == STOP else "length")
    assert list(live.ctx.branches) == [live.result] and not live.caches
    return len(finished)


@pytest.mark.parametrize("seed", range(4))
def test_the_answers_are_those_of_a_plain_loop(seed: int) -> None:
    agrees(PgTd(Noise(salt=seed)), seed)
    agrees(PgTd(Noise(salt=seed), rollouts=25, k=2, c=3.0, base=2.0), seed)
    assert agrees(PgTd(Count("b"), rollouts=25, k=9, c=30.0), seed) > 6


def mean(path: ucb.Path, leaf: ucb.Node, reward: float) -> None:
    """Backs up the mean of the rewards."""
    ucb.propagate_reward(path, leaf, reward)
    for _, edge in path:
        edge.value += (reward - edge.value) / edge.visits


def uncounted(path: ucb.Path, leaf: ucb.Node, reward: float) -> None:
    """Forgets to count the texts on the way."""
    ucb.propagate_reward(path, leaf, reward)
    for node, _ in path:
        node.visits = min(node.visits, 2)


@pytest.mark.parametrize("slip", [mean, uncounted])
def test_a_slip_is_noticed(slip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg_td, "propagate_reward", slip)
    with pytest.raises(AssertionError):
        for seed in range(4):
            agrees(PgTd(Noise(salt=seed), rollouts=40, c=3.0), seed)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_changes_forwards_and_no_answer(seed: int) -> None:
    kept, fresh = [], []
    config = PgTd(Noise(kept, seed), rollouts=25, c=30.0)
    live = write(config, sampling(), seed)
    other = write(replace(config, reward=Noise(fresh, seed), cache=False), sampling(), seed)
    assert live.answers == other.answers and len(live.answers) > 3
    assert len(kept) == len(set(kept)) == len(live.answers)  # one run of the tests for each text
    assert len(fresh) > len(kept) and set(fresh) == set(kept)
    assert live.ctx.stats.calls["target"] < other.ctx.stats.calls["target"]


def test_one_rollout_is_greedy_decoding() -> None:
    for seed in range(6):
        options = sampling(repetition_penalty=1.5, no_repeat_ngram_size=2)
        live = write(PgTd(Noise(), rollouts=1), options, seed)
        plain = write(Plain(), options, seed)
        assert live.ctx.output == plain.ctx.output and live.reason == plain.reason
        assert live.ctx.stats.calls == plain.ctx.stats.calls


def test_equal_chances_are_taken_in_the_order_of_tokens() -> None:
    engine = Engine({"target": Toy(VOCAB, 0, sharpness=0.0)})
    config = PgTd(Count("e"), rollouts=3)
    live = engine.add(Request(PROMPT, config, Sampling(max_new_tokens=2), text=laws.spell))
    list(engine.run())
    plain = engine.add(Request(PROMPT, Plain(), Sampling(max_new_tokens=2)))
    list(engine.run())
    assert live.answers[0][0] == plain.ctx.output == [0, 0]
    assert [tokens for tokens, _, _ in live.answers] == [[0, 0], [1, 0], [2, 0]]


def test_visits_and_values_hold_what_they_say() -> None:
    """N = 1, with one for the text's own rollout, and n of its edges; Q never falls."""
    root = ucb.Node((), ucb.make_edges([(0, 0.7), (1, 0.3)]))
    rewards = [0.2, 0.9, -1.0, 0.4, 0.0, 0.5, 1.0]
    nodes = [root]
    for reward in rewards:
        before = {id(edge): edge.value for node in nodes for edge in node.edges if edge.visits}
        path, leaf = ucb.descend_tree(root, 1.0, 10.0)
        if leaf is None:
            parent, edge = path[-1]
            leaf = edge.node = ucb.Node((*parent.text, edge.token))
            if len(leaf.text) < 3:
                leaf.edges = ucb.make_edges([(0, 0.5), (1, 0.5)])
        ucb.propagate_reward(path, leaf, reward)
        for edge in (edge for node in nodes for edge in node.edges):
            assert edge.value >= before.get(id(edge), -math.inf)
        if leaf not in nodes:
            nodes.append(leaf)
    assert root.visits == 1 + len(rewards) and len(nodes) > 4
    for node in nodes[1:]:
        own = 1 if node.edges else node.visits - 1
        assert node.visits == 1 + own + sum(edge.visits for edge in node.edges)
    best = max(edge.value for edge in root.edges)
    assert best == max(rewards)


def test_enough_ends_it() -> None:
    calls: list[str] = []
    all_of_them = write(PgTd(Noise(salt=1), rollouts=40, c=30.0), sampling(), 1)
    best = all_of_them.answers[0][1]
    live = write(PgTd(Noise(calls, 1), rollouts=40, c=30.0, enough=best), sampling(), 1)
    assert live.answers[0] == all_of_them.answers[0] and len(live.answers) < len(
        all_of_them.answers
    )
    assert calls[-1] == laws.spell(live.answers[0][0])


def test_where_the_budget_is_spent_the_best_by_then_is_the_answer() -> None:
    config = PgTd(Noise(salt=2), rollouts=40, c=30.0)
    full = [tokens for tokens, _, _ in write(config, sampling(), 2).answers]
    for forwards in (1, 3, 9, 12):
        engine = Engine({"target": Toy(VOCAB, 2, copy=1.0)})
        request = Request(
            PROMPT, config, sampling(), text=laws.spell, budget=Spending(forwards=forwards)
        )
        live = engine.add(request)
        list(engine.run())
        assert live.error is None and live.reason == "budget"
        assert live.ctx.stats.calls["target"] <= forwards and not live.caches
        output = live.ctx.branches[live.result].output
        if forwards >= 9:
            assert output in full and live.answers[0][0] == output


def test_others_change_nothing_and_no_rows_are_left() -> None:
    config = PgTd(Noise(), rollouts=9)
    for seed in range(3):
        alone = write(config, sampling(), seed)
        among = write(config, sampling(), seed, beside=[config, Plain()])
        assert alone.answers == among.answers and not among.caches


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadConfig, match="pg-td: needs a reward"):
        PgTd()
    for field, value in (
        ("rollouts", 0),
        ("k", 0),
        ("c", -1.0),
        ("base", 0.0),
        ("enough", math.nan),
    ):
        with pytest.raises(BadConfig, match=f"pg-td:{field}="):
            PgTd(Noise(), **{field: value})
    with pytest.raises(Unsupported, match="pg-td cannot run on"):
        Engine({"target": Toy(4)}).add(Request([0, 1], PgTd(Noise()), Sampling()))
    with pytest.raises(BadConfig, match="pg-td cannot honour temperature"):
        engine = Engine({"target": Toy(4)})
        engine.add(Request([0, 1], PgTd(Noise()), Sampling(temperature=1.0), text=laws.spell))

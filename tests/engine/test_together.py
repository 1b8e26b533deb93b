"""Several generators of one request side by side, and slow functions outside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Call, Commit, Finish, Fork, Sampling, Steps, Together
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import RequestFailed, Unsupported
from foretell.speculation.strategy import Strategy, verify_and_commit
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy
from tests import laws
from tests.engine.users import Ahead, BestOf, Consulting, judged

Function = Callable[[list[int]], int]
Pairs = dict[tuple[tuple[int, ...], ...], float]
WAIT = 20.0  # seconds after which a test of threads has failed


def models(**toys: float) -> dict[str, Any]:
    """A target, and a relative for each name with its noise."""
    made = {"target": Toy(8, 3, copy=1.5)}
    return made | {n: Toy(8, 3, noise=x, copy=1.5, name=n) for n, x in toys.items()}


def run(strategy: Strategy, engine: Engine, count: int = 12, **options: Any) -> Live:
    live = engine.add(Request([1, 2, 1, 2], strategy, Sampling(max_new_tokens=count, **options)))
    laws.finish(engine, live)
    return live


# --- drafting while the target verifies


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_drafting_while_verifying_gives_plain_tokens(noise: float) -> None:
    live = run(Ahead(2), Engine(models(draft=noise), (7,)), 30)
    plain = run(Plain(), Engine(models(), (7,)), 30)
    assert live.ctx.output == plain.ctx.output
    if noise == 0:
        assert live.ctx.stats.accepted > 10 and live.ctx.stats.calls["target"] < 25


def test_it_is_the_same_alone_and_in_a_batch_and_leaks_nothing_when_closed() -> None:
    laws.check_batch([Ahead(3), laws.build("draft"), Plain()])
    laws.check_close(Ahead(2), 0.0)


# --- several texts at once


@pytest.mark.parametrize("spec", ["plain", "token-recycling", "draft:length=2"])
@pytest.mark.parametrize("n", [2, 3])
def test_the_best_of_several_texts_is_the_one_the_judge_prefers(spec: str, n: int) -> None:
    strategy = BestOf(laws.build(spec), n)
    made = laws.world(strategy, 6, copy=1.0)
    changed = 0
    for seed in range(6):
        engine = Engine(made)
        live = run_seeded(strategy, engine, seed)
        texts = [alone(strategy.writer, made, seed, branch) for branch in range(n)]
        assert len({tuple(text) for text in texts}) > 1, "branches must not share draws"
        scores = [judged(made, strategy, text) for text in texts]
        best = max(range(n), key=lambda i: (scores[i], -i))
        assert live.ctx.output == texts[best]
        assert live.answers == [(texts[best], pytest.approx(scores[best]), "length")]
        changed += best > 0
        assert live.ctx.stats.tokens == 9 and not live.caches
        assert live.ctx.stats.calls["target"] <= 9, "the texts share forwards"
        if spec == "plain":
            assert live.ctx.stats.mat == 1.0
    assert changed


def run_seeded(strategy: Strategy, engine: Engine, seed: int) -> Live:
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=seed)
    live = engine.add(Request([1, 2, 1], strategy, sampling))
    told = [token for event in engine.run() for token in event.tokens]
    assert live.error is None and told == live.ctx.output
    return live


def alone(writer: Strategy, made: dict[str, Any], seed: int, branch: int) -> list[int]:
    """What branch `branch` of a request with this seed writes."""
    sampling = Sampling(max_new_tokens=9, temperature=1.0)
    engine = Engine(made)
    live = engine.add(Request([1, 2, 1], writer, sampling, rng=Rng(seed, branch)))
    laws.finish(engine, live)
    return live.ctx.output


@dataclass(frozen=True)
class Pair(Strategy):
    """Two texts; both are told."""

    writer: Strategy

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.writer.models

    def run(self, ctx: Context) -> Steps:
        (other,) = yield Fork(0, 1)
        yield Together([self.writer.run(ctx), self.writer.run(ctx.on(other))])
        texts = [ctx.output, ctx.on(other).output]
        yield Finish(0, "length", [(list(text), 0.0, "length") for text in texts])


def joint_law(writer: Strategy, made: dict[str, Model], setting: laws.Setting) -> Pairs:
    """The enumerated law of both texts of a pair."""
    joint: Pairs = {}

    def once(door: Enumerator) -> tuple[tuple[int, ...], ...]:
        engine = Engine(made)
        live = engine.add(Request(laws.PROMPT, Pair(writer), setting.sampling, rng=door))
        laws.finish(engine, live)
        return tuple(tuple(tokens) for tokens, _, _ in live.answers)

    for weight, pair in Enumerator.walk_outcomes(once):
        joint[pair] = joint.get(pair, 0.0) + weight
    return joint


def check_independent(spec: str) -> None:
    """The joint law of two texts is the product of the law of one with itself."""
    writer = laws.build(spec, nodes=2)
    made = laws.world(writer, 3, copy=0.5)
    setting = laws.Setting(Sampling(temperature=1.0, max_new_tokens=2))
    joint = joint_law(writer, made, setting)
    target = made["target"]
    assert isinstance(target, Toy)
    one = laws.reference(target, laws.PROMPT, setting)
    for first, p in one.items():
        for second, q in one.items():
            assert abs(joint.pop((first, second), 0.0) - p * q) <= laws.EXACT
    assert not joint


@pytest.mark.parametrize("spec", ["plain", "ngram"])
def test_draws_of_parallel_branches_are_independent(spec: str) -> None:
    check_independent(spec)


def test_branches_that_share_draws_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip: the branch is no part of a draw's key. The enumerator sees the second use of it."""
    monkeypatch.setattr(Enumerator, "at", lambda self, branch: self)
    with pytest.raises(AssertionError, match="used twice"):
        check_independent("plain")
    monkeypatch.setattr(Rng, "at", lambda self, branch: self)
    strategy = BestOf(Plain(), 3)
    made = laws.world(strategy, 6, copy=1.0)
    outputs = {tuple(run_seeded(strategy, Engine(made), seed).ctx.output) for seed in range(4)}
    assert outputs == {tuple(alone(Plain(), made, seed, 0)) for seed in range(4)}


def test_best_of_is_the_same_in_a_batch_and_leaks_nothing_when_closed() -> None:
    laws.check_batch([BestOf(laws.build("draft"), 2), laws.build("ngram"), BestOf(Plain(), 3)])
    made = laws.world(BestOf(laws.build("draft"), 3), 6, copy=1.0)
    for count in range(1, 30):
        engine = Engine(made)
        sampling = Sampling(max_new_tokens=9, temperature=1.0)
        live = engine.add(Request([1, 2, 1], BestOf(laws.build("draft"), 3), sampling))
        for _ in range(count):
            engine.step()
        if not engine.live:
            break
        caches = dict(live.caches)
        texts = {branch: list(text.tokens) for branch, text in live.ctx.branches.items()}
        engine.end(live)
        assert caches and not live.caches and not engine.live
        for (name, branch), held in caches.items():
            assert held.sharers == [0]
            laws.check_cache(held, made[name], texts[branch])
    assert count > 6


# --- the first, and what goes wrong


@dataclass(frozen=True)
class Race(Strategy):
    """Several texts at once, of which the first to end wins."""

    lengths: tuple[int, ...]

    def run(self, ctx: Context) -> Steps:
        branches = [0, *(yield Fork(0, len(self.lengths) - 1))]
        parts = [self.write(ctx.on(b), n) for b, n in zip(branches, self.lengths, strict=True)]
        ends = yield Together(parts, first=True)
        winner = next(place for place, end in enumerate(ends) if end is not None)
        assert sum(end is not None for end in ends) == 1
        yield Finish(branches[winner], ends[winner])

    def write(self, ctx: Context, length: int) -> Steps:
        for _ in range(length):
            tree = TokenTree(ctx.tokens[-1])
            reply = yield Ask(tree, branch=ctx.branch)
            yield from verify_and_commit(ctx, tree, reply)
        return f"after {length}"


def test_the_first_to_end_is_the_answer_and_the_others_are_closed() -> None:
    engine = Engine(models())
    live = run(Race((9, 3, 5)), engine, 20, temperature=1.0)
    assert live.reason == "after 3" and len(live.ctx.output) == 3
    assert live.ctx.stats.calls == {"target": 3} and not live.asks


@dataclass(frozen=True)
class Careful(Strategy):
    """One of its parts breaks; it goes on by plain decoding where it is told so."""

    part: Callable[[Context], Steps]
    error: type[Exception]

    def run(self, ctx: Context) -> Steps:
        try:
            yield Together([self.endless(ctx), self.part(ctx)])
        except self.error:
            yield from Plain().run(ctx)

    def endless(self, ctx: Context) -> Steps:
        while True:
            yield Ask(TokenTree(ctx.tokens[-1]))


def breaking(ctx: Context) -> Steps:
    yield Ask(TokenTree(ctx.tokens[-1]))
    raise KeyError("broken")


def asking_too_much(ctx: Context) -> Steps:
    yield Ask(TokenTree(ctx.tokens[-1]), layers=(0,))


def nested(ctx: Context) -> Steps:
    yield Together([Careful(breaking, ZeroDivisionError).endless(ctx), breaking(ctx)])


@pytest.mark.parametrize(
    ("part", "error"), [(breaking, KeyError), (asking_too_much, Unsupported), (nested, KeyError)]
)
def test_what_a_part_raises_is_raised_where_the_parent_waits(
    part: Callable[[Context], Steps], error: type[Exception]
) -> None:
    engine = Engine(models())
    plain = run(Plain(), engine)
    live = run(Careful(part, error), engine)
    assert live.ctx.output == plain.ctx.output and not live.asks and not live.tasks
    beside = engine.add(Request([1, 2, 1, 2], Plain(), Sampling(max_new_tokens=12)))
    broken = engine.add(Request([1], Careful(part, ZeroDivisionError), Sampling()))
    list(engine.run())
    assert broken.reason == "error" and isinstance(broken.error, (RequestFailed, Unsupported))
    assert beside.ctx.output == plain.ctx.output and not broken.caches


# --- slow functions


def slowly(gate: threading.Event, started: threading.Event | None = None) -> Function:
    """A function that waits for the gate, and then answers with a token that tells its text."""

    def function(text: list[int]) -> int:
        if started is not None:
            started.set()
        assert gate.wait(WAIT)
        return sum(text) % 8

    return function


def consulted(text: list[int], count: int) -> list[int]:
    """What Consulting writes, by plain loops."""
    toy = models()["target"]
    text = list(text)
    start = len(text)
    while len(text) < start + count:
        token = sum(text) % 8
        if (len(text) - start) % 2:
            row = laws.row(toy, text)
            token = row.index(max(row))
        text.append(token)
    return text[start:]


def test_other_requests_go_on_while_a_call_runs() -> None:
    gate = threading.Event()
    engine = Engine(models())
    waiting = engine.add(Request([1, 2], Consulting(slowly(gate)), Sampling(max_new_tokens=5)))
    other = engine.add(Request([1, 2, 1, 2], Plain(), Sampling(max_new_tokens=12)))
    while other.reason is None:
        engine.step()
    assert not waiting.ctx.output and waiting in engine.live and len(other.ctx.output) == 12
    gate.set()
    laws.finish(engine, waiting)
    assert waiting.ctx.output == consulted([1, 2], 5)
    assert waiting.ctx.stats.calls == {"target": 2}


def test_the_engine_waits_without_spinning_when_only_calls_are_open() -> None:
    gate, started = threading.Event(), threading.Event()
    engine = Engine(models())
    live = engine.add(
        Request([1, 2], Consulting(slowly(gate, started)), Sampling(max_new_tokens=1))
    )
    steps = 0

    def drive() -> None:
        nonlocal steps
        while engine.live:
            engine.step()
            steps += 1

    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(WAIT)
    gate.set()
    thread.join(WAIT)
    assert not thread.is_alive() and live.ctx.output == consulted([1, 2], 1)
    assert steps <= 3, "it went round while there was nothing to do"


def test_what_a_call_raises_is_raised_at_its_yield() -> None:
    def function(text: list[int]) -> int:
        raise OSError("no server")

    @dataclass(frozen=True)
    class Hopeful(Strategy):
        catch: bool

        def run(self, ctx: Context) -> Steps:
            try:
                yield Call(lambda: function([]))
            except OSError:
                if not self.catch:
                    raise
                yield from Plain().run(ctx)

    engine = Engine(models())
    plain = run(Plain(), engine)
    assert run(Hopeful(True), engine).ctx.output == plain.ctx.output
    live = engine.add(Request([1], Hopeful(False), Sampling()))
    list(engine.run())
    assert isinstance(live.error, RequestFailed) and "no server" in str(live.error)


def test_a_request_closed_while_its_call_runs_is_gone_at_once() -> None:
    gate, started = threading.Event(), threading.Event()
    engine = Engine(models())
    live = engine.add(Request([1, 2], Consulting(slowly(gate, started)), Sampling()))
    other = engine.add(Request([1, 2, 1, 2], Plain(), Sampling(max_new_tokens=3)))
    engine.step()
    assert started.wait(WAIT)
    engine.end(live)
    assert live not in engine.live and not live.caches
    laws.finish(engine, other)
    gate.set()
    assert len(other.ctx.output) == 3


def test_calls_and_asks_side_by_side() -> None:
    """A call in one part, forwards in the other: each goes on when its own answer is there."""

    @dataclass(frozen=True)
    class Mixed(Strategy):
        def run(self, ctx: Context) -> Steps:
            token, reply = yield Together([self.call(ctx), self.ask(ctx)])
            assert reply.logits.shape == (1, 8)
            yield Commit([token], reply.logits)
            yield Finish()

        def call(self, ctx: Context) -> Steps:
            return (yield Call(lambda: 5))

        def ask(self, ctx: Context) -> Steps:
            return (yield Ask(TokenTree(ctx.tokens[-1])))

    live = run(Mixed(), Engine(models()))
    assert live.ctx.output == [5]

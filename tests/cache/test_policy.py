"""Speculation on a policy's cache is plain decoding on it, whatever the policy and the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.cache.policy import CachePolicy
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.errors import RequestFailed, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws
from tests.cache.users import (
    EVERY,
    EvictedToy,
    Evictor,
    Guess,
    Rounded,
    Sight,
    Sparse,
    evicted_sight,
    left_over,
    run,
    sparse_sight,
    stock_greedy,
    stock_rows,
)
from tests.models.decoder.families import WINDOW, tiny

VOCAB = 8
PROMPT = [1, 2, 3, 1, 2, 3, 1, 4, 1, 2]
TEXT = [(11 * i + i * i) % 90 for i in range(21)]
LENGTH = 30
SAMPLED = Sampling(max_new_tokens=LENGTH, temperature=0.8, seed=5)
GREEDY = Sampling(max_new_tokens=LENGTH)
SPECS = ("suffix", "ngram", "token-recycling", "jacobi", "lookahead", "draft", "draft:drafts=3")
POLICIES = (Evictor, Sparse, Rounded)
SIGHTS: dict[type[CachePolicy], Sight] = {Evictor: evicted_sight, Sparse: sparse_sight}


@cache
def llama(family: str = "llama") -> Decoder:
    return Decoder(tiny(family, dtype=torch.float64), family)


def toys(window: int | None = None) -> dict[str, Any]:
    return {
        "target": Toy(VOCAB, seed=3, copy=1.5, window=window),
        "draft": Toy(VOCAB, seed=3, noise=0.6, copy=1.5),
    }


def llamas(family: str = "llama") -> dict[str, Any]:
    near = Decoder(tiny("llama", noise=0.1, dtype=torch.float64), "near")
    return {"target": llama(family), "draft": near}


def tokens(models: Any, strategy: Strategy, request: Request, **options: Any) -> list[int]:
    live = run(models, replace(request, strategy=strategy), **options)[0]
    return live.ctx.output


def guesses(text: Sequence[int], vocab: int) -> list[Speculative]:
    """None, some or all of the drafts are right, in chains and trees."""
    made = []
    for wrong in (1, 3, 0):
        for wide in (False, True):
            drafter = Guess(tuple(text), 5, wrong, wide, vocab)
            made.append(Speculative(drafter, nodes=16))
    return made


def by_names(*specs: str, sampling: Sampling) -> list[Strategy]:
    """Those of them whose tokens are plain decoding's with the same seed."""
    made = []
    for spec in specs:
        strategy = laws.build(spec)
        assert isinstance(strategy, Speculative)
        if sampling.temperature == 0 or not strategy.drafter.draws:
            made.append(strategy)
    return made


# --- on toys


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_evictor_on_toys(window: int | None, sampling: Sampling) -> None:
    models = toys(window)
    request = Request(PROMPT, Plain(), sampling, policy=Evictor())
    plain = tokens(models, Plain(), request)
    if sampling.temperature == 0:
        expected = EvictedToy(VOCAB, seed=3, copy=1.5, window=window)
        assert plain == by_rows(expected, PROMPT, LENGTH)
    whole = tokens(models, Plain(), replace(request, policy=None))
    assert whole != plain, "nothing was evicted that mattered"
    for strategy in guesses([*PROMPT, *plain], VOCAB):
        assert tokens(models, strategy, request) == plain, strategy
    for strategy in by_names(*SPECS, sampling=sampling):
        assert tokens(models, strategy, request) == plain, strategy


def by_rows(toy: Toy, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        row = laws.row(toy, text)
        text.append(row.index(max(row)))
    return text[len(prompt) :]


@pytest.mark.parametrize("spec", ["draft", "draft:length=2,drafts=2", "token-recycling", "plain"])
@pytest.mark.parametrize("prompt", [PROMPT[:5], PROMPT[:6], PROMPT])
def test_the_law_of_an_evictors_cache(spec: str, prompt: list[int]) -> None:
    """Every outcome of every draw, against the rows that are left."""
    count = 2 if "drafts" in spec else 3
    setting = laws.Setting(Sampling(max_new_tokens=count, temperature=1.0))
    toy = {"vocab": 3, "seed": 3, "copy": 0.5}
    prompt = [token % 3 for token in prompt]
    strategy = laws.build(spec)
    models = laws.world(strategy, 3, 3, 0.5)
    outputs: dict[tuple[int, ...], float] = {}

    def once(door: Enumerator) -> tuple[int, ...]:
        request = Request(prompt, strategy, setting.sampling, rng=door, policy=Evictor())
        return tuple(run(models, request)[0].ctx.output)

    for weight, output in Enumerator.walk_outcomes(once):
        outputs[output] = outputs.get(output, 0.0) + weight
    law = laws.Law(outputs)
    expected = EvictedToy(**toy)  # type: ignore[arg-type]
    assert law.distance(laws.reference(expected, prompt, setting)) <= laws.EXACT
    if len(prompt) > EVERY:
        assert law.distance(laws.reference(Toy(**toy), prompt, setting)) > 1e-3  # type: ignore[arg-type]


# --- on a transformer


@pytest.mark.parametrize("policy", [Evictor, Sparse])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_plain_decoding_sees_what_the_policy_says(policy: type[CachePolicy], family: str) -> None:
    """Windows, where a family has them, count positions and not the rows that are left."""
    window = None if family == "llama" else WINDOW
    hf = tiny(family, dtype=torch.float64)
    hf.config._attn_implementation = "eager"
    sight = SIGHTS[policy]
    model = llama(family)
    request = Request(TEXT, Plain(), GREEDY, policy=policy())
    output = tokens({"target": model}, Plain(), request)
    if family != "gemma2":  # some of its layers have no window
        assert output == stock_greedy(hf, TEXT, LENGTH, sight, window)
        assert output != stock_greedy(hf, TEXT, LENGTH, lambda n: [range(i + 1) for i in range(n)])  # type: ignore[misc]
        rows = stock_rows(hf, TEXT, sight, window)[-1]
        ours = asked(model, policy(), TEXT, TokenTree(TEXT[-1]), 7)[0]
        assert float((ours - rows).abs().max()) <= 1e-5
    for strategy in guesses([*TEXT, *output], 97):
        assert tokens({"target": model}, strategy, request) == output, strategy


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_policies_on_a_transformer(policy: type[CachePolicy], sampling: Sampling) -> None:
    models = llamas()
    request = Request(TEXT, Plain(), sampling, policy=policy())
    plain = tokens(models, Plain(), request)
    assert plain != tokens(models, Plain(), replace(request, policy=None))
    for strategy in guesses([*TEXT, *plain], 97):
        assert tokens(models, strategy, request) == plain, strategy
    for strategy in by_names("suffix", "token-recycling", "draft:drafts=3", sampling=sampling):
        assert tokens(models, strategy, request) == plain, strategy


def asked(
    model: Any, policy: CachePolicy | None, text: Sequence[int], tree: TokenTree, chunk: int
) -> torch.Tensor:
    """Rows (N, V) of a tree below `text` from an empty cache under the policy."""
    return answered(model, under(model, policy), text, tree, chunk)


def under(model: Any, policy: CachePolicy | None) -> Cache:
    made: Cache = model.cache()
    if policy is not None:
        made.use(policy)
    return made


@torch.inference_mode()
def answered(
    model: Any, held: Cache, text: Sequence[int], tree: TokenTree, chunk: int
) -> torch.Tensor:
    whole = False
    while not whole:
        job, whole = held.prepare(Ask(tree, rows=range(len(tree))), text, chunk)
        reply = model.forward([job])[0]
    return reply.logits


# --- chunks, batches, forks, rows that were given up


@torch.inference_mode()
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_of_any_size_keep_the_same_rows(policy: type[CachePolicy]) -> None:
    model = llama()
    rows, positions = [], []
    for chunk in (1, 7, 512):
        held = under(model, policy())
        tree = TokenTree(TEXT[-1]).chain([3]).chain([4])
        rows.append(answered(model, held, TEXT, tree, chunk))
        held.sync([*TEXT, 3])
        positions.append(list(held.row_positions()))
    assert positions[0] == positions[1] == positions[2]
    assert all(torch.allclose(other, rows[0], atol=1e-12) for other in rows[1:])
    if policy is Evictor:
        kept = left_over(evicted_sight(len(TEXT))[-1][:-1])
        assert len(positions[0]) < len(TEXT) and set(kept) <= set(positions[0])


@pytest.mark.parametrize("world", ["toy", "llama"])
@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 7}, {"preempt": 20}])
def test_batches_equal_alone(world: str, options: dict[str, int]) -> None:
    """Beside requests without a policy, in chunks, and with rows that are given up on the way."""
    models = toys() if world == "toy" else llamas()
    prompt = PROMPT if world == "toy" else TEXT
    policies: list[CachePolicy | None] = [Evictor(), None]
    if world == "llama":
        policies += [Sparse(), Rounded()]
    strategies = [Plain(), laws.build("suffix"), laws.build("draft")]
    requests = []
    for i, policy in enumerate(policies):
        for j, strategy in enumerate(strategies):
            sampling = SAMPLED if (i + j) % 2 else GREEDY
            text = prompt[: len(prompt) - (i + j) % 3]
            requests.append(Request(text, strategy, sampling, policy=policy, tenant=f"{i} {j}"))
    alone = [run(models, request)[0].ctx.output for request in requests]
    together = run(models, *requests, **options)
    assert [live.ctx.output for live in together] == alone


class Forking(Strategy):
    """Writes a few tokens on several branches in turn; the result is the last one."""

    def run(self, ctx: Context) -> Steps:
        twins = yield Fork(0, 2)
        for i in range(12):
            for handle in (0, *twins):
                branch = ctx.branches[handle]
                reply = yield Ask(TokenTree(branch.tokens[-1]), branch=handle)
                token = int(reply.logits[0].argmax())
                if i == 0:
                    token = (token + handle) % VOCAB
                yield Commit([token], reply.logits, handle)
        yield Drop(0)
        yield Drop(twins[0])
        yield Finish(twins[1])


def test_forks_evict_for_themselves() -> None:
    expected = EvictedToy(VOCAB, seed=3, copy=1.5)
    request = Request(PROMPT, Forking(), GREEDY, policy=Evictor())
    output = run(toys(), request)[0].ctx.output
    assert len(output) == 12
    assert output[1:] == by_rows(expected, [*PROMPT, output[0]], 11)


@torch.inference_mode()
@pytest.mark.parametrize("policy", POLICIES)
def test_forgotten_rows_come_back_as_they_were(policy: type[CachePolicy]) -> None:
    model = llama()
    tree = TokenTree(TEXT[-1]).chain([3]).chain([4])
    held = under(model, policy())
    before = answered(model, held, TEXT, tree, 5)
    held.sync([*TEXT, 3])
    positions = list(held.row_positions())
    held.forget()
    assert held.base == held.length == 0 and held.positions is None
    assert torch.allclose(answered(model, held, TEXT, tree, 4), before, atol=1e-12)
    held.sync([*TEXT, 3])
    assert list(held.row_positions()) == positions


def test_closing_early_leaves_the_rows_of_the_policy() -> None:
    model = Toy(VOCAB, seed=3, copy=1.5)
    for steps in range(1, 12):
        engine = Engine({"target": model})
        strategy = laws.build("suffix")
        live = engine.add(Request(PROMPT, strategy, SAMPLED, policy=Evictor()))
        for _ in range(steps):
            engine.step()
        held = live.caches["target", 0]
        text = list(live.ctx.tokens)
        engine.end(live)
        assert not live.caches and held.sharers == [0] and not engine.live
        with torch.inference_mode():
            held.commit(text)
        positions = list(held.row_positions())
        assert held.k[0][0, : held.base, 0].tolist() == [text[i] for i in positions]
        assert held.v[1][0, : held.base, 0].tolist() == positions


def test_a_model_without_rows_refuses_a_policy() -> None:
    request = Request(PROMPT, Plain(), GREEDY, policy=Evictor())
    with pytest.raises(Unsupported, match=r"a cache policy.*recurrent.*use another model"):
        run({"target": ToyRecurrent(VOCAB)}, request)


# --- slips


class Silent(Evictor):
    """Does not say when its rows change, and changes them wherever a step has ended."""

    def room_left(self, length: int) -> int:
        return 1 << 60


def test_a_policy_that_changes_rows_between_its_lengths_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `room` its rows change where a step happens to end, which drafts decide."""
    commit = Cache.commit

    def changing(self: Cache, text: Sequence[int]) -> None:
        before = self.length // EVERY
        commit(self, text)
        if self.policy is not None and self.length // EVERY > before:
            self.policy.change_rows(self)

    monkeypatch.setattr(Cache, "commit", changing)
    request = Request(PROMPT, Plain(), GREEDY, policy=Silent())
    plain = tokens(toys(), Plain(), request, chunk=1)
    strategies = guesses([*PROMPT, *plain], VOCAB)
    outputs = [tokens(toys(), strategy, request, chunk=1) for strategy in strategies]
    assert any(output != plain for output in outputs)


def test_a_change_at_a_wrong_length_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_change = Cache._plan_change

    def late(self: Cache) -> None:
        plan_change(self)
        self.changes_at += self.length > 0

    monkeypatch.setattr(Cache, "_plan_change", late)
    request = Request(PROMPT, Plain(), GREEDY, policy=Evictor())
    expected = EvictedToy(VOCAB, seed=3, copy=1.5)
    assert tokens(toys(), Plain(), request) != by_rows(expected, PROMPT, LENGTH)


def test_a_draft_that_crosses_a_change_is_an_error() -> None:
    class Deeper(Guess):
        def propose(self, ctx: Context, state: Any, budget: int) -> TokenTree:
            return TokenTree(ctx.tokens[-1]).chain([1] * 7)

    request = Request(PROMPT, Speculative(Deeper(), nodes=16), GREEDY, policy=Evictor())
    live = run_to_error(request)
    assert isinstance(live.error, RequestFailed) and "crosses a change" in str(live.error)


def run_to_error(request: Request) -> Any:
    engine = Engine(toys())
    live = engine.add(request)
    for _ in engine.run():
        pass
    return live

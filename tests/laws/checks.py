"""The laws: each takes a strategy, and raises AssertionError where it breaks a claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from foretell.cache.cache import Cache
from foretell.cache.prefix_tree import PrefixTree
from foretell.cache.states import TappedStates
from foretell.core.masked_text import MASKED, make_look
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.engine.prefix_cache import WORTH, Reuse
from foretell.engine.status import find_troubles
from foretell.kv.select.view_model import Viewed
from foretell.models.decoder.retrieved import RetrievedCache
from foretell.models.diffusion.canvas import CanvasCache
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy, ToyRetrieving
from tests.laws.enumeration import WIDE, Law, enumerate_law
from tests.laws.expected import ended, reference
from tests.laws.world import (
    DIRECT,
    EXACT,
    PROMPT,
    SETTINGS,
    Grammar,
    Refusing,
    Setting,
    finish,
    formed,
    generate,
    joint_world,
    world,
)


def check_law(
    strategy: Strategy,
    setting: Setting | str = "plain",
    tokens: int = 0,
    warm: bool = True,
    drafts: bool = True,
    prompt: Sequence[int] = PROMPT,
    source: Source = DIRECT,
    prepare: Callable[[Engine], object] | None = None,
    **toy: Any,
) -> Law:
    """The first tokens have plain decoding's law, to 1e-9, and it was drafting that produced them.

    `tokens` 0: two, and then three unless there are too many outcomes. A `source` has a method
    `rows(models, prompt)` that works its rows out by plain loops.
    """
    setting = SETTINGS[setting] if isinstance(setting, str) else setting
    if not tokens:
        more = (warm, drafts, prompt, source, prepare)
        law = check_law(strategy, setting, 2, *more, **toy)
        return law if law.outcomes > WIDE else check_law(strategy, setting, 3, *more, **toy)
    setting = replace(setting, sampling=replace(setting.sampling, max_new_tokens=tokens))
    models = world(strategy, source=source, **toy)
    law = enumerate_law(strategy, prompt, setting, models, warm, source, prepare)
    target = models["target"]
    assert isinstance(target, Toy)
    assert abs(sum(law.outputs.values()) - 1) < EXACT, "the outcomes' probabilities do not sum to 1"
    rows = None if source == DIRECT else source.rows(models, prompt)  # type: ignore[attr-defined]
    error = law.distance(reference(target, prompt, setting, rows))
    assert error <= EXACT, f"the law of the first {tokens} tokens is off by {error:.2e}"
    if drafts:
        if not law.drafted and tokens == 2:  # some draft from their second step on
            return check_law(strategy, setting, 3, warm, drafts, prompt, source, prepare, **toy)
        assert law.drafted, "nothing was drafted: the law was not put to the test"
        assert 0 < law.accepted < law.drafted, (
            f"{law.accepted} of {law.drafted} accepted: one side was not tested"
        )
    return law


GREEDY = [
    Setting(Sampling(max_new_tokens=14)),
    Setting(Sampling(max_new_tokens=14, repetition_penalty=1.3, frequency_penalty=0.3)),
    Setting(Sampling(max_new_tokens=14, no_repeat_ngram_size=3)),
    Setting(Sampling(max_new_tokens=14, logits_processors=(Grammar(),), logit_bias={3: 1.5})),
    Setting(Sampling(max_new_tokens=14, stop_token_ids=(5,), stop=("ab",), min_new_tokens=3)),
    formed("([a-h][i-p]{1,3}|[c-m]{2})*", 16, max_new_tokens=14, presence_penalty=0.3),
]


MORE = 100  # prompts, where the first few put nothing to the test


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Of 1 to 9 tokens, with repetitions, the same every time."""
    draw = np.random.default_rng(7)
    return [draw.integers(0, vocab, 1 + i % 9).tolist() for i in range(count)]


@cache
def _plain_greedy(count: int, seed: int, free: bool, kind: type[Model]) -> list[list[int]]:
    return _greedy([Plain()], {"target": kind(16, seed, copy=2.0)}, count, free)[0]


def _greedy(
    strategies: Sequence[Strategy], models: Mapping[str, Model], count: int, free: bool
) -> tuple[list[list[int]], int, int]:
    settings = [setting for setting in GREEDY if not (free and setting.form)]
    engine = Engine(models, (7,))
    lives = []
    for i, prompt in enumerate(prompts(count, 16)):
        setting = settings[i % len(settings)]
        strategy = strategies[i // len(settings) % len(strategies)]  # each meets every setting
        lives.append(engine.add(Request(prompt, strategy, setting.sampling, text=setting.text)))
    finish(engine, *lives)
    stats = [live.ctx.stats for live in lives]
    return (
        [live.ctx.output for live in lives],
        sum(s.drafted for s in stats),
        sum(s.accepted for s in stats),
    )


def check_greedy(
    strategies: Sequence[Strategy], count: int = 0, seed: int = 3, free: bool = False
) -> None:
    """At temperature 0 the tokens are plain decoding's, prompt by prompt. The prompts go round the
    strategies, `count` in all; 0: some with each. `free`: without texts of a given form, which some
    methods refuse.
    """
    count = count or len(GREEDY) * max(4, len(strategies))
    models = joint_world(strategies, 16, seed=seed, copy=2.0)
    outputs, drafted, accepted = _greedy(strategies, models, count, free)
    wanted = _plain_greedy(count, seed, free, type(models["target"]))
    for i, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        assert got == want, f"prompt {i}: {got} where plain decoding gives {want}"
    if not accepted and count < MORE:  # of drafters that are seldom right
        check_greedy(strategies, MORE, seed, free)
    elif not all(isinstance(s, Plain) for s in strategies):
        assert 0 < accepted < drafted, f"{accepted} of {drafted} accepted: one side was not tested"


def check_batch(strategies: Sequence[Strategy], vocab: int = 8, tenants: bool = True) -> None:
    """Each request gives the same tokens alone and among others, and again with the same seed.

    `tenants`: each has its own; else they share what is learnt from them, and start together: what
    a store holds when a request starts may be what it sees.
    """
    models = joint_world(strategies, vocab, copy=1.5)
    samplings = [
        Sampling(temperature=1.0, max_new_tokens=11, seed=3),
        Sampling(temperature=0.0, max_new_tokens=17),
        Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, max_new_tokens=6, seed=11),
        Sampling(temperature=1.0, max_new_tokens=9, stop_token_ids=(3,), seed=3),
        Sampling(temperature=1.2, max_new_tokens=1, seed=4),
        formed("([a-e][d-h]?)*", vocab, temperature=1.0, max_new_tokens=9).sampling,
        formed("(b|cd)+(e|f)", vocab, max_new_tokens=9).sampling,
    ]
    texts = prompts(len(strategies) * len(samplings), vocab)
    requests = [
        Request(
            texts[i],
            strategies[i % len(strategies)],
            samplings[i % len(samplings)],
            tenant=str(i) if tenants else "",
        )
        for i in range(len(texts))
    ]
    alone = []
    for request in requests:
        engine = Engine(models)
        live = engine.add(request)
        finish(engine, live)
        alone.append(live.ctx.output)
    engine = Engine(models)
    lives = []
    for k, request in enumerate(requests):  # some join while others are on their way
        lives.append(engine.add(request))
        if tenants and k % 3 == 0:
            engine.step()
    finish(engine, *lives)
    for i, (live, want) in enumerate(zip(lives, alone, strict=True)):
        assert live.ctx.output == want, f"request {i}: {live.ctx.output} in the batch, {want} alone"


@torch.inference_mode()
def check_prefixes(strategy: Strategy, sampled: bool = True, vocab: int = 8) -> None:
    """A text finds the rows of its beginning, and what its method reads beside them, whoever
    computed them, and its tokens stay its own: after plain decoding, after itself, beside others,
    and after it gave up its rows.
    """
    models = world(strategy, vocab, copy=1.5)
    beginning = [(5 * i + i * i) % vocab for i in range(2 * WORTH)]
    engine = Engine(models)
    engine.reuse = Reuse(engine, PrefixTree(1 << 30))
    finish(engine, engine.add(Request([*beginning, 0], Plain(), Sampling(max_new_tokens=3))))
    for number, temperature in enumerate([0.0, 0.8] if sampled else [0.0]):
        sampling = Sampling(max_new_tokens=9, temperature=temperature, seed=number)
        texts = ([*beginning, number, 1], [*beginning, 5], [*beginning, 5, number, 7])
        requests = [Request(text, strategy, sampling) for text in texts]
        alone = []
        for request in requests:
            alone.append(Engine(models).add(request))
            finish(alone[-1].ctx.engine, alone[-1])
        finish(engine, first := engine.add(requests[0]))
        known = engine.reuse.tree.reused
        rest = [engine.add(request) for request in requests[1:]]
        for _ in range(3):
            engine.step()
        engine.preempt_request(rest[0])
        finish(engine, *rest)
        for live, other in zip((first, *rest), alone, strict=True):
            assert live.ctx.output == other.ctx.output, "another text than without shared rows"
        reused = engine.reuse.tree.reused - known
        assert reused >= len(rest) * len(beginning), f"only {reused} tokens were reused"
    assert not find_troubles(engine)


def check_seeds(strategy: Strategy, seeds: Sequence[int] = range(8), vocab: int = 8) -> None:
    """The tokens are those plain decoding draws with the same seed."""
    accepted = 0
    for seed in seeds:
        setting = Setting(Sampling(temperature=0.8, seed=seed, max_new_tokens=20), eos=(5,))
        models = world(strategy, vocab, copy=2.5)
        live, plain = (generate(s, [1, 2, 3, 1, 2], setting, models) for s in (strategy, Plain()))
        assert live.ctx.output == plain.ctx.output, (
            f"seed {seed}: {live.ctx.output}, not {plain.ctx.output}"
        )
        accepted += live.ctx.stats.accepted
    assert accepted or isinstance(strategy, Plain), "nothing was ever accepted: not put to the test"


@torch.inference_mode()
def check_cache(
    cache: Cache, model: Model, tokens: Sequence[int], target: Model | None = None
) -> None:
    """What the cache keeps of `tokens` is what a fresh prefill of them writes, and it answers as
    that does. `target`: whose states the model feeds on, if it does.
    """
    if model.feeds:
        assert target is not None
        cache.beside = fresh_states(model, target, tokens)
    cache.commit(tokens)
    assert cache.length <= len(tokens) - 1, "rows of tokens that were never committed"
    if isinstance(cache, RetrievedCache) and cache.chosen_rows is None:
        return  # it was closed before it had any rows
    if isinstance(cache, CanvasCache):
        check_canvas(cache, model, tokens)
        return
    fresh = model.cache(None, cache.beside)
    if isinstance(model, Viewed):
        fresh = model.cache(None, fresh_rows(model.base, tokens[: cache.length + 1]))
        fresh.commit(tokens)
    elif model.copies_rows:
        fresh = fresh_beside(cache, model, tokens)
    root = Ask(TokenTree(tokens[-1]), features=root_state(cache, model))
    whole, _ = fresh.prepare(root, tokens, len(tokens))
    want = model.forward([whole])[0].logits
    for ours, theirs in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        assert torch.equal(ours[:, : cache.base], theirs[:, : cache.base]), (
            "stale rows in the cache"
        )
    cache.synced = 0
    job, _ = cache.prepare(root, tokens, len(tokens))
    got = model.forward([job])[0].logits
    assert torch.equal(got, want), "the cache answers otherwise than a fresh prefill"


@torch.inference_mode()
def check_canvas(cache: Cache, model: Model, tokens: Sequence[int], known: int = 0) -> None:
    """It says what a fresh one says of masks after `tokens`, of which it may keep the rows of the
    first ones, `known`.
    """
    canvas = [*tokens, MASKED, MASKED]
    ask = make_look(tokens[-1], canvas, range(len(tokens), len(canvas)), range(known, len(canvas)))
    rows = []
    for one in (cache, model.cache()):
        job, _ = one.prepare(ask, tokens, len(canvas))
        rows.append(model.forward([job])[0].logits)
    assert torch.equal(*rows), "stale rows in the canvas"


def root_state(cache: Cache, model: Model) -> torch.Tensor | None:
    """Any state of the root (1, E), which models must be given that read a node's own."""
    if not model.feeds or model.lag:
        return None
    assert cache.beside is not None and cache.beside.states is not None
    none = cache.beside.states.none
    return torch.ones(1, sum(none[tap].shape[1] for tap in model.feeds), dtype=torch.float64)


def fresh_states(model: Model, target: Model, tokens: Sequence[int]) -> Cache:
    """A cache of the target that holds the states that a model feeds on."""
    cache = target.cache()
    cache.states = TappedStates(model.feeds)
    job, _ = cache.prepare(Ask(TokenTree(tokens[-1]), rows=()), tokens, len(tokens))
    target.forward([job])
    return cache


def fresh_rows(target: Model, tokens: Sequence[int]) -> Cache:
    """A cache of the target that has taken in all tokens but the last."""
    cache = target.cache()
    job, _ = cache.prepare(Ask(TokenTree(tokens[-1]), rows=()), tokens, len(tokens))
    target.forward([job])
    cache.commit(tokens)
    return cache


def fresh_beside(cache: Cache, model: Model, tokens: Sequence[int]) -> Cache:
    """A cache that chose the same rows, of those that a fresh prefill of the target writes."""
    assert isinstance(cache, RetrievedCache) and isinstance(model, ToyRetrieving)
    known = tokens[: cache.length + 1]
    target = fresh_rows(model.base, known)
    fresh = RetrievedCache(model.layout, model.dtype, model.device, model.budget, model.chunk)
    model.prepare_cache(fresh, None, target)
    assert cache.chosen_rows is not None
    fresh.choose_rows(cache.chosen_rows)
    fresh.length -= cache.base - fresh.base  # the rows that came since
    fresh.commit(known)
    return fresh


def check_close(strategy: Strategy, temperature: float, tokens: int = 10, vocab: int = 6) -> None:
    """Closed after any number of engine steps, every cache is that of a fresh prefill and no rows
    are left behind.
    """
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature)
    for seed in (0, 1) if temperature else (2,):
        held_rows = False
        for count in range(1, 99):
            models = world(strategy, vocab, seed, copy=1.0)
            engine = Engine(models)
            live = engine.add(Request([1, 2, 3, 1, 2], strategy, sampling))
            for _ in range(count):
                engine.step()
            caches = dict(live.caches)
            texts = {handle: list(branch.tokens) for handle, branch in live.ctx.branches.items()}
            if not engine.live:
                break
            engine.end(live)
            assert not live.caches and not engine.live, "a closed request is still in the engine"
            held_rows |= bool(caches)  # not while it waits for what another thread does
            for (name, branch), held in caches.items():
                assert held.sharers == [0], "a closed request still holds rows"
                check_cache(held, models[name], texts[branch], models["target"])
        assert count > 3 and held_rows, "it ended before it could be interrupted"


def check_cost(
    strategy: Strategy, cost: str, fields: Mapping[str, Any], exact: bool, steps: int = 5
) -> None:
    """Forwards by model over some steps, but for the first, which may have to read the prompt in
    ways of its own, are what the card says: `target 1, draft length` with a
    field's name; `draft size at most` where trees decide themselves how deep they are; `layers
    length+1` are forwards of a part of the target's layers.

    `exact` False: an option lets the method stop early, so of the models that draft there may be
    fewer.
    """
    declared = [part.split(maxsplit=2) for part in cost.split(", ")]
    want = {
        model: steps * sum(int(fields.get(part, part)) for part in count.split("+"))
        for model, count, *_ in declared
    }
    bounds = {model for model, _, *rest in declared if rest == ["at most"]}
    engine = Engine(world(strategy, 8, copy=1.5))
    live = engine.add(
        Request([1, 2, 3, 1, 2], strategy, Sampling(max_new_tokens=400, temperature=1.0))
    )
    commits = 0
    first: Counter[str] = Counter()
    while commits <= steps:
        before = Counter(live.ctx.stats.calls) - first
        committed = sum(bool(event.tokens) for event in engine.step())
        if committed and not commits:
            first = before
        commits += committed
    engine.end(live)
    assert before.keys() == want.keys() and before["target"] == want["target"], (
        f"{before} forwards, not {want}"
    )
    for model, count in before.items():
        fewer = 0 < count < want[model] and (not exact or model in bounds)
        assert count == want[model] or fewer, f"{before} forwards, not {want}"


def check_ends(strategy: Strategy, temperature: float, vocab: int = 4) -> int:
    """Nothing follows an end, whichever kind, nothing is asked after it, and the reason is told.

    Returns how many ends fell inside a draft.
    """
    inside = 0
    for seed in range(30):
        if inside and seed >= 12:
            break
        prompt = [1, 3, 2, 1, 0, 1, 1, 3, 2, 1, seed % vocab]
        eos = (2,) if seed % 2 else ()
        refusing = Refusing(len(prompt), (0, *eos), ("bd",))
        sampling = Sampling(
            temperature=temperature,
            seed=seed,
            max_new_tokens=8,
            stop=("bd",),
            stop_token_ids=(0,),
            min_new_tokens=0 if seed % 3 else 4,
            logits_processors=(refusing,) if seed % 3 else (),
        )
        setting = Setting(sampling, eos)
        models = world(strategy, vocab, seed=seed, copy=1.0)
        engine = Engine(models, setting.eos)
        live = engine.add(Request(prompt, strategy, setting.sampling, text=setting.text))
        events = list(engine.run())
        assert live.error is None, f"it ended by {live.error}"
        output = live.ctx.output
        firsts = [n for n in range(1, len(output) + 1) if ended(output[:n], setting)]
        assert firsts[:1] == [len(output)], f"{output} goes on after its end"
        early = ended(
            output, replace(setting, sampling=replace(setting.sampling, max_new_tokens=99))
        )
        assert live.reason == ("stop" if early else "length"), f"{output} ended by {live.reason}"
        assert [t for e in events for t in e.tokens] == output, "the events are not the output"
        assert [e.done for e in events if e.done] == [live.reason], "an end is told once"
        last = next(e for e in reversed(events) if e.tokens)
        inside += bool(early and last.sources[-1] != "target")
        assert all(len(e.sources) == len(e.tokens) for e in events), "every token has one source"
    return inside

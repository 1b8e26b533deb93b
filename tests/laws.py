"""The laws of the project as functions: each takes a strategy and raises AssertionError where it
breaks a claim.

test_laws.py runs them on every method the registry finds, test_slips.py on methods broken on
purpose. What is expected never comes from the engine: `reference` works from the toy model's own
rows, by the chain rule and plain loops.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretell import cards, registry
from foretell.cache.cache import Cache
from foretell.cache.prefix_tree import PrefixTree
from foretell.cache.states import TappedStates
from foretell.constraints.grammars import Grammars
from foretell.core.distribution import Target
from foretell.core.masked_text import MASKED, look
from foretell.core.model import Model
from foretell.core.random import Door
from foretell.core.request import Request
from foretell.core.source import Direct, Source
from foretell.core.stores import Stores
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Outcome, Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.prefix_cache import WORTH, Reuse
from foretell.engine.status import troubles
from foretell.errors import BadConfig
from foretell.kv.select.view_model import Viewed
from foretell.models.decoder.retrieved import RetrievedCache
from foretell.models.diffusion.canvas import CanvasCache
from foretell.spec import pieces, resolve
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy, ToyRetrieving
from foretell.testing.toy_canvas import ToyCanvas
from foretell.testing.toy_layers import ToyLayers
from foretell.testing.toy_learning import ToyLearning
from foretell.verification.acceptance import Rule, walk

EXACT = 1e-9
DIRECT = Direct()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def spell(tokens: Sequence[int]) -> str:
    """A tokenizer's part: one letter a token."""
    return "".join(LETTERS[t] for t in tokens)


class Grammar:
    """A processor that depends on the path: the token that is (sum of all tokens so far) modulo V
    is forbidden.
    """

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[0, int(ids.sum()) % scores.shape[-1]] = -torch.inf
        return scores


class Refusing:
    """A processor, as of a grammar, that has no answer behind what ends a text.

    `length`: of the prompt.
    """

    def __init__(self, length: int, tokens: Sequence[int], texts: Sequence[str] = ()):
        self.length = length
        self.tokens = tokens
        self.texts = texts

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.length :].tolist()
        if set(self.tokens) & set(output) or any(text in spell(output) for text in self.texts):
            raise AssertionError(f"asked for what follows {output}")
        return scores


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter a token, as `spell` has them."""
    words = {letter: token for token, letter in enumerate(LETTERS)}
    bpe = Tokenizer(models.BPE(vocab={**words, "<end>": len(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@cache
def grammars(vocab: int) -> Grammars:
    return Grammars(letters(), vocab)


PROMPT = (0, 1, 2, 0, 1, 2, 0)
REACH = 2  # letters at most that a text of a form lacks for being whole


@dataclass(frozen=True)
class Setting:
    """A sampling with the ends of the texts."""

    sampling: Sampling
    eos: tuple[int, ...] = ()
    form: str = ""  # the regex that the output's letters have to match; none: any text
    vocab: int = 0  # V of the models that the form's constraint is made for

    def follows(self, output: Sequence[int], vocab: int) -> list[int]:
        """The tokens after which a text that began with `output` can still match the form."""
        return [token for token in range(vocab) if can_match(self.form, vocab, *output, token)]

    def in_time(self, output: Sequence[int], vocab: int, token: int) -> bool:
        """Whether a text that began with these can still match the form at the length limit."""
        text = *output, token
        return can_match(self.form, vocab, *text, within=self.sampling.max_new_tokens - len(text))

    def whole(self, output: Sequence[int]) -> bool:
        """Whether the text may end here."""
        return re.fullmatch(self.form, spell(output)) is not None

    @property
    def text(self) -> Callable[[Sequence[int]], str]:
        return spell


@cache
def can_match(form: str, vocab: int, *output: int, within: int = REACH) -> bool:
    """Whether a text that matches the form begins with `output`, by trying all endings."""
    for length in range(min(within, REACH) + 1):
        for rest in itertools.product(range(vocab), repeat=length):
            if re.fullmatch(form, spell([*output, *rest])):
                return True
    return False


def formed(form: str, vocab: int, eos: tuple[int, ...] = (), **options: Any) -> Setting:
    """A setting whose outputs have to match a regex."""
    constraint = grammars(vocab).compile({"regex": form})
    return Setting(Sampling(regex=form, constraint=constraint, **options), eos, form, vocab)


SETTINGS = {
    "plain": Setting(Sampling(temperature=1.0)),
    "temperature": Setting(Sampling(temperature=0.6)),
    "top-p": Setting(Sampling(temperature=1.3, top_p=0.8)),
    "top-k, min-p": Setting(Sampling(temperature=1.0, top_k=2, min_p=0.2)),
    "penalties": Setting(
        Sampling(temperature=1, repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.4)
    ),
    "grammar": Setting(Sampling(temperature=1.0, logits_processors=(Grammar(),))),
    "bias, ends": Setting(
        Sampling(temperature=1.0, logit_bias={1: 0.75, 2: -0.5}, min_new_tokens=2), eos=(2,)
    ),
    "end": Setting(
        Sampling(
            temperature=1.0,
            stop=("ab",),
            stop_token_ids=(2,),
            logits_processors=(Refusing(len(PROMPT), (2,), ("ab",)),),
        )
    ),
    "form": formed("(b(a|cb)|c|ab?)+", 3, temperature=1.0, frequency_penalty=0.3),
    "form, ends": formed("[ab](a|b[ab])?", 3, eos=(2,), temperature=1.0),
}


# --- what is expected: plain loops over the toy model's rows


def row(toy: Toy, tokens: Sequence[int]) -> list[float]:
    """Logits after `tokens`, asked of the toy model's hash without engine, cache or mask."""
    return list(
        toy.row(np.array(tokens, dtype=np.float64), np.arange(len(tokens), dtype=np.float64))
    )


Rows = Callable[[Sequence[int]], list[float]]  # an output -> the logits (V,) after it


def expected_law(
    toy: Toy,
    prompt: Sequence[int],
    output: Sequence[int],
    setting: Setting,
    rows: Rows | None = None,
) -> list[float]:
    """The law (V,) of the token after `output`, worked out token by token.

    `rows`: where the target's are not the toy's own, but a source's.
    """
    s = setting.sampling
    scores = rows(output) if rows else row(toy, [*prompt, *output])
    for t in {*prompt, *output}:
        scores[t] = (
            scores[t] / s.repetition_penalty if scores[t] > 0 else scores[t] * s.repetition_penalty
        )
    text, n = [*prompt, *output], s.no_repeat_ngram_size
    for i in range(len(text) - n + 1 if n else 0):
        if text[i : i + n - 1] == text[len(text) - n + 1 :]:
            scores[text[i + n - 1]] = -math.inf
    for processor in s.logits_processors:
        scores = processor(
            torch.tensor([[*prompt, *output]]), torch.tensor([scores], dtype=torch.float64)
        )[0].tolist()
    for t, n in Counter(output).items():
        scores[t] -= s.presence_penalty + n * s.frequency_penalty
    for t, bias in s.logit_bias.items():
        scores[t] += bias
    if len(output) < s.min_new_tokens:
        for t in (*setting.eos, *s.stop_token_ids):
            scores[t] = -math.inf
    if setting.form:
        possible = set(setting.follows(output, len(scores)))
        in_time = {token for token in possible if setting.in_time(output, len(scores), token)}
        if setting.whole(output):
            possible |= {*setting.eos, *s.stop_token_ids}
            in_time |= {*setting.eos, *s.stop_token_ids}
        if any(scores[token] > -math.inf for token in in_time):
            possible = in_time
        scores = [x if t in possible else -math.inf for t, x in enumerate(scores)]
    if s.temperature == 0:
        best = scores.index(max(scores))
        return [float(t == best) for t in range(len(scores))]
    scores = [x / s.temperature for x in scores]
    if s.top_k:
        least = sorted(scores)[-s.top_k]
        scores = [x if x >= least else -math.inf for x in scores]
    p = _softmax(scores)
    if s.top_p < 1:
        mass, kept = 0.0, set()
        for t in sorted(range(len(p)), key=lambda t: -p[t]):
            if mass < s.top_p:
                kept.add(t)
            mass += p[t]
        p = _softmax([x if t in kept else -math.inf for t, x in enumerate(scores)])
    if s.min_p:
        p = [x if x >= s.min_p * max(p) else 0.0 for x in p]
    return [x / sum(p) for x in p]


def _softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(x - max(scores)) for x in scores]
    return [w / sum(weights) for w in weights]


def ended(output: Sequence[int], setting: Setting) -> bool:
    s = setting.sampling
    stops = (*(() if s.ignore_eos else setting.eos), *s.stop_token_ids)
    if not output or output[-1] in stops:
        return bool(output)
    if len(output) >= s.max_new_tokens:
        return True
    if setting.form and not setting.follows(output, setting.vocab):
        return True
    text = spell(output)  # a letter a token
    ends = range(s.min_new_tokens + 1, len(text) + 1)
    return any(text[:end].endswith(stop) for end in ends for stop in s.stop)


def reference(
    toy: Toy, prompt: Sequence[int], setting: Setting, rows: Rows | None = None
) -> dict[tuple[int, ...], float]:
    """The law of whole outputs that plain decoding has, by the chain rule."""
    total: dict[tuple[int, ...], float] = {}
    stack: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while stack:
        output, weight = stack.pop()
        if ended(output, setting):
            total[output] = weight
            continue
        law = expected_law(toy, prompt, output, setting, rows)
        stack += [((*output, t), weight * p) for t, p in enumerate(law) if p > 0]
    return total


# --- the world a method is run in


def world(
    strategy: Strategy,
    vocab: int = 3,
    seed: int = 3,
    copy: float = 0.5,
    noise: float = 0.6,
    source: Source = DIRECT,
    **toy: Any,
) -> dict[str, Model]:
    """A target, and for every other model that the strategy or the source asks a relative that
    agrees with it in part.

    With this seed second and third tries of a node have chances other than 0 and 1, which most
    seeds do not give.
    """
    kind = ToyLayers if "layers" in {*strategy.needs, *source.needs} else Toy
    models: dict[str, Model] = {"target": kind(vocab, seed, copy=copy, **toy)}
    learns = isinstance(strategy, Speculative) and getattr(strategy.drafter, "online", 0)
    relative: Callable[..., Model] = ToyLearning if learns else Toy
    needed = getattr(getattr(strategy, "drafter", None), "draft_needs", ())
    if "layers" in needed:
        relative = ToyLayers
    if "canvas" in needed:
        relative = masked
    for i, name in enumerate((*strategy.models, *source.models)):
        shown = "layers" in source.needs and name in source.models
        models[name] = (ToyLayers if shown else relative)(
            vocab, seed, noise=noise + 0.2 * i, copy=copy, name=f"toy-{name}", **toy
        )
    return {**models, **strategy.bring(models)}


def masked(vocab: int, seed: int, **toy: Any) -> ToyCanvas:
    """A toy that fills masks, which are one more token."""
    return ToyCanvas(vocab + 1, seed, **toy)


def joint_world(strategies: Sequence[Strategy], vocab: int, **options: Any) -> dict[str, Model]:
    """One world for all of them: its target can do what any of them needs."""
    ordered = sorted(strategies, key=lambda strategy: len({*strategy.needs} - {"tree"}))
    worlds = [world(strategy, vocab, **options) for strategy in ordered]
    return {name: model for models in worlds for name, model in models.items()}


def finish(engine: Engine, *lives: Live) -> None:
    """Runs the engine dry and raises what went wrong in these requests."""
    for _ in engine.run():
        pass
    for live in lives:
        if live.error is not None:
            raise live.error.__cause__ or live.error


def generate(
    strategy: Strategy, prompt: Sequence[int], setting: Setting, models: Mapping[str, Model]
) -> Live:
    engine = Engine(models, setting.eos)
    live = engine.add(Request(prompt, strategy, setting.sampling, text=setting.text))
    finish(engine, live)
    return live


WIDE = 24  # outcomes of two tokens above which three would take too long


@dataclass
class Law:
    """The enumerated law of a strategy's outputs, and what its drafts came to over all outcomes."""

    outputs: dict[tuple[int, ...], float] = field(default_factory=dict)
    outcomes: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0  # of the deepest draft that was tested

    def distance(self, other: Mapping[tuple[int, ...], float]) -> float:
        """The largest difference of any output's probability."""
        keys = {*self.outputs, *other}
        return max(abs(self.outputs.get(k, 0.0) - other.get(k, 0.0)) for k in keys)


def warmed(strategy: Strategy, models: Mapping[str, Model], setting: Setting) -> Stores:
    """What the engine's shared stores hold after two texts; only a drafter that learns leaves
    anything there.
    """
    engine = Engine(models, setting.eos)
    vocab = models["target"].vocab
    lives = []
    for seed in range(2):
        sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
        lives.append(engine.add(Request([t % vocab for t in (0, 1, 2, seed)], strategy, sampling)))
    finish(engine, *lives)
    return engine.stores


# What any drafter leaves for the policy of drafts, and what saves it time.
COMMON = ("beginnings", "chances", "pace", "promise", "worth")


def leaves_something(spec: str) -> bool:
    """Whether a drafter's texts leave in the stores what drafts of later texts are made of."""
    strategy = build(spec)
    stores = warmed(strategy, world(strategy), SETTINGS["plain"])
    return any(not name.startswith(COMMON) for _, _, name in stores)


def enumerate_law(
    strategy: Strategy,
    prompt: Sequence[int],
    setting: Setting,
    models: Mapping[str, Model],
    warm: bool = True,
    source: Source = DIRECT,
    prepare: Callable[[Engine], object] | None = None,
) -> Law:
    """Runs the engine once for every outcome of every draw.

    `prepare`: done to each engine first, to give it costs or other requests.
    """
    stores = warmed(strategy, models, setting) if warm else Stores()
    law = Law()

    def once(door: Enumerator) -> tuple[int, ...]:
        engine = Engine(models, setting.eos)
        engine.stores = copy.deepcopy(stores)
        if prepare is not None:
            prepare(engine)
        request = Request(
            prompt, strategy, setting.sampling, text=setting.text, rng=door, source=source
        )
        live = engine.add(request)
        finish(engine, live)
        law.drafted += live.ctx.stats.drafted
        law.depth = max(law.depth, len(live.ctx.stats.by_depth))
        law.accepted += live.ctx.stats.accepted
        return tuple(live.ctx.output)

    for weight, output in Enumerator.walk(once):
        law.outcomes += 1
        law.outputs[output] = law.outputs.get(output, 0.0) + weight
    return law


# --- the laws


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
    computed them, and its tokens stay its own: behind plain decoding, behind itself, beside others,
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
        engine.preempt(rest[0])
        finish(engine, *rest)
        for live, other in zip((first, *rest), alone, strict=True):
            assert live.ctx.output == other.ctx.output, "another text than without shared rows"
        reused = engine.reuse.tree.reused - known
        assert reused >= len(rest) * len(beginning), f"only {reused} tokens were reused"
    assert not troubles(engine)


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
    if isinstance(cache, RetrievedCache) and cache.choice is None:
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
    """It says what a fresh one says of masks behind `tokens`, of which it may keep the rows of the
    first ones, `known`.
    """
    canvas = [*tokens, MASKED, MASKED]
    ask = look(tokens[-1], canvas, range(len(tokens), len(canvas)), range(known, len(canvas)))
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
    model.prepared(fresh, None, target)
    assert cache.choice is not None
    fresh.choose(cache.choice)
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
    """Nothing follows an end, whichever kind, nothing is asked behind it, and the reason is told.

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


# --- what the registry finds


def test_file(path: Path) -> Path:
    """The file of tests of a module of the package."""
    place = path.relative_to(registry.PACKAGE)
    return Path(__file__).parent / place.with_name(f"test_{path.name}")


@cache
def variants(name: str) -> list[str]:
    """The method with its defaults, and the specs that its test file lists as SPECS; {here} is that
    file's folder.

    Where a method must be told something (the file it copies from), those specs are all there is.
    """
    path = registry.files()[registry.kind_of(name), name]
    test = test_file(path)
    found = []
    with contextlib.suppress(BadConfig):
        resolve(name)
        found.append(name)
    for node in ast.parse(test.read_text("utf-8")).body if test.exists() else []:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "SPECS" for t in node.targets
        ):
            found += [
                spec.replace("{here}", test.parent.as_posix())
                for spec in ast.literal_eval(node.value)
            ]
    assert found, (
        f"{name} cannot do without fields, and {test.name} lists no SPECS: no law would run"
    )
    return found


def claiming(*guarantees: str, kind: str = "drafter") -> list[str]:
    """Specs of every method of the kind whose card claims one of these."""
    names = [
        n for n in registry.names(kind) if cards.card(n, kind).guarantee.split(":")[0] in guarantees
    ]
    return [spec for name in names for spec in variants(name)]


def is_first(spec: str) -> bool:
    """Whether it is its method's first spec, not one more of it."""
    return spec == variants(pieces(spec)[-1].partition(":")[0])[0]


def spread_out(specs: Sequence[str]) -> list[tuple[str, str, str]]:
    """(spec, rule, setting): with every method all settings and all its rules, with its variants
    one rule in turn.

    The settings go round the rules and begin elsewhere for each spec, so that each rule meets each
    setting with several drafters. All of the product would take longer the more methods there are
    for a rule, and find nothing that these do not. A variant's tokens by `walk` are held to those
    of each seed anyway.
    """
    settings = list(SETTINGS)
    cases = []
    for start, spec in enumerate(specs):
        rules = [rule for rule in rules_for(spec) if rule != "default"]
        if is_first(spec):
            for i in range(max(len(rules), len(settings)) if rules else 0):
                setting = settings[(start + i) % len(settings)]
                cases.append((spec, rules[i % len(rules)], setting))
        elif others := [rule for rule in rules if rule != "walk"]:
            rule = others[start % len(others)]
            cases.append((spec, rule, settings[start % len(settings)]))
    return cases


def build(spec: str, rule: str = "default", nodes: int = 6) -> Strategy:
    """The spec with a fixed number of nodes, so that no timing decides which tree is verified."""
    last = pieces(spec)[-1]
    if registry.kind_of(last.partition(":")[0]) != "drafter":
        return resolve(spec)[1]
    extra = f"rule={rule}" + ("" if "nodes=" in spec else f",nodes={nodes}")
    return resolve(f"{spec}{',' if ':' in last else ':'}{extra}")[1]


@dataclass(frozen=True)
class Asking(Rule):
    """Follows the target's samples, and keeps the trees that it is given."""

    trees: list[TokenTree] = field(default_factory=list, compare=False)

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        self.trees.append(tree)
        return walk(tree, target, rng, position)


@cache
def first_trees(spec: str) -> list[TokenTree]:
    """What the drafter drafts first, where a rule verifies it that takes any tree."""
    asking = Asking()
    built = build(spec)
    assert isinstance(built, Speculative)
    strategy = replace(built, rule=asking)
    engine = Engine(world(strategy))
    sampling = Sampling(temperature=1.0, max_new_tokens=30)
    live = engine.add(Request(PROMPT, strategy, sampling))
    for _ in engine.run():
        if live.ctx.stats.drafts == 3:
            break
    if live.error is not None:
        raise live.error.__cause__ or live.error
    return asking.trees


def takes_trees(spec: str, rule: str) -> bool:
    """Whether the rule verifies what the drafter drafts, as its first few trees tell."""
    strategy = build(spec, rule)
    assert isinstance(strategy, Speculative) and strategy.rule is not None
    drawn = strategy.drafter.draws or not strategy.rule.drawn
    return drawn and all(strategy.rule.accepts(tree) for tree in first_trees(spec))


@cache
def rules_for(spec: str, exact: bool | None = True) -> list[str]:
    """The rules that take this drafter's trees (None: exact and lossy ones), the default first."""
    fitting = ["default"] if exact is not False else []
    for rule in registry.names("rule"):
        if exact is None or registry.load(rule, "rule").exact == exact:
            if not takes_trees(spec, rule):
                continue
            fitting.append(rule)
    return fitting

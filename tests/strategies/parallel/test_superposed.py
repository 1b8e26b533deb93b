"""Superposed drafts against loops that know no engine: counts, scores, transformers' own forward of
mixed inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine import scheduler as schedule
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.strategies.parallel.superposed import MIXED, Superposed
from foretell.strategies.parallel.superposing import (
    WEIGHTS,
    Draft,
    best_candidates,
    mixed_scores,
    mixing_weights,
    nucleus_probs,
    superpose_states,
)
from foretell.strategies.parallel.text_counts import TextCounts
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws, tiny
from tests.engine.users import Guidance
from tests.models.decoder import families

PROMPTS = [[5, 17, 3, 5, 17, 3, 5], [80], [1, 2, 1, 2, 1, 9, 1, 2]]


@cache
def decoder(family: str = "llama") -> Decoder:
    return Decoder(families.tiny(family, dtype=torch.float64), family)


def generate(
    strategy: Any,
    prompt: Sequence[int],
    model: Decoder | None = None,
    eos: Sequence[int] = (),
    **options: Any,
) -> Live:
    engine = Engine({"target": model or decoder()}, eos)
    live = engine.add(Request(prompt, strategy, Sampling(**options), "superposed", laws.spell))
    laws.finish(engine, live)
    return live


# --- what is expected, by plain loops


def counted(
    texts: Sequence[Sequence[int]], context: Sequence[int], token: int
) -> tuple[float, float]:
    """What the n-grams of these texts give `token`, and the weights of the contexts that stand in
    them.
    """
    mass = known = 0.0
    for n, weight in enumerate(WEIGHTS, 1):
        follow = [
            t[i + n]
            for t in texts
            for i in range(len(t) - n)
            if list(t[i : i + n]) == list(context[-n:])
        ]
        if follow and len(context) >= n:
            mass += weight * follow.count(token) / len(follow)
            known += weight
    return mass, known


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def extended(
    config: Superposed,
    row: Sequence[float],
    drafts: Sequence[Draft],
    ended: Sequence[Draft],
    prompt: list[int],
    texts: Sequence[Sequence[int]],
    stops: Sequence[int],
    penalty: float = 1.0,
) -> tuple[list[Draft], list[Draft]]:
    """One step over the grid of all drafts and tokens."""
    options = []
    for draft in drafts:
        said = {*prompt, *draft.tokens}
        own = [
            (x / penalty if x > 0 else x * penalty) if t in said else x for t, x in enumerate(row)
        ]
        chosen = sorted(range(len(own)), key=lambda t: (-own[t], t))[: config.m]
        total = math.log(
            sum(math.exp((own[t] - own[chosen[0]]) / config.temperature) for t in chosen)
        )
        logs = {t: (own[t] - own[chosen[0]]) / config.temperature - total for t in chosen}
        masses = {t: counted(texts, [*prompt, *draft.tokens], t) for t in chosen}
        for t, p in logs.items():
            mass, known = masses[t]
            if not config.alpha:
                score = p
            elif config.backoff:
                score = (1 - config.alpha) * p + config.alpha * log(
                    mass + (1 - known) * math.exp(p)
                )
            elif any(m for m, _ in masses.values()):
                score = (1 - config.alpha) * p + config.alpha * log(mass)
            else:
                score = (1 - config.alpha) * p - 200
            if score > -math.inf:
                options.append(Draft(draft.score + score, [*draft.tokens, t]))
    options = sorted(options, key=lambda draft: -draft.score)[: 2 * config.k]
    going = [draft for draft in options if draft.tokens[-1] not in stops][: config.k]
    done = [*ended, *(draft for draft in options[: config.k] if draft.tokens[-1] in stops)]
    return going, sorted(done, key=lambda draft: -draft.score)[: config.k]


def by_loops(
    config: Superposed, model: Decoder, prompt: list[int], length: int, stops: Sequence[int]
) -> list[Draft]:
    """All drafts, best first, from transformers' own forwards over mixed inputs; every one runs to
    the full length.
    """
    hf: Any = model.hf
    inputs = hf.get_input_embeddings()(torch.tensor(prompt))
    alive, done = [Draft(0.0, [])], list[Draft]()
    for _ in range(length):
        row = hf(inputs_embeds=inputs[None], use_cache=False).logits[0, -1]
        alive, done = extended(config, row.tolist(), alive, done, prompt, [prompt], stops)
        if not alive:
            break
        weights = torch.tensor([draft.score for draft in alive], dtype=torch.float64).softmax(0)
        states = hf.get_input_embeddings()(torch.tensor([draft.tokens[-1] for draft in alive]))
        inputs = torch.cat([inputs, weights @ states[None]])
    return sorted([*done, *alive], key=lambda draft: -draft.score)[: config.k]


def same(got: Sequence[Draft], want: Sequence[Draft], error: float = 1e-9) -> None:
    assert [draft.tokens for draft in got] == [draft.tokens for draft in want]
    assert [draft.score for draft in got] == pytest.approx(
        [draft.score for draft in want], rel=error, abs=error
    )


# --- the method


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize(
    "config",
    [
        Superposed(temperature=0.5),
        Superposed(4, 6, 2.0, backoff=False),
        Superposed(2, alpha=0.0, temperature=1.0),
        Superposed(1),
    ],
)
def test_the_drafts_are_those_of_transformers_own_forwards_over_mixed_inputs(
    family: str, config: Superposed
) -> None:
    ends = set()
    for prompt in PROMPTS:
        stops = range(15)
        live = generate(config, prompt, decoder(family), eos=stops, max_new_tokens=9)
        answers = [Draft(score, tokens) for tokens, score, _ in live.answers]
        same(
            answers, by_loops(config, decoder(family), prompt, 9, stops), 1e-4
        )  # norms are computed in float32
        assert live.ctx.output == answers[0].tokens and live.reason == live.answers[0][2]
        assert all(
            reason == ("stop" if tokens[-1] in stops else "length")
            for tokens, _, reason in live.answers
        )
        ends |= {reason for _, _, reason in live.answers}
    assert ends == {"stop", "length"} or config.k < 3, "one kind of end was not tested"


@settings(max_examples=40)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([0.06, 1.0]),
    st.sampled_from([0.0, 0.54, 1.0]),
    st.booleans(),
    st.sampled_from([1.0, 1.5]),
)
def test_scores_are_those_of_a_search_over_the_whole_grid(
    data: st.DataObject,
    k: int,
    m: int,
    temperature: float,
    alpha: float,
    backoff: bool,
    penalty: float,
) -> None:
    config = Superposed(k, m, temperature, alpha, backoff)
    sizes = st.lists(st.integers(0, 6), min_size=1, max_size=12)
    prompt, other = data.draw(sizes, "prompt"), data.draw(sizes, "other")
    rows = np.random.default_rng(data.draw(st.integers(0, 999), "seed")).normal(size=(4, 7))
    request = Request(prompt, config, Sampling(repetition_penalty=penalty, stop_token_ids=[6]))
    ctx = Context(Engine({"target": Toy(7)}), request)
    texts = [TextCounts(1), TextCounts(1)]
    for text, store in zip((prompt, other), texts, strict=True):
        store.add(text)
    got: tuple[list[Draft], list[Draft]] = [Draft(0.0, [])], []
    want = got
    for row in rows:
        got = config.extend_drafts(ctx, texts, torch.from_numpy(row), *got)
        want = extended(config, row.tolist(), *want, prompt, [prompt, other], [6], penalty)
        same(got[0], want[0])
        same(got[1], want[1])
        assert len({tuple(draft.tokens) for draft in got[0]}) == len(got[0]), "drafts are distinct"
        if not got[0]:
            break


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_one_draft_without_counts_is_greedy_decoding(family: str) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"no_repeat_ngram_size": 2},
        {"logit_bias": {9: 3.0, 2: -5.0}, "bad_words": [[5, 17], [44]]},
        {"logits_processors": [laws.Grammar()]},
        {"stop_token_ids": range(40), "min_new_tokens": 4},
        {"ignore_eos": True},
        {"max_new_tokens": 1},
    ]
    for i, more in enumerate(options if family == "llama" else options[:2]):
        prompt, more = PROMPTS[i % len(PROMPTS)], {"max_new_tokens": 12, **more}
        plain = generate(Plain(), prompt, decoder(family), eos=[3], **more)
        live = generate(Superposed(1, alpha=0.0), prompt, decoder(family), eos=[3], **more)
        assert (live.ctx.output, live.reason) == (plain.ctx.output, plain.reason), more
        assert live.ctx.stats.calls == plain.ctx.stats.calls


def test_ties_go_to_the_lowest_id() -> None:
    row = torch.tensor([0.0, 2.0, -torch.inf, 2.0, 1.0, 2.0, 1.0])
    ids, logs = best_candidates(row, 2, 1.0)
    assert ids.tolist() == [1, 3] and np.exp(logs) == pytest.approx([0.5, 0.5])
    assert best_candidates(row, 9, 0.06)[0].tolist() == [1, 3, 5, 4, 6, 0], (
        "what is forbidden cannot follow"
    )


def test_without_counts_the_score_is_the_models_own() -> None:
    logs = np.log([0.7, 0.2, 0.1])
    none = np.zeros((5, 3)), np.zeros(5)
    assert mixed_scores(logs, *none, 0.54, True) == pytest.approx(logs)
    assert mixed_scores(logs, *none, 0.54, False) == pytest.approx(0.46 * logs - 200)


# --- the mixed input


@given(st.lists(st.tuples(st.floats(-900, 0), st.integers(0, 5)), min_size=1, max_size=6))
def test_weights_are_the_softmax_of_the_scores_and_sum_to_one(
    pairs: list[tuple[float, int]],
) -> None:
    drafts = sorted(
        (Draft(score, [1, token]) for score, token in pairs), key=lambda draft: -draft.score
    )
    shares = mixing_weights(drafts)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
    weights = (
        torch.tensor([draft.score for draft in drafts], dtype=torch.float64).softmax(0).tolist()
    )
    for token in range(6):
        mine = sum(w for w, draft in zip(weights, drafts, strict=True) if draft.tokens[-1] == token)
        assert shares.get(token, 0.0) == pytest.approx(mine, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_drafts_that_agree_on_a_token_give_its_own_embedding(dtype: torch.dtype) -> None:
    states = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    shares = mixing_weights([Draft(-0.1, [4]), Draft(-0.3, [4]), Draft(-7.7, [4])])
    assert shares == {4: 1.0} and torch.equal(superpose_states(states[:1], [1.0]), states[:1])
    mixed = superpose_states(states, [0.25, 0.75])
    assert mixed.dtype == dtype and mixed.shape == (1, 8)
    want = 0.25 * states[0].double() + 0.75 * states[1].double()
    assert torch.allclose(
        mixed[0].double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "granite"])
def test_a_chain_of_states_grows_and_embeddings_give_the_rows_of_their_tokens(family: str) -> None:
    model, prompt, tokens = decoder(family), PROMPTS[2], [7, 7, 30, 11]
    cache, tree = model.cache(), TokenTree(PROMPTS[2][-1])
    states = model.embed(tokens)
    taps = model.forward([model.cache().prepare(Ask(tree, taps=(0,)), prompt, 99)[0]])[0].hidden[0]
    assert torch.equal(model.embed(prompt), taps), "what enters layer 0 is something else"
    job, _ = cache.prepare(Ask(tree), prompt, 99)
    model.forward([job])
    for n in range(len(tokens)):
        tree.add(n, MIXED, value=1.0)
        job, whole = cache.prepare(Ask(tree, states=states[n : n + 1]), prompt, 99)
        assert whole and job.tokens == [MIXED] and job.positions == [len(prompt) + n]
        reply = model.forward([job])[0]
        want = model.score(prompt, TokenTree(prompt[-1]).chain(tokens[: n + 1]))[-1]
        assert reply.nodes == [n + 1] and torch.allclose(
            reply.logits[0], want, rtol=1e-9, atol=1e-9
        )
    again, _ = cache.prepare(Ask(tree, states=states[-2:]), prompt, 99)
    assert len(again.tokens) == 2, "other states of the same nodes are computed anew"
    model.forward([again])
    cache.commit([*prompt, *tokens])
    assert cache.length == len(prompt), "rows of sums were taken for rows of tokens"
    cache.commit([*prompt, MIXED, MIXED, 1])
    assert cache.length == len(prompt), "they are gone"


# --- in the engine


def test_one_forward_a_token_each_of_one_node() -> None:
    model, sizes = decoder(), []
    engine = Engine({"target": model})
    live = engine.add(Request(PROMPTS[0], Superposed(), Sampling(max_new_tokens=8)))
    while engine.live:
        before = model.calls
        engine.step()
        assert model.calls - before <= 1
        sizes += [len(cache.tokens) for cache in live.caches.values()]
    laws.finish(engine, live)
    stats = live.ctx.stats
    assert stats.calls == {"target": 8} and stats.tokens == 8
    assert sizes[:8] == [7 + n for n in range(8)], "rows were computed twice"
    assert (stats.drafted, stats.accepted) == (0, 0)
    assert len(live.answers) == 3 and len({tuple(tokens) for tokens, _, _ in live.answers}) == 3
    scores = [score for _, score, _ in live.answers]
    assert scores == sorted(scores, reverse=True) and scores[0] <= 0


def test_alone_as_among_others() -> None:
    model = decoder()
    strategies = [Superposed(megabytes=0), Plain(), Superposed(2, alpha=0.2, megabytes=0)]
    requests = [
        Request([*PROMPTS[i], s], strategies[s], Sampling(max_new_tokens=5 + 2 * i))
        for i in range(3)
        for s in range(3)
    ]
    alone = [
        generate(r.strategy, r.prompt, model, max_new_tokens=r.sampling.max_new_tokens)
        for r in requests
    ]
    engine = Engine({"target": model})
    before, lives = model.calls, []
    for i, request in enumerate(requests):
        lives.append(engine.add(request))
        if i % 3 == 0:
            engine.step()
    laws.finish(engine, *lives)
    assert [live.ctx.output for live in lives] == [live.ctx.output for live in alone]
    assert [[a[0] for a in live.answers] for live in lives] == [
        [a[0] for a in live.answers] for live in alone
    ]
    assert model.calls - before < sum(len(live.ctx.output) for live in lives), (
        "forwards were shared"
    )


def test_a_long_prompt_goes_in_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPTS[2] * 4
    want = generate(Superposed(megabytes=0), prompt, max_new_tokens=6).answers
    for name in ("CHUNK", "LEAST", "STEP"):
        monkeypatch.setattr(schedule, name, 5)
    live = generate(Superposed(megabytes=0), prompt, max_new_tokens=6)
    assert [a[0] for a in live.answers] == [a[0] for a in want] and live.ctx.stats.calls[
        "target"
    ] > 6 + 4


@pytest.mark.parametrize("when", [1, 2, 5])
def test_an_interrupted_forward_loses_nothing(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = generate(Superposed(), PROMPTS[0], max_new_tokens=7)
    real, calls = Decoder.run, []

    def run(self: Decoder, *args: Any) -> Any:
        result = real(self, *args)
        calls.append(1)
        if len(calls) == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Decoder, "run", run)
    engine = Engine({"target": decoder()})
    live = engine.add(Request(PROMPTS[0], Superposed(), Sampling(max_new_tokens=7)))
    interrupted = 0
    while engine.live:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 1 and [a[0] for a in live.answers] == [a[0] for a in want.answers]


@torch.inference_mode()
@pytest.mark.parametrize("strategy", [Superposed(), Superposed(1, alpha=0.0)])
def test_closed_at_any_step_the_rows_are_those_of_the_prompt_and_all_are_freed(
    strategy: Superposed,
) -> None:
    model, prompt = decoder(), PROMPTS[0]
    fresh = model.cache()
    model.forward([fresh.prepare(Ask(TokenTree(prompt[-1])), prompt, 99)[0]])
    for count in range(1, 99):
        engine = Engine({"target": model})
        live = engine.add(Request(prompt, strategy, Sampling(max_new_tokens=6)))
        for _ in range(count):
            engine.step()
        if not engine.live:
            break
        (held,) = live.caches.values()
        engine.end(live)
        assert not live.caches and held.sharers == [0] and live.ctx.tokens == prompt
        assert not engine.stores or not engine.stores.popitem()[1].tokens[1:], (
            "an unfinished text was learnt"
        )
        held.commit([*prompt, *[MIXED + 1] * 9])
        assert held.length == len(prompt), "only rows of the prompt are kept"
        for ours, theirs in zip((*held.k, *held.v), (*fresh.k, *fresh.v), strict=True):
            assert torch.equal(ours[:, : held.length], theirs[:, : held.length])
    assert count > 5


def test_ends_are_each_drafts_own() -> None:
    texts, reasons = set(), set()
    for prompt in PROMPTS:
        stop = [laws.LETTERS[i] for i in range(0, 26, 5)]
        model = Decoder(families.tiny("llama", vocab_size=26, dtype=torch.float64), "letters")
        prompt = [t % 26 for t in prompt]
        live = generate(
            Superposed(temperature=2.0),
            prompt,
            model,
            stop=stop,
            stop_token_ids=[1],
            max_new_tokens=6,
            min_new_tokens=2,
        )
        for tokens, _, reason in live.answers:
            # The first two tokens stop no text.
            ended = [
                n for n, t in enumerate(tokens, 1) if t == 1 or (n > 2 and laws.LETTERS[t] in stop)
            ]
            assert (
                (ended[:1] == [len(tokens)])
                if reason == "stop"
                else (not ended and len(tokens) == 6)
            )
            assert tokens[0] != 1, "min_new_tokens"
            reasons.add(reason)
            texts.add(tuple(tokens))
    assert reasons == {"stop", "length"} and len(texts) > 5


def test_no_room_and_the_context() -> None:
    live = generate(Superposed(), PROMPTS[0], max_new_tokens=0)
    assert not live.ctx.output and live.reason == "length" and not live.answers
    live = generate(Superposed(), [1, 2, 3] * 42, max_new_tokens=50)
    assert (
        len(live.ctx.tokens) == 128
        and live.reason == "length"
        and {len(a[0]) for a in live.answers} == {2}
    )


# --- what is refused


def test_rows_and_ids_from_elsewhere_are_refused_by_name_before_a_forward() -> None:
    model = Decoder(families.tiny("llama"), "llama")
    before, engine = model.calls, Engine({"target": model})
    with pytest.raises(BadConfig, match=r"superposed reads the target itself.*'guidance'"):
        engine.add(Request([1], Superposed(), Sampling(), source=Guidance()))
    with pytest.raises(BadConfig, match="superposed:corpus=99999: must be ids of the vocabulary"):
        engine.add(Request([1], Superposed(corpus=(1, 99999)), Sampling()))
    assert not engine.live and model.calls == before


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 1.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"logprobs": 0},
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name_before_a_forward(
    option: dict[str, Any],
) -> None:
    model = Decoder(families.tiny("llama"), "llama")
    before, engine = model.calls, Engine({"target": model})
    with pytest.raises(
        BadConfig, match=f"{next(iter(option))}={next(iter(option.values()))}"
    ) as caught:
        engine.add(Request([1], Superposed(), Sampling(**option)))
    assert "\n" not in str(caught.value) and not engine.live and model.calls == before


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(Unsupported, match="'layers'"):
        Engine({"target": Toy(4)}).add(Request([1], Superposed()))


# --- counts


def test_finished_texts_are_counted_for_their_tenant_alone() -> None:
    engine = Engine({"target": decoder()})

    def run(tenant: str, config: Superposed) -> Live:
        live = engine.add(Request(PROMPTS[1], config, Sampling(max_new_tokens=9), tenant=tenant))
        laws.finish(engine, live)
        return live

    config = Superposed(temperature=1.0, megabytes=1)
    first, second, other = run("a", config), run("a", config), run("b", config)
    assert second.answers[0][1] > first.answers[0][1], "what was written before did not count"
    assert other.answers == first.answers
    (mine, _) = (store for store in engine.stores.values())
    assert list(mine.tokens) == [-1, *first.ctx.tokens, -1, *second.ctx.tokens, -1]
    alone = Superposed(temperature=1.0, megabytes=0)
    assert run("a", alone).answers == run("a", alone).answers == first.answers


# --- what the user gets


def test_every_draft_reaches_the_user_with_its_score() -> None:
    lm = tiny.lm(torch.float64, draft=False)
    out = lm.generate("The quick brown", "superposed:temperature=1.5", max_new_tokens=8)
    assert len(out.samples) == 3 and out.samples[0] is out and out.stats.calls == {"target": 8}
    scores = [sample.score for sample in out.samples]
    assert (
        scores == sorted(scores, reverse=True)
        and len({tuple(sample.tokens) for sample in out.samples}) == 3
    )
    for sample in out.samples:
        ended = sample.finish_reason == "stop"
        assert (
            sample.text == lm.decode(sample.tokens)
            and ended == (sample.tokens[-1] == 0)
            and sample.error is None
        )
        assert sample.to_dict()["score"] == sample.score and len(sample.draft) == len(sample.tokens)
    pieces = list(
        lm.stream("The quick brown", "superposed:temperature=1.5,megabytes=0", max_new_tokens=8)
    )
    assert (
        "".join(piece.text for piece in pieces) == out.text
        and pieces[-1].finish_reason == out.finish_reason
    )
    assert lm.generate("The quick", "plain", max_new_tokens=2).score is None
    with pytest.raises(BadConfig, match=r"temperature=0\.7"):
        lm.generate("The quick", "superposed", temperature=0.7)


# --- resets, openings, corpora


def without_reset(config: Superposed, prompt: list[int], length: int) -> list[list[int]]:
    """The drafts after `length` tokens of one stretch."""
    live = generate(replace(config, reset=0), prompt, max_new_tokens=length)
    return [tokens for tokens, _, _ in live.answers]


@pytest.mark.parametrize("reset", [1, 2, 5])
def test_a_reset_goes_on_from_the_best_draft_as_from_a_prompt(reset: int) -> None:
    config = Superposed(k=3, m=4, alpha=0, temperature=1.0, reset=reset)
    prompt = PROMPTS[0]
    best: list[int] = []
    lengths = reset, reset, min(reset, 2)
    for length in lengths:
        drafts = without_reset(config, [*prompt, *best], length)
        last, best = best, [*best, *drafts[0]]
    live = generate(config, prompt, max_new_tokens=sum(lengths))
    assert [tokens for tokens, _, _ in live.answers] == [[*last, *draft] for draft in drafts]
    assert not live.caches


def test_a_reset_later_than_the_end_changes_nothing() -> None:
    runs = [generate(Superposed(reset=reset), PROMPTS[2], max_new_tokens=6) for reset in (0, 6)]
    assert runs[0].answers == runs[1].answers


def test_an_opening_is_drawn_from_the_nucleus_and_the_drafts_go_on_from_it() -> None:
    prompt = PROMPTS[0]
    seen = set()
    for seed in range(4):
        config = Superposed(k=2, opening=3, nucleus=0.6)
        live = generate(config, prompt, max_new_tokens=6, seed=seed)
        texts = [tokens for tokens, _, _ in live.answers]
        (opening,) = {tuple(tokens[:3]) for tokens in texts}
        for length, token in enumerate(opening):
            row = decoder().score([*prompt, *opening[:length]])[-1]
            assert nucleus_probs(row, 0.6)[token] > 0
        rest = generate(Superposed(k=2), [*prompt, *opening], max_new_tokens=3)
        assert [tokens[3:] for tokens in texts] == [tokens for tokens, _, _ in rest.answers]
        seen.add(opening)
    assert len(seen) > 1


def test_the_nucleus_is_the_fewest_tokens_that_have_the_mass() -> None:
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for mass, count in ((0.4, 1), (0.41, 2), (0.7, 2), (0.75, 3), (1.0, 4)):
        law = nucleus_probs(scores, mass)
        kept = torch.tensor([0.4, 0.3, 0.2, 0.1])[:count]
        assert law[:count].tolist() == pytest.approx((kept / kept.sum()).tolist())
        assert not law[count:].any()


def test_an_opening_may_end_the_text() -> None:
    prompt = PROMPTS[0]
    for seed in range(20):
        opening = generate(Superposed(opening=4), prompt, max_new_tokens=9, seed=seed).answers[0][0]
        live = generate(
            Superposed(opening=4), prompt, eos=[opening[1]], max_new_tokens=9, seed=seed
        )
        end = opening.index(opening[1]) + 1
        assert [tokens for tokens, _, _ in live.answers] == [opening[:end]]
        assert live.reason == "stop"


def test_a_corpus_is_counted_beside_the_prompt() -> None:
    corpus = (80, 7, 9, 11, 13, 15)
    config = Superposed(k=1, m=1024, alpha=1.0, backoff=False, corpus=corpus)
    live = generate(config, [80], max_new_tokens=4)
    assert live.answers[0][0] == [7, 9, 11, 13], "only what was counted may follow"

"""APE against loops over transformers' own rows of each context, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.kv.encoded.ape import Ape
from foretell.models.decoder.decoder import Decoder
from foretell.ops.attention import Attention
from foretell.strategies.plain import Plain
from tests.kv.driving import SCALE, rows_of
from tests.kv.loops import LoopLlama, Row
from tests.kv.policies import drafted, run, target
from tests.models.decoder.families import tiny

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "ape:prefix=3,sizes=5 7,temperature=0.5,scale=0.5"
LARGE_SPEC = "ape:prefix=3,sizes=12,temperature=1,scale=1"

PREFIX = [5, 17, 40]
CONTEXTS = [[1, 2, 3, 4], [60, 61, 62, 63, 64, 65, 66], [30, 31]]
QUESTION = [7, 8, 9]
KV = Ape(0.8, 0.7, len(PREFIX), tuple(map(len, CONTEXTS)))


def prompt_of(contexts: Sequence[Sequence[int]]) -> list[int]:
    return [*PREFIX, *(token for one in contexts for token in one), *QUESTION]


class Apart(LoopLlama):
    """Reads one token at a time. `slip` names a mistake."""

    def __init__(self, kv: Ape, slip: str = "") -> None:
        super().__init__(target(dtype=torch.float64).hf, slots=False)
        self.kv, self.slip, self.asked = kv, slip, False
        self.apart: list[list[list[Row]]] = [[[] for _ in layer] for layer in self.rows]

    def read_all(self, contexts: Sequence[Sequence[int]]) -> int:
        """The token that is likeliest after the question."""
        for token in PREFIX:
            self.read(token)
        for context in contexts:
            for token in context:
                self.read(token)
            for layer, heads in enumerate(self.rows):
                for head, rows in enumerate(heads):
                    self.apart[layer][head] += rows[len(PREFIX) :]
                    del rows[len(PREFIX) :]
            self.length = len(PREFIX)
        longest = max(map(len, contexts))
        if self.slip == "after the last":
            longest = len(contexts[-1])
        if self.slip == "after all":
            longest = sum(map(len, contexts))
        self.length += longest
        self.asked = True
        following = 0
        for token in QUESTION:
            following = self.read(token)
        return following

    def _attention(self, number: int, x: torch.Tensor, part: Any, watched: bool) -> torch.Tensor:
        if not self.asked:
            return super()._attention(number, x, part, watched)
        shares = part.num_key_value_groups
        queries = part.q_proj(x).view(self.heads, shares, -1)
        new_keys, new_values = (f(x).view(self.heads, -1) for f in (part.k_proj, part.v_proj))
        mixed = []
        for head, rows in enumerate(self.rows[number]):
            rows.append(Row(self.length, new_keys[head], new_values[head]))
            near, far = rows, self.apart[number][head]
            q = self.turned(queries[head], [self.length] * shares) * part.head_dim**-0.5
            ours = (q @ self.turned_keys(near).T).exp()
            theirs = (q @ self.turned_keys(far).T / self.kv.temperature).exp()
            total = theirs.sum(-1, keepdim=True)
            power = self.kv.scale * self.kv.temperature
            if self.slip == "scale alone":
                power = self.kv.scale
            share = theirs * total ** (power - 1)
            weights = torch.cat([ours, share], -1)
            weights = weights / weights.sum(-1, keepdim=True)
            values = torch.stack([row.value for row in (*near, *far)])
            mixed.append((weights @ values).flatten())
        return part.o_proj(torch.cat(mixed)[None])  # type: ignore[no-any-return]

    def turned_keys(self, rows: Sequence[Row]) -> torch.Tensor:
        keys = torch.stack([row.key for row in rows])
        return self.turned(keys, [row.place for row in rows])


@torch.inference_mode()
def rows_by_loops(
    kv: Ape, contexts: Sequence[Sequence[int]], text: Sequence[int], slip: str = ""
) -> list[torch.Tensor]:
    """The keys and values that the question and the text after it leave, of each layer."""
    loop = Apart(kv, slip)
    loop.read_all(contexts)
    for token in text:
        loop.read(token)
    found = []
    for heads in loop.rows:
        found += [torch.stack([loop.turned_keys(rows) for rows in heads])]
        found += [torch.stack([torch.stack([row.value for row in rows]) for rows in heads])]
    return found


@torch.inference_mode()
def by_engine(
    kv: Ape | None, prompt: Sequence[int], tokens: int = 6, model: Decoder | None = None
) -> tuple[list[int], list[torch.Tensor]]:
    """The greedy text, and the rows of the cache of all of it but the last token."""
    model = target(dtype=torch.float64) if model is None else model
    engine = Engine({"target": model})
    policy = None if kv is None else kv.build_policy(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    live = engine.add(Request(list(prompt), Plain(), sampling, policy=policy))
    held: list[torch.Tensor] = []
    while engine.live:
        engine.step()
        cache = live.caches.get(("target", 0))
        if cache is not None and cache.length:
            cache.settle(live.ctx.tokens)
            pairs = zip(cache.k, cache.v, strict=True)
            held = [part[:, : cache.base].clone() for pair in pairs for part in pair]
    assert live.error is None
    return live.ctx.output, held


def same(kv: Ape, contexts: Sequence[Sequence[int]], slip: str = "") -> bool:
    output, held = by_engine(kv, prompt_of(contexts))
    kept = held[0].shape[1] - len(PREFIX) - len(QUESTION)
    assert kept > 2
    want = rows_by_loops(kv, contexts, output[:kept], slip)
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(held, want, strict=True))


@pytest.mark.parametrize("kv", [KV, Ape(1, 1, KV.prefix, KV.sizes), Ape(1, 0.5, 3, (13,))])
def test_it_has_the_rows_that_loops_have(kv: Ape) -> None:
    joined = [token for one in CONTEXTS for token in one]
    assert same(kv, CONTEXTS if len(kv.sizes) == 3 else [joined])


@pytest.mark.parametrize("slip", ["after the last", "after all", "scale alone"])
def test_a_slip_is_noticed(slip: str) -> None:
    assert not same(KV, CONTEXTS, slip)


def logits_behind(kv: Ape | None, prompt: Sequence[int]) -> torch.Tensor:
    model = target()
    cache = model.cache()
    if kv is not None:
        cache.use(kv.build_policy(model), len(prompt))
    done = False
    while not done:
        job, done = cache.prepare(Ask(TokenTree(prompt[-1])), prompt, 1000)
        with torch.inference_mode():
            reply = model.forward([job])[0]
    return reply.logits


def test_one_context_is_ordinary_reading_where_nothing_is_adapted() -> None:
    prompt = prompt_of(CONTEXTS)
    one = Ape(1, 1, len(PREFIX), (sum(map(len, CONTEXTS)),))
    (want,) = run(target(), [prompt], None)
    (got,) = run(target(), [prompt], one)
    assert got.ctx.output == want.ctx.output
    assert torch.allclose(logits_behind(one, prompt), logits_behind(None, prompt), atol=1e-5)
    adapted = logits_behind(Ape(0.9, 0.9, one.prefix, one.sizes), prompt)
    assert not torch.allclose(adapted, logits_behind(None, prompt), atol=1e-5)


def test_the_order_of_contexts_says_nothing() -> None:
    turned = CONTEXTS[::-1]
    other = Ape(KV.temperature, KV.scale, KV.prefix, KV.sizes[::-1])
    rows = logits_behind(KV, prompt_of(CONTEXTS))
    assert torch.allclose(rows, logits_behind(other, prompt_of(turned)), atol=1e-5)
    assert not torch.allclose(rows, logits_behind(KV, prompt_of(turned)), atol=1e-5)


def test_contexts_may_be_longer_than_all_positions_together() -> None:
    model = target()
    size = model.context // 2
    sizes = (size, size - 1, size - 2, size - 3)
    prompt = [i % 90 for i in range(3 + sum(sizes) + 4)]
    kv = Ape(prefix=3, sizes=sizes)
    assert len(prompt) > 1.9 * model.context
    (want,) = run(model, [prompt], kv)
    (got,) = run(model, [prompt], kv, drafted(want.ctx.output, 3))
    assert len(want.ctx.output) == 24, "positions are left for it"
    assert got.ctx.output == want.ctx.output
    left = model.context - (3 + size + 4)
    (full,) = run(model, [prompt], kv, tokens=2 * model.context)
    assert len(full.ctx.output) == left
    with pytest.raises(PromptTooLong, match="contexts and the question take"):
        long = [i % 90 for i in range(3 + 2 * model.context)]
        run(model, [[*long, 1]], Ape(prefix=3, sizes=(model.context, model.context)))


def test_a_text_that_is_too_short_for_the_contexts_is_read_as_ever() -> None:
    prompt = prompt_of(CONTEXTS)[: -len(QUESTION)]
    assert by_engine(KV, prompt)[0] == by_engine(None, prompt)[0]


def test_what_a_context_reads_does_not_depend_on_the_others() -> None:
    """So its rows could be kept for other questions: bit by bit the same."""
    held = []
    for contexts in (CONTEXTS, [CONTEXTS[1]]):
        cache = target().cache()
        kv = Ape(prefix=3, sizes=tuple(map(len, contexts)))
        cache.use(kv.build_policy(target()), len(prompt_of(contexts)))
        prompt, done = prompt_of(contexts), False
        while not done:
            job, done = cache.prepare(Ask(TokenTree(prompt[-1])), prompt, 1000)
            with torch.inference_mode():
                target().forward([job])
        policy: Any = cache.policy
        held.append(policy.rows)
        assert policy.bytes == sum(part.nbytes for side in policy.rows for part in side)
        assert cache.bytes == policy.bytes + (cache.base + len(cache.tokens)) * target().row_bytes
    for many, one in zip(*held, strict=True):
        for rows, alone in zip(many, one, strict=True):
            assert torch.equal(rows[:, 4:11], alone)


def test_capped_scores_are_sharpened_behind_the_cap() -> None:
    """What the temperature divides are the scores as the family has them."""
    policy = KV.build_policy(target())
    parts = [rows_of((i,), 0) for i in range(9)]
    keys, values = (torch.stack([part[side] for part in parts], 1) for side in (1, 2))
    far, near = slice(0, 6), slice(6, 9)
    asked_q = parts[-1][0][:, None]
    policy.rows = [keys[:, far]], [values[:, far]]
    asked = Attention(0, asked_q, keys[:, near], values[:, near], None, SCALE, softcap=1.5)
    got = policy.attend_job(None, asked)[0]
    for head in range(len(asked_q)):
        group = head * len(keys) // len(asked_q)
        scores = 1.5 * torch.tanh(keys[group] @ asked_q[head, 0] * SCALE / 1.5)
        theirs = (scores[far] / KV.temperature).exp()
        theirs = theirs * theirs.sum() ** (KV.scale * KV.temperature - 1)
        weights = torch.cat([theirs, scores[near].exp()])
        assert torch.allclose(got[head], weights @ values[group] / weights.sum())


def test_it_needs_contexts_a_prefix_and_rotary_positions() -> None:
    with pytest.raises(BadConfig, match="kv=ape: it reads contexts"):
        Ape().build_policy(target())
    with pytest.raises(BadConfig, match="ape:prefix=0"):
        Ape(sizes=(3,)).build_policy(target())
    with pytest.raises(Unsupported, match="kv=ape"):
        KV.build_policy(Decoder(tiny("gpt2"), "gpt2"))

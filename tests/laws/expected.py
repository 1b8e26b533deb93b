"""What is expected, never by the engine: plain loops over the toy model's own rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from foretell.testing.toy import Toy
from tests.laws.world import Setting, spell

Rows = Callable[[Sequence[int]], list[float]]  # an output -> the logits (V,) after it


def row(toy: Toy, tokens: Sequence[int]) -> list[float]:
    """Logits after `tokens`, asked of the toy model's hash without engine, cache or mask."""
    return list(
        toy.row(np.array(tokens, dtype=np.float64), np.arange(len(tokens), dtype=np.float64))
    )


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
    p = softmax(scores)
    if s.top_p < 1:
        mass, kept = 0.0, set()
        for t in sorted(range(len(p)), key=lambda t: -p[t]):
            if mass < s.top_p:
                kept.add(t)
            mass += p[t]
        p = softmax([x if t in kept else -math.inf for t, x in enumerate(scores)])
    if s.min_p:
        p = [x if x >= s.min_p * max(p) else 0.0 for x in p]
    return [x / sum(p) for x in p]


def softmax(scores: Sequence[float]) -> list[float]:
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

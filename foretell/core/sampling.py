"""From a row of logits to the target's law, as a function of the path that leads to the row.

This file knows penalties, bans, temperature and filters, and the order they are applied in, which
is transformers' (its own processors are used, so the same arguments mean the same law): penalties
and bans, the user's processors, temperature, top-k, top-p, min-p, typical-p. It knows no tree and
no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as hf

from foretell.core.types import Sampling
from foretell.errors import BadConfig


class Sampler:
    """The law of one request. `prompt`: its token ids; `eos`: ids that end it."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], eos: Sequence[int], vocab: int):
        self.sampling, self.prompt, self.vocab = sampling, list(prompt), vocab
        s = sampling
        self.stops = frozenset((*(() if s.ignore_eos else eos), *s.stop_token_ids))
        for name, ids in (
            ("logit_bias", list(s.logit_bias)),
            ("stop_token_ids", list(s.stop_token_ids)),
            ("bad_words", [t for word in s.bad_words for t in word]),
        ):
            for token in ids:
                if not (isinstance(token, int) and 0 <= token < vocab):
                    raise BadConfig(
                        f"{name}: token {token!r} is not in the vocabulary (0 to {vocab - 1})"
                    )
        before = [  # need the tokens before the row
            (
                s.repetition_penalty != 1,
                hf.RepetitionPenaltyLogitsProcessor,
                float(s.repetition_penalty),
            ),
            (s.no_repeat_ngram_size, hf.NoRepeatNGramLogitsProcessor, s.no_repeat_ngram_size),
            (s.bad_words, hf.NoBadWordsLogitsProcessor, [list(w) for w in s.bad_words]),
        ]
        after = [
            (s.temperature not in (0, 1), hf.TemperatureLogitsWarper, float(s.temperature)),
            (0 < s.top_k < vocab, hf.TopKLogitsWarper, s.top_k),
            (s.top_p < 1, hf.TopPLogitsWarper, s.top_p),
            (s.min_p > 0, hf.MinPLogitsWarper, s.min_p),
            (s.typical_p < 1, hf.TypicalLogitsWarper, s.typical_p),
        ]
        self.processors: list[Any] = [make(value) for on, make, value in before if on]
        self.processors += s.logits_processors
        self.warpers: list[Any] = [make(value) for on, make, value in after if on]
        counted = s.presence_penalty or s.frequency_penalty
        self.greedy = s.temperature == 0
        self.plain = not (
            self.processors or counted or s.logit_bias or (s.min_new_tokens and self.stops)
        )

    def scores(self, row: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Processed logits (V,) after the output tokens `output`; temperature and filters not yet
        applied.
        """
        if self.plain:
            return row
        s = self.sampling
        scores = row.clone()
        if self.processors:
            ids = torch.tensor([[*self.prompt, *output]], dtype=torch.long, device=row.device)
            for processor in self.processors:
                scores = processor(ids, scores[None])[0]
            if scores.shape != row.shape:
                raise BadConfig(
                    f"a logits processor returned shape {tuple(scores.shape)} for {tuple(row.shape)}"
                )
        if (s.presence_penalty or s.frequency_penalty) and output:
            ids, counts = torch.unique(
                torch.tensor(list(output), device=row.device), return_counts=True
            )
            scores[ids] -= s.presence_penalty + s.frequency_penalty * counts.to(scores.dtype)
        for token, bias in s.logit_bias.items():
            scores[token] += bias
        if len(output) < s.min_new_tokens and self.stops:
            scores[list(self.stops)] = -torch.inf
        if not bool((scores > -torch.inf).any()):
            raise BadConfig("the sampling options leave no token possible at some position")
        return scores

    def law(self, row: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Probabilities (V,) of the token after `output`; one-hot on the first best token at
        temperature 0.
        """
        scores = self.scores(row, output)
        if self.greedy:
            return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1)
        return self.laws(scores[None])[0]

    def laws(self, scores: torch.Tensor) -> torch.Tensor:
        """Processed logits (N, V) through temperature and filters to probabilities."""
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)


class Target:
    """The rows (N, V) of one tree below `output`, processed when visited; `words(node)`: tokens
    from the root to it.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        sampler: Sampler,
        output: list[int],
        words: Callable[[int], list[int]],
    ):
        self.rows, self.sampler, self.output, self.words = rows, sampler, output, words

    def p(self, node: int) -> torch.Tensor:
        """The law (V,) of the token after `node`."""
        return self.sampler.law(self.rows[node], [*self.output, *self.words(node)])

    def best(self, node: int) -> int:
        """The greedy token after `node`, ties to the lowest id, as everywhere."""
        return int(self.sampler.scores(self.rows[node], [*self.output, *self.words(node)]).argmax())

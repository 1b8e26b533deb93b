"""From a row of logits to the target's distribution, as a function of the path that leads to the
row.

This file knows penalties, bans, temperature and filters, and the order they are applied in, which
is transformers' (its own processors are used, or ones that keep the same tokens, so the same
arguments mean the same distribution): penalties and bans, the user's processors, temperature,
top-k, top-p, min-p, typical-p. Before temperature a constraint leaves the tokens that it allows. It
knows no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import logits_process as hf

from foretell.core.constraint import form_of, guide_of
from foretell.core.filters import TopP
from foretell.core.text import Detokenizer, completes_stop
from foretell.errors import BadConfig, BadModel
from foretell.ops.logits import Ids, best_token_ids

if TYPE_CHECKING:
    from foretell.core.tree import TokenTree
    from foretell.core.types import Sampling

Text = Callable[[Sequence[int]], str]


class Sampler:
    """The distribution of one branch, and where it ends.

    `prompt`: its token ids; `eos`: ids that end it; `text(tokens)` decodes, for stop strings;
    `longest`: tokens that may follow the prompt, max_new_tokens where nothing else is said.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        eos: Sequence[int],
        vocab: int,
        text: Text | None = None,
        longest: int | None = None,
    ):
        self.sampling = s = sampling
        longest = s.max_new_tokens if longest is None else longest
        self.text = text
        self.prompt = list(prompt)
        self.vocab = vocab
        self.stops = frozenset((*(() if s.ignore_eos else eos), *s.stop_token_ids))
        self._check_ids("logit_bias", list(s.logit_bias))
        self._check_ids("stop_token_ids", s.stop_token_ids)
        word_sequences = [word for word in s.bad_words if isinstance(word, (list, tuple))]
        self._check_ids("bad_words", [token for word in word_sequences for token in word])
        history_options = [  # these need the tokens before the row
            (s.repetition_penalty != 1, hf.RepetitionPenaltyLogitsProcessor, s.repetition_penalty),
            (s.no_repeat_ngram_size, hf.NoRepeatNGramLogitsProcessor, s.no_repeat_ngram_size),
            (word_sequences, hf.NoBadWordsLogitsProcessor, [list(word) for word in word_sequences]),
        ]
        filter_options = [
            (s.temperature not in (0, 1), hf.TemperatureLogitsWarper, float(s.temperature)),
            (0 < s.top_k < vocab, hf.TopKLogitsWarper, s.top_k),
            (s.top_p < 1, TopP, s.top_p),
            (s.min_p > 0, hf.MinPLogitsWarper, s.min_p),
            (s.typical_p < 1, hf.TypicalLogitsWarper, s.typical_p),
        ]
        self.processors: list[Any] = [
            make(value) for is_enabled, make, value in history_options if is_enabled
        ]
        self.processors += s.path_processors(self.prompt, self.stops, text)
        self.warpers: list[Any] = [
            make(value) for is_enabled, make, value in filter_options if is_enabled
        ]
        self.greedy = s.temperature == 0
        self.guide = guide_of(form_of(s), s.constraint, self.stops, longest)
        # Whether the row alone decides the distribution, whatever tokens stand before it.
        self.plain = not (self.processors or self.guide)
        self._ids = Ids()

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not (isinstance(token, int) and 0 <= token < self.vocab):
                valid_range = f"the vocabulary (0 to {self.vocab - 1})"
                raise BadConfig(f"{name}: token {token!r} is not in {valid_range}")

    def is_ended(self, output: Sequence[int]) -> bool:
        """Whether the last of these output tokens ends the text."""
        s = self.sampling
        if output[-1] in self.stops or completes_stop(self.text, s.stop, output, s.min_new_tokens):
            return True
        return self.guide is not None and self.guide.complete(output)

    def reason(self, output: Sequence[int], room: int) -> str | None:
        """Why the text ends with the last of these output tokens, of which it may have `room`; None
        where it goes on. A text that has its form at its limit is not cut by it.
        """
        if self.is_ended(output):
            return "stop"
        if len(output) < room:
            return None
        return "stop" if self.guide is not None and self.guide.may_end(output) else "length"

    def detokenizer(self, decode: Text) -> Detokenizer:
        """Makes texts of outputs as a user gets them, cut before the stop string that ends them."""
        return Detokenizer(decode, self.sampling.stop, self.sampling.min_new_tokens)

    def ends(self, tree: TokenTree, node: int, output: Sequence[int]) -> bool:
        """Whether the text ends with this node of a tree below `output`.

        Nothing may be asked after it: plain decoding would not, and a grammar may have no answer.
        The same holds for a node that a constraint forbids, which no rule accepts.
        """
        if node == 0:
            return False
        if tree.tokens[node] in self.stops or not (self.sampling.stop or self.guide):
            return tree.tokens[node] in self.stops
        path_tokens = [*output, *tree.tokens_to(node)]
        return (self.guide is not None and not self.guide.permits(path_tokens)) or self.is_ended(
            path_tokens
        )

    def scores(
        self, row: torch.Tensor, output: Sequence[int], only_best: bool = False
    ) -> torch.Tensor:
        """Processed logits (V,) after the tokens `output`, before temperature and filters.
        `only_best`: nobody looks at others than the best of them, which may save work.
        """
        scores = row
        if self.processors:
            input_ids = self._ids.ids_of([*self.prompt, *output]).to(row.device)
            for processor in self.processors:
                scores = processor(input_ids, scores[None])[0]
            if scores.shape != row.shape:
                shapes = f"{tuple(scores.shape)} for {tuple(row.shape)}"
                raise BadConfig(f"logits_processors: one returned shape {shapes}; keep the shape")
        return scores if self.guide is None else self.guide.masked(scores, output, only_best)

    def law(self, row: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Probabilities (V,) of the token after `output`; one-hot on the best at temperature 0."""
        scores = self.scores(row, output, self.greedy)
        if self.greedy:
            p = torch.zeros_like(scores)
            p[self.best_token(scores, row)] = 1
            return p
        p = self.laws(scores[None])[0]
        if bool(p[0].isnan()):  # a fault anywhere makes NaN of all
            raise self.fault(scores, row)
        return p

    def laws(self, scores: torch.Tensor) -> torch.Tensor:
        """Processed logits (N, V) through temperature and filters to probabilities."""
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)

    def best_token(self, scores: torch.Tensor, row: torch.Tensor) -> int:
        """The best token, ties to the lowest id, of processed logits made from `row`."""
        (best_token,) = best_token_ids(scores[None])
        if best_token < 0:  # nothing is possible, or it is NaN
            raise self.fault(scores, row)
        return best_token

    def fault(self, scores: torch.Tensor, row: torch.Tensor) -> BadConfig | BadModel:
        """Whose fault it is that these processed logits, made from `row`, have no distribution."""
        if not bool(row.isfinite().any()) or bool(row.isnan().any()):
            return BadModel(
                "the model's logits are not numbers (NaN, or none finite): its weights are "
                "damaged, or too large for its number format; try dtype='float32'"
            )
        if bool(scores.isnan().any()):
            return BadConfig("logits_processors: one returned NaN; return -inf to forbid a token")
        if not bool((scores > -torch.inf).any()):
            return BadConfig(
                "the sampling options leave no token possible at some position; "
                "loosen bad_words, logit_bias, logits_processors or the text's form"
            )
        return BadConfig.field(
            "temperature", self.sampling.temperature, "0, or large enough for finite numbers"
        )


class Target:
    """The target's distributions at one tree's nodes, processed when a node is visited.

    `rows` (N, V); the tree hangs below `output`. `reply`: where the rows are from, for rules that
    read its hidden states.
    """

    reply: Any = None

    def __init__(
        self, rows: torch.Tensor, sampler: Sampler, output: Sequence[int], tree: TokenTree
    ):
        self.rows = rows
        self.sampler = sampler
        self.output = output
        self.tree = tree

    def path(self, node: int) -> Sequence[int]:
        """The output up to `node`, or nothing where no distribution looks at it."""
        return () if self.sampler.plain else [*self.output, *self.tree.tokens_to(node)]

    def p(self, node: int) -> torch.Tensor:
        """The distribution (V,) of the token after `node`."""
        return self.sampler.law(self.rows[node], self.path(node))

    def best_token(self, node: int) -> int:
        """The greedy token after `node`, ties to the lowest id, as everywhere."""
        row = self.rows[node]
        return self.sampler.best_token(self.sampler.scores(row, self.path(node), True), row)

    def fault(self, node: int) -> BadConfig | BadModel:
        """Whose fault it is that `node` has no distribution."""
        row = self.rows[node]
        return self.sampler.fault(self.sampler.scores(row, self.path(node)), row)

    def ends(self, node: int) -> bool:
        """Whether the text ends with this node."""
        return self.sampler.ends(self.tree, node, self.output)

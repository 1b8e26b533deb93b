"""Exact extraction: of all spans of a passage the one that is the likeliest answer.

The answer to a question about a text often stands in the text. Every span of the passage, from any
word to any other, is scored by the log-probability of its tokens after the prompt and of an end of
the text after them; the best one is the answer. Spans that begin alike share the nodes of a tree,
which grows level by level, a forward each. A span never becomes likelier by a token more, so what
is worse than the best answer so far is not continued, and the result is still the best. Greedy
decoding is followed first, for as long as it stays in the passage. `Stats.notes` has whether it did
(`greedy_is_extractive`), whether its answer is the best (`greedy_is_optimal`), and how many
`spans` there are.

Paper: Castel et al., How Optimal is Greedy Decoding for Extractive Question Answering?,
arXiv:2108.05857
Guarantee: lossy: the answer is a span of the passage, where plain decoding writes any text
Cost: target 1 a level, for each group of spans that is not ruled out
Needs: trees; a tokenizer whose tokens are pieces of the text; a token that ends a text
Trains: nothing
Differs:
- the paper's T5 writes a span between two sentinels; here it follows the prompt, and an end follows
it: the likeliest of the tokens that end a text
- spans are divided into tokens anew, each also after a space, as an answer may begin with one; the
released code takes them out of the passage's tokens
- spans have at most `longest` words and marks; that code has at most 512 tokens
- no suffix is computed whole: common beginnings are shared, and what cannot win is left out
- normalised, the sum is divided by the span's tokens and the end
- no drafter is asked: all there is to verify is known beforehand
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_policy
from foretell.core.settings import Range
from foretell.core.source import source_of
from foretell.core.spending import REASON, Spent
from foretell.core.text import Written
from foretell.core.tokenizer_bytes import words_of
from foretell.core.tree import TokenTree
from foretell.core.types import Call, Commit, Finish, Steps
from foretell.errors import BadConfig, RequestFailed, Unsupported
from foretell.rewards.base import needs_text
from foretell.speculation.strategy import Strategy
from foretell.strategies.rollouts import rows_by_target
from foretell.strategies.search.beam_search import REFUSED
from foretell.strategies.search.spans import WORD, Search, Stem, build_stem_tree, text_between


@dataclass(frozen=True)
class Extract(Strategy):
    """The passage is the whole prompt, unless something says otherwise."""

    passage: Written = ""  # the text itself, or @FILE
    start: str = ""  # what stands before it in the prompt
    stop: str = ""  # what follows it there
    longest: Annotated[int, Range(0, 1 << 20)] = 32  # words and marks of a span; 0: any number
    normalised: bool = False  # whether scores are divided by the number of tokens
    count: Annotated[int, Range(1, 1024)] = 1  # best spans that are told of, in Output.samples

    needs = ("tree",)
    draws = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passage and (self.start or self.stop):
            raise BadConfig("extract: the passage is given; leave start and stop out")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse_options("extract", ctx.request.sampling, REFUSED)
        refuse_policy("extract", ctx.request)
        needs_text("extract", ctx)
        target = ctx.models["target"]
        words = words_of(target, "extract")
        if not ctx.sampler.stops:
            cure = "leave ignore_eos out, or give stop_token_ids"
            raise Unsupported.missing_capability(
                "extract", target.name, "a token that ends a text", cure
            )
        span_room = ctx.limit - len(ctx.tokens) - 1  # the last one is the end's
        build_tree = partial(
            build_stem_tree, self.find_passage(ctx), self.longest, span_room, words.encode
        )
        return self._run_steps(ctx, build_tree)

    def find_passage(self, ctx: Context) -> str:
        """The passage. Raises BadConfig where there is none."""
        if self.passage:
            passage: str | None = self.passage
        else:
            assert ctx.request.text is not None, "refused before by `needs_text`"
            prompt = ctx.request.inputs.get("source", ctx.request.prompt)
            passage = text_between(ctx.request.text(prompt), self.start, self.stop)
        if passage is None:
            marks = f"start={self.start!r} and after it stop={self.stop!r}"
            raise BadConfig(f"extract: the prompt has no {marks}; give marks that stand in it")
        if not WORD.search(passage):
            raise BadConfig("extract: the passage has no word; say where it is by start and stop")
        return passage

    def _run_steps(self, ctx: Context, build_tree: Callable[[], tuple[Stem, int]]) -> Steps:
        root, span_count = yield Call(build_tree)
        source = source_of(ctx.request)
        state = yield from source.start(ctx)
        search = Search(ctx, rows_by_target(ctx, source, state), self.normalised, self.count)
        notes = ctx.stats.notes
        notes["spans"] = span_count
        end_reason = "stop"
        try:
            (row,) = yield from search.read_rows(TokenTree(ctx.tokens[-1]), [0])
            greedy_text = yield from search.follow_greedy(root, row)
            notes["greedy_is_extractive"] = float(greedy_text is not None)
            yield from search.run(root, row)
        except Spent:
            if not search.best_spans:
                raise
            end_reason = REASON
        else:
            notes["greedy_is_optimal"] = float(
                bool(search.best_spans) and greedy_text == search.best_spans[0].text
            )
        if not search.best_spans:
            raise RequestFailed(
                "extract: no span of the passage is a possible answer; allow for longer ones by "
                "max_new_tokens, or loosen the sampling options"
            )
        answers = [
            (list(span_found.text), span_found.score, "stop") for span_found in search.best_spans
        ]
        tokens = answers[0][0]
        yield Commit(tokens, torch.empty(0), ctx.branch, ["target"] * len(tokens))
        yield Finish(ctx.branch, end_reason, answers)

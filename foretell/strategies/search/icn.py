"""In-context navigation: what was found is shown to the model, and its next answers lie elsewhere.

After the few best first tokens of a prompt the next ones are near those in meaning or in spelling,
right or wrong. So many answers are found in runs. The first run takes the `each` best first tokens
of the prompt, and continues each greedily to an answer. For every later run the answers so far are
put into the prompt, as a list, and its ranking of first tokens is gone down for those that have not
come yet; their continuations are again those of the prompt alone. The continuations of a run share
their forwards. The result is the first answer; all are in `Output.samples`.

Paper: Peng, An, Shang, Correlation and Navigation in the Vocabulary Key Representation Space of
Language Models, arXiv:2410.02284
Guarantee: lossy: answers begin with first tokens that plain decoding would seldom take
Cost: target 1 a level of each run, and 1 a run for the list
Needs: trees; a tokenizer whose tokens are pieces of the text
Trains: nothing
Differs:
- the list is made of the prompt's last line, so any prompt can have one: each entry is that line,
an answer and the stop text after it; where it begins with 1, entries are numbered on. The paper's
prompts end with `1. "`, and its answers with a quotation mark (stop='"')
- answers end where the request's do, at most at max_new_tokens; the paper's have at most 64 tokens
- an end of the text is no first token
- its form for chains of thought, with a vote, is not there; nor are continuations of the list
- no drafter is asked: the answers of a run share their forwards already
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.refusals import refuse_options, refuse_policy, refuse_source
from foretell.core.settings import Range
from foretell.core.source import Direct
from foretell.core.spending import Spent
from foretell.core.tokenizer_bytes import Words, words_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Message, Open, Reply, Steps
from foretell.rewards.base import needs_text
from foretell.speculation.strategy import Strategy, decode_one_by_one
from foretell.strategies.log_probs import log_probs
from foretell.strategies.rollouts import (
    Path,
    begin_paths,
    continue_greedily,
    grow_paths,
    rows_by_target,
)
from foretell.strategies.search.conditions import likeliest_first

DRAWN = "answers are continued greedily, nothing is drawn"
REFUSED = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p"), DRAWN)


@dataclass(frozen=True)
class Icn(Strategy):
    """Greedy decoding with runs=1 and each=1."""

    runs: Annotated[int, Range(1, 256)] = 10
    each: Annotated[int, Range(1, 256)] = 10  # answers of a run
    navigate: bool = True  # no: first tokens are ranked by the prompt alone

    needs = ("tree",)
    draws = False

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse_options("icn", ctx.request.sampling, REFUSED)
        if self.runs == self.each == 1:
            return decode_one_by_one(ctx)
        refuse_source("icn", ctx.request)
        refuse_policy("icn", ctx.request)
        needs_text("icn", ctx)
        return self._run_steps(ctx, Listing(ctx, words_of(ctx.models["target"], "icn")))

    def _run_steps(self, ctx: Context, listing: Listing) -> Steps:
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch, rows=[0])
        row = reply.logits[0]
        paths_found: list[Path] = []
        try:
            yield from self.collect_answers(ctx, listing, row, paths_found)
        except Spent:
            if not paths_found:
                raise
        if not paths_found:  # an end is all there is
            yield from decode_one_by_one(ctx)
            return
        answers = [
            (path.tokens, path.mean, "stop" if path.ended else "length") for path in paths_found
        ]
        rows = torch.stack([row, *paths_found[0].rows])
        yield Commit(
            paths_found[0].tokens, rows, ctx.branch, ["target"] * len(paths_found[0].tokens)
        )
        yield Finish(ctx.branch, answers[0][2], answers)

    def collect_answers(
        self, ctx: Context, listing: Listing, row: torch.Tensor, paths_found: list[Path]
    ) -> Generator[Message, Any, None]:
        """Adds the answers of every run; `row` (V,) is the prompt's."""
        used_texts: set[str] = set()
        ranking = row
        for run_index in range(self.runs):
            if run_index and self.navigate:
                prompt = listing.prompt(paths_found)
                if len(prompt) >= ctx.models["target"].context:
                    return
                ranking = yield from read_prompt_row(prompt)
            first_tokens = self.pick_first_tokens(ctx, ranking, row, used_texts)
            if not first_tokens:
                return
            tree = TokenTree(ctx.tokens[-1])
            paths = begin_paths(ctx, tree, first_tokens)
            rows_of = rows_by_target(ctx, Direct(), None)
            yield from grow_paths(ctx, tree, paths, ctx.limit, continue_greedily(ctx), rows_of)
            paths_found += paths
            ctx.stats.notes["runs"] = run_index + 1

    def pick_first_tokens(
        self, ctx: Context, ranking: torch.Tensor, row: torch.Tensor, used_texts: set[str]
    ) -> list[tuple[int, float]]:
        """The best tokens of a ranking (V,) whose text is new, with their log-probabilities by the
        prompt's row (V,). What they are written as is added to `used_texts`.
        """
        decode = ctx.request.text
        assert decode is not None, "refused before by `needs_text`"
        prompt_log_probs = log_probs(ctx, row, ())
        tokens_found: list[tuple[int, float]] = []
        for _, token in likeliest_first(log_probs(ctx, ranking, ())):
            if len(tokens_found) == self.each:
                break
            token_text = decode([token])
            if (
                token not in ctx.sampler.stops
                and token_text not in used_texts
                and prompt_log_probs[token] > -torch.inf
            ):
                used_texts.add(token_text)
                tokens_found.append((token, float(prompt_log_probs[token])))
        return tokens_found


class Listing:
    """Prompts that list answers."""

    def __init__(self, ctx: Context, words: Words):
        assert ctx.request.text is not None, "refused before by `needs_text`"
        self.decode, self.words = ctx.request.text, words
        self.sampler, self.stop = ctx.sampler, tuple(ctx.sampler.sampling.stop)
        tokens = list(ctx.request.prompt)
        self.last_line = self.decode(tokens).rpartition("\n")[2]
        line_length = 0  # tokens that hold the last line
        while not self.decode(tokens[len(tokens) - line_length :]).endswith(self.last_line):
            line_length += 1
        self.head = tokens[: len(tokens) - line_length]
        tail_text = self.decode(tokens[len(tokens) - line_length :])
        self.line_prefix = tail_text[
            : len(tail_text) - len(self.last_line)
        ]  # what else stands in these tokens

    def prompt(self, paths_found: Sequence[Path]) -> list[int]:
        """The prompt with these answers and the beginning of one more."""
        text = self.line_prefix
        for entry_number, path in enumerate(paths_found, 1):
            answer, closing_text = self.split_answer(path.tokens)
            text += f"{self.entry_opening(entry_number)}{answer}{closing_text}" + "\n" * (
                not closing_text.endswith("\n")
            )
        return [
            *self.head,
            *self.words.encode((text + self.entry_opening(len(paths_found) + 1)).encode()),
        ]

    def entry_opening(self, number: int) -> str:
        """The last line, with another number if it has one."""
        return re.sub(r"^(\s*)1(?=\D)", rf"\g<1>{number}", self.last_line)

    def split_answer(self, tokens: Sequence[int]) -> tuple[str, str]:
        """An answer's text, and the stop text that closes it or may."""
        own_tokens = [token for token in tokens if token not in self.sampler.stops]
        answer = self.sampler.detokenizer(self.decode).push(own_tokens, final=True)
        following_text = self.decode(own_tokens)[len(answer) :]
        closing_text = next((stop for stop in self.stop if following_text.startswith(stop)), None)
        return answer, closing_text if closing_text is not None else "".join(self.stop[:1])


def read_prompt_row(prompt: Sequence[int]) -> Generator[Message, Any, torch.Tensor]:
    """Reads the row (V,) after another prompt."""
    branch: int = yield Open(prompt)
    reply: Reply = yield Ask(TokenTree(prompt[-1]), branch=branch, rows=[0])
    yield Drop(branch)
    return reply.logits[0]

"""Conditions that texts are to meet, and the likeliest text that meets one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.spending import Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply
from foretell.errors import BadConfig
from foretell.strategies.log_probs import log_probs

if TYPE_CHECKING:
    from foretell.core.context import Context

NODES = 1024  # of one tree of the search
BLOCK = 256  # tokens of a row that are read at once
Text = tuple[int, ...]
ReasonOf = Callable[[Text], str | None]  # why a text ends; None: it goes on


@dataclass(frozen=True)
class Condition:
    """Demands on a text: `least` tokens before its end, and more than spaces; no n-gram of `grams`
    tokens twice; `pattern`, a regular expression, matches the whole. 0 and "": not asked for.
    """

    least: int = 0
    grams: int = 0
    pattern: str = ""

    def __bool__(self) -> bool:
        return bool(self.least or self.grams or self.pattern)

    def check(self, method: str) -> None:
        """Raises BadConfig for a field out of its range."""
        for field_name in ("least", "grams"):
            if not 0 <= getattr(self, field_name) <= 1 << 20:
                raise BadConfig.field(
                    f"{method}:{field_name}", getattr(self, field_name), "between 0 and 2^20"
                )
        try:
            re.compile(self.pattern)
        except re.error as error:
            allowed_pattern = f"a regular expression ({error})"
            raise BadConfig.field(f"{method}:pattern", self.pattern, allowed_pattern) from None

    def stays_open(self, text: Text) -> bool:
        """Whether a text may still meet it; what stood before the last token is known to."""
        gram_size = self.grams
        if not gram_size or len(text) <= gram_size:
            return True
        newest_gram = text[-gram_size:]
        return all(
            text[start : start + gram_size] != newest_gram for start in range(len(text) - gram_size)
        )

    def is_met(
        self,
        text: Text,
        end_tokens: Collection[int],
        write_text: Callable[[Sequence[int]], str] | None,
    ) -> bool:
        """Whether a text meets it that has ended; all but its last token are known to leave it
        open. `end_tokens`: tokens that end it; `write_text`: its characters, without which tokens
        decide.
        """
        own_tokens = text[:-1] if text[-1] in end_tokens else text
        if len(own_tokens) < self.least or not self.stays_open(own_tokens):
            return False
        if write_text is None or not (self.least or self.pattern):
            return True
        written_text = write_text(own_tokens)
        if self.least and not written_text.strip():
            return False
        return not self.pattern or re.fullmatch(self.pattern, written_text, re.DOTALL) is not None

    def label(
        self, text: Text, end_tokens: Collection[int], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        """Whether any text meets it."""
        all_open = all(
            self.stays_open(text[:prefix_length]) for prefix_length in range(1, len(text))
        )
        return all_open and self.is_met(text, end_tokens, decode)


def meets_condition(ctx: Context, condition: Condition, text: Text) -> bool:
    """Whether an output that has ended meets a condition; its beginnings left it open."""
    sampler, decode = ctx.sampler, ctx.request.text
    if decode is None:
        return condition.is_met(text, sampler.stops, None)
    write_text = partial(sampler.detokenizer(decode).push, final=True)
    return condition.is_met(text, sampler.stops, write_text)


def make_reason_finder(ctx: Context) -> ReasonOf:
    """Why an output ends, as plain decoding would end it."""
    remaining_tokens = ctx.limit - len(ctx.tokens)

    def reason(text: Text) -> str | None:
        return ctx.sampler.reason(text, remaining_tokens)

    return reason


@dataclass
class Frame:
    """A text on the way of a depth-first search: its node, its log-probability, what follows."""

    node: int
    total: float
    rest: Iterator[tuple[float, int]] = field(repr=False)


def find_mode(
    ctx: Context, condition: Condition
) -> Generator[Message, Any, tuple[Text, float, str] | None]:
    """The likeliest text that meets a condition, with its log-probability and why it ended; None:
    there is none.

    Depth first, the likeliest token first. A text never becomes likelier by a token more, so what
    is worse than the best text so far is left out. Where the budget is spent it is that text, if
    there is one. Source: Stahlberg and Byrne, arXiv:1908.10090.
    """
    reason_for = make_reason_finder(ctx)
    best_text: tuple[Text, float, str] | None = None
    tree = TokenTree(ctx.tokens[-1])
    reply: Reply = yield Ask(tree, branch=ctx.branch, rows=[0])
    path_tokens: Text = ()
    frames = [Frame(0, 0.0, likeliest_first(log_probs(ctx, reply.logits[0], path_tokens)))]
    while frames:
        frame = frames[-1]
        log_prob, token = next(frame.rest, (-math.inf, -1))
        total_log_prob = frame.total + log_prob
        if total_log_prob <= (-math.inf if best_text is None else best_text[1]):
            frames.pop()
            path_tokens = path_tokens[:-1]
            continue
        text = (*path_tokens, token)
        end_reason = reason_for(text)
        if end_reason is not None:
            if meets_condition(ctx, condition, text):
                best_text = text, total_log_prob, end_reason
            continue
        if not condition.stays_open(text):
            continue
        if len(tree) >= NODES:  # what the search has left behind goes
            tree = TokenTree(ctx.tokens[-1]).chain(path_tokens)
            for depth, ancestor in enumerate(frames):
                ancestor.node = depth
        node = tree.add(frame.node, token)
        try:
            reply = yield Ask(tree, branch=ctx.branch, rows=[node])
        except Spent:
            if best_text is None:
                raise
            return best_text
        path_tokens = text
        frames.append(
            Frame(
                node, total_log_prob, likeliest_first(log_probs(ctx, reply.logits[0], path_tokens))
            )
        )
    return best_text


def likeliest_first(log_probs: torch.Tensor) -> Iterator[tuple[float, int]]:
    """The possible tokens of log-probabilities (V,), (value, token), of equal ones the lower id
    first.
    """
    sorted_log_probs, tokens = log_probs.sort(descending=True, stable=True)
    for block_start in range(0, len(sorted_log_probs), BLOCK):
        block_values: Sequence[float] = sorted_log_probs[block_start : block_start + BLOCK].tolist()
        for log_prob, token in zip(
            block_values, tokens[block_start : block_start + BLOCK].tolist(), strict=True
        ):
            if log_prob == -math.inf:
                return
            yield log_prob, token

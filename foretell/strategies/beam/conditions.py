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
    """Of a text: `least` tokens before its end at least, and more than spaces; no n-gram of `grams`
    tokens twice; `pattern`, a regular expression, matches the whole. 0 and "": not asked for.
    """

    least: int = 0
    grams: int = 0
    pattern: str = ""

    def __bool__(self) -> bool:
        return bool(self.least or self.grams or self.pattern)

    def check(self, method: str) -> None:
        """Raises BadConfig for a field out of its range."""
        for name in ("least", "grams"):
            if not 0 <= getattr(self, name) <= 1 << 20:
                raise BadConfig.field(f"{method}:{name}", getattr(self, name), "between 0 and 2^20")
        try:
            re.compile(self.pattern)
        except re.error as error:
            allowed = f"a regular expression ({error})"
            raise BadConfig.field(f"{method}:pattern", self.pattern, allowed) from None

    def open(self, text: Text) -> bool:
        """Whether a text may still meet it; what stood before the last token is known to."""
        n = self.grams
        if not n or len(text) <= n:
            return True
        newest = text[-n:]
        return all(text[start : start + n] != newest for start in range(len(text) - n))

    def met(
        self,
        text: Text,
        ends: Collection[int],
        write: Callable[[Sequence[int]], str] | None,
    ) -> bool:
        """Whether a text meets it that has ended; all but its last token are known to leave it
        open. `ends`: tokens that end it; `write`: its characters, without which tokens decide.
        """
        own = text[:-1] if text[-1] in ends else text
        if len(own) < self.least or not self.open(own):
            return False
        if write is None or not (self.least or self.pattern):
            return True
        written = write(own)
        if self.least and not written.strip():
            return False
        return not self.pattern or re.fullmatch(self.pattern, written, re.DOTALL) is not None

    def label(
        self, text: Text, ends: Collection[int], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        """Whether any text meets it."""
        begun = all(self.open(text[:size]) for size in range(1, len(text)))
        return begun and self.met(text, ends, decode)


def met(ctx: Context, condition: Condition, text: Text) -> bool:
    """Whether an output that has ended meets a condition; its beginnings left it open."""
    sampler, decode = ctx.sampler, ctx.request.text
    if decode is None:
        return condition.met(text, sampler.stops, None)
    write = partial(sampler.detokenizer(decode).push, final=True)
    return condition.met(text, sampler.stops, write)


def reason_of(ctx: Context) -> ReasonOf:
    """Why an output ends, as plain decoding would end it."""
    room = ctx.limit - len(ctx.tokens)

    def reason(text: Text) -> str | None:
        return ctx.sampler.reason(text, room)

    return reason


@dataclass
class Frame:
    """A text on the way of a depth-first search: its node, its log-probability, what follows."""

    node: int
    total: float
    rest: Iterator[tuple[float, int]] = field(repr=False)


def mode(
    ctx: Context, condition: Condition
) -> Generator[Message, Any, tuple[Text, float, str] | None]:
    """The likeliest text that meets a condition, with its log-probability and why it ended; None:
    there is none.

    Depth first, the likeliest token first. A text never becomes likelier by a token more, so what
    is behind the best text so far is left out. Where the budget is spent it is the best so far, if
    there is one. Source: Stahlberg and Byrne, arXiv:1908.10090.
    """
    why = reason_of(ctx)
    best: tuple[Text, float, str] | None = None
    tree = TokenTree(ctx.tokens[-1])
    reply: Reply = yield Ask(tree, branch=ctx.branch, rows=[0])
    path: Text = ()
    frames = [Frame(0, 0.0, likeliest_first(log_probs(ctx, reply.logits[0], path)))]
    while frames:
        frame = frames[-1]
        value, token = next(frame.rest, (-math.inf, -1))
        total = frame.total + value
        if total <= (-math.inf if best is None else best[1]):
            frames.pop()
            path = path[:-1]
            continue
        text = (*path, token)
        reason = why(text)
        if reason is not None:
            if met(ctx, condition, text):
                best = text, total, reason
            continue
        if not condition.open(text):
            continue
        if len(tree) >= NODES:  # what is behind the search is let go
            tree = TokenTree(ctx.tokens[-1]).chain(path)
            for depth, before in enumerate(frames):
                before.node = depth
        node = tree.add(frame.node, token)
        try:
            reply = yield Ask(tree, branch=ctx.branch, rows=[node])
        except Spent:
            if best is None:
                raise
            return best
        path = text
        frames.append(Frame(node, total, likeliest_first(log_probs(ctx, reply.logits[0], path))))
    return best


def likeliest_first(logs: torch.Tensor) -> Iterator[tuple[float, int]]:
    """The possible tokens of log-probabilities (V,), (value, token), of equal ones the lower id
    first.
    """
    values, tokens = logs.sort(descending=True, stable=True)
    for start in range(0, len(values), BLOCK):
        block: Sequence[float] = values[start : start + BLOCK].tolist()
        for value, token in zip(block, tokens[start : start + BLOCK].tolist(), strict=True):
            if value == -math.inf:
                return
            yield value, token

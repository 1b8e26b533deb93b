"""Paths behind a row: some first tokens, each continued, side by side on one branch.

The paths are one tree, so what they share is computed once, and the rows of the one that is taken
stay in the cache. Each level is one forward, of the newest nodes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.source import source_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Message, Reply
from foretell.ops.logits import resized
from foretell.strategies.log_probs import log_probs

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.request import RowSource


@dataclass
class Path:
    """A candidate with what follows it."""

    tokens: list[int]
    total: float  # log-probability
    node: int  # of the newest token in the tree
    number: int = 0  # among those that begin at one place
    rows: list[torch.Tensor] = field(default_factory=list)  # (V,) after each token but the last
    ended: bool = False

    @property
    def mean(self) -> float:
        return self.total / len(self.tokens)


# The row (V,) behind a path -> its next token, and the log-probability that it counts with. May
# also end the path with it.
Next = Callable[[Path, torch.Tensor], tuple[int, float]]
Rows = Generator[Message, Any, Reply]
# What is added to the log-probabilities of the paths' first tokens.
Value = Callable[[Sequence[Path]], Generator[Message, Any, list[float]]]


def begun(ctx: Context, tree: TokenTree, firsts: Sequence[tuple[int, float]]) -> list[Path]:
    """A path for each first token, which has this log-probability."""
    paths = []
    for number, (token, value) in enumerate(firsts):
        node = tree.add(0, token)
        paths.append(Path([token], value, node, number, ended=ctx.ends(tree, node)))
    return paths


def likeliest(ctx: Context, row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The best tokens of a row (V,) behind the text, those that are possible."""
    logs = log_probs(ctx, row, ctx.output)
    values, tokens = logs.topk(min(count, len(logs)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -math.inf]


def greedily(ctx: Context) -> Next:
    """The best token of each row."""

    def best(path: Path, row: torch.Tensor) -> tuple[int, float]:
        logs = log_probs(ctx, row, [*ctx.output, *path.tokens])
        token = int(logs.argmax())
        return token, float(logs[token])

    return best


def grow(
    ctx: Context,
    tree: TokenTree,
    paths: Sequence[Path],
    levels: int,
    following: Next,
    rows_of: Callable[[TokenTree, Sequence[int]], Rows],
) -> Generator[Message, Any, None]:
    """Lengthens paths that have not ended, by at most `levels` tokens and as far as there is room.

    `rows_of`: the rows of these nodes, ascending, and maybe of more.
    """
    for _ in range(min(levels, ctx.depth)):
        growing = [path for path in paths if not path.ended]
        if not growing:
            return
        nodes = sorted({path.node for path in growing})
        reply = yield from rows_of(tree, nodes)
        rows = dict(zip(reply.nodes, reply.logits, strict=True))
        for path in growing:
            row = rows[path.node]
            path.rows.append(row)
            token, value = following(path, row)
            path.tokens.append(token)
            path.total += value
            path.node = tree.add(path.node, token)
            path.ended |= ctx.ends(tree, path.node)


def one_by_one(
    ctx: Context, width: int, ahead: int, value: Value, model: str = "target"
) -> Generator[Message, Any, None]:
    """Writes the text: of the `width` best tokens the one of the best log-probability and value.

    Each is first continued greedily by `ahead` tokens of `model`'s; what is looked ahead at is not
    committed. Above temperature 0 the token is drawn from these sums, divided by it.
    """
    source = source_of(ctx.request)
    state = yield from source.start(ctx)
    own = by_target(ctx, source, state)
    rows_of = own if model == "target" else by_model(ctx, model)
    row: torch.Tensor | None = None
    while True:
        tree = TokenTree(ctx.tokens[-1])
        if row is None:
            reply = yield from own(tree, [0])
            row = reply.logits[0]
        firsts = likeliest(ctx, row, width)
        paths = begun(ctx, tree, firsts)
        if len(paths) > 1:
            yield from grow(ctx, tree, paths, ahead, greedily(ctx), rows_of)
            values = yield from value(paths)
        else:
            values = [0.0] * len(paths)
        scores = torch.tensor(
            [first + added for (_, first), added in zip(firsts, values, strict=True)],
            dtype=torch.float64,
        )
        path = paths[decided(ctx, scores)]
        kept: Kept = yield Commit(path.tokens[:1], row[None], ctx.branch, ["target"])
        if kept.reason:
            return
        row = path.rows[0] if path.rows and model == "target" else None


def decided(ctx: Context, scores: torch.Tensor) -> int:
    """The place of the best of scores (n,), or one drawn; where all are -inf, the first."""
    temperature = ctx.request.sampling.temperature
    if not temperature or not bool(scores.max() > -math.inf):
        return int(scores.argmax())
    return ctx.rng.sample((scores / temperature).softmax(0), "target", len(ctx.output))


def by_target(
    ctx: Context, source: RowSource, state: Any
) -> Callable[[TokenTree, Sequence[int]], Rows]:
    """Rows of the request's source."""
    return lambda tree, nodes: source.read(ctx, state, tree, (), nodes)


def by_model(ctx: Context, name: str) -> Callable[[TokenTree, Sequence[int]], Rows]:
    """Rows of another model that reads the branch, of the target's tokens."""
    vocab = ctx.models["target"].vocab

    def ask(tree: TokenTree, nodes: Sequence[int]) -> Rows:
        reply: Reply = yield Ask(tree, name, ctx.branch, rows=nodes)
        rows = [resized(row, vocab) for row in reply.logits]
        return replace(reply, logits=torch.stack(rows))

    return ask

"""Paths after a row: some first tokens, each continued, side by side on one branch.

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
from foretell.ops.logits import resize_row
from foretell.strategies.log_probs import log_probs

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.request import RowSource


@dataclass
class Path:
    """A candidate token with the tokens that follow it."""

    tokens: list[int]
    total: float  # log-probability
    node: int  # of the newest token in the tree
    number: int = 0  # among those that begin at one place
    rows: list[torch.Tensor] = field(default_factory=list)  # (V,) after each token but the last
    ended: bool = False

    @property
    def mean(self) -> float:
        return self.total / len(self.tokens)


# The row (V,) after a path -> its next token, and the log-probability that it counts with. May
# also end the path with it.
NextToken = Callable[[Path, torch.Tensor], tuple[int, float]]
RowsReply = Generator[Message, Any, Reply]
# What is added to the log-probabilities of the paths' first tokens.
PathValues = Callable[[Sequence[Path]], Generator[Message, Any, list[float]]]


def begin_paths(
    ctx: Context, tree: TokenTree, first_tokens: Sequence[tuple[int, float]]
) -> list[Path]:
    """A path for each first token, which has this log-probability."""
    paths = []
    for path_number, (token, log_prob) in enumerate(first_tokens):
        node = tree.add(0, token)
        paths.append(Path([token], log_prob, node, path_number, ended=ctx.ends(tree, node)))
    return paths


def likeliest_tokens(ctx: Context, row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The best tokens of a row (V,) after the text, those that are possible."""
    logs = log_probs(ctx, row, ctx.output)
    best_log_probs, tokens = logs.topk(min(count, len(logs)))
    pairs = zip(tokens.tolist(), best_log_probs.tolist(), strict=True)
    return [(token, log_prob) for token, log_prob in pairs if log_prob > -math.inf]


def continue_greedily(ctx: Context) -> NextToken:
    """The best token of each row."""

    def choose_best(path: Path, row: torch.Tensor) -> tuple[int, float]:
        logs = log_probs(ctx, row, [*ctx.output, *path.tokens])
        token = int(logs.argmax())
        return token, float(logs[token])

    return choose_best


def grow_paths(
    ctx: Context,
    tree: TokenTree,
    paths: Sequence[Path],
    max_levels: int,
    choose_next: NextToken,
    rows_of: Callable[[TokenTree, Sequence[int]], RowsReply],
) -> Generator[Message, Any, None]:
    """Lengthens paths that have not ended, by at most `max_levels` tokens and as far as there is
    room.

    `rows_of`: the rows of these nodes, ascending, and maybe of more.
    """
    for _ in range(min(max_levels, ctx.depth)):
        growing_paths = [path for path in paths if not path.ended]
        if not growing_paths:
            return
        nodes = sorted({path.node for path in growing_paths})
        reply = yield from rows_of(tree, nodes)
        rows = dict(zip(reply.nodes, reply.logits, strict=True))
        for path in growing_paths:
            row = rows[path.node]
            path.rows.append(row)
            token, log_prob = choose_next(path, row)
            path.tokens.append(token)
            path.total += log_prob
            path.node = tree.add(path.node, token)
            path.ended |= ctx.ends(tree, path.node)


def write_by_value(
    ctx: Context, width: int, lookahead_tokens: int, value_paths: PathValues, model: str = "target"
) -> Generator[Message, Any, None]:
    """Writes the text: of the `width` best tokens the one of the best log-probability and value.

    Each is first continued greedily by `lookahead_tokens` tokens of `model`'s; what is looked ahead
    at is not committed. Above temperature 0 the token is drawn from these sums, divided by it.
    """
    source = source_of(ctx.request)
    state = yield from source.start(ctx)
    target_rows = rows_by_target(ctx, source, state)
    rows_of = target_rows if model == "target" else rows_by_model(ctx, model)
    row: torch.Tensor | None = None
    while True:
        tree = TokenTree(ctx.tokens[-1])
        if row is None:
            reply = yield from target_rows(tree, [0])
            row = reply.logits[0]
        first_tokens = likeliest_tokens(ctx, row, width)
        paths = begin_paths(ctx, tree, first_tokens)
        if len(paths) > 1:
            yield from grow_paths(
                ctx, tree, paths, lookahead_tokens, continue_greedily(ctx), rows_of
            )
            path_values = yield from value_paths(paths)
        else:
            path_values = [0.0] * len(paths)
        scores = torch.tensor(
            [
                first_log_prob + added_value
                for (_, first_log_prob), added_value in zip(first_tokens, path_values, strict=True)
            ],
            dtype=torch.float64,
        )
        path = paths[choose_path(ctx, scores)]
        commit_result: Kept = yield Commit(path.tokens[:1], row[None], ctx.branch, ["target"])
        if commit_result.reason:
            return
        row = path.rows[0] if path.rows and model == "target" else None


def choose_path(ctx: Context, scores: torch.Tensor) -> int:
    """The place of the best of scores (n,), or one drawn; where all are -inf, the first."""
    temperature = ctx.request.sampling.temperature
    if not temperature or not bool(scores.max() > -math.inf):
        return int(scores.argmax())
    return ctx.rng.sample((scores / temperature).softmax(0), "target", len(ctx.output))


def rows_by_target(
    ctx: Context, source: RowSource, state: Any
) -> Callable[[TokenTree, Sequence[int]], RowsReply]:
    """Returns a function that reads rows of the request's source."""
    return lambda tree, nodes: source.read_rows(ctx, state, tree, (), nodes)


def rows_by_model(ctx: Context, name: str) -> Callable[[TokenTree, Sequence[int]], RowsReply]:
    """Returns a function that reads rows of another model, on the branch and the target's
    tokens.
    """
    vocab_size = ctx.models["target"].vocab

    def ask(tree: TokenTree, nodes: Sequence[int]) -> RowsReply:
        reply: Reply = yield Ask(tree, name, ctx.branch, rows=nodes)
        rows = [resize_row(row, vocab_size) for row in reply.logits]
        return replace(reply, logits=torch.stack(rows))

    return ask

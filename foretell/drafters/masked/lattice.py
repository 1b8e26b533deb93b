"""A lattice: for each of several positions the tokens that may stand there, and a path through it.

Its probabilities are those of a model that says of each position apart from the others what stands
there. The search sets against them what a distribution from left to right says of the tokens in
this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

# tokens and the logarithms of their probabilities, the likeliest first
Column = list[tuple[int, float]]
Path = tuple[tuple[int, float], ...]  # of each column one
Causal = Callable[[Sequence[int], int], float]  # (tokens of a path, the next) -> its probability


def best_path(rows: torch.Tensor, end_tokens: Collection[int]) -> Path:
    """The best token of each row of logits (n, V), up to the first that ends the text."""
    path: list[tuple[int, float]] = []
    best_tokens = rows.log_softmax(-1).max(-1)
    for token, log_probability in zip(
        best_tokens.indices.tolist(), best_tokens.values.tolist(), strict=True
    ):
        path.append((token, log_probability))
        if token in end_tokens:
            break
    return tuple(path)


def build_lattice(
    rows: torch.Tensor, end_tokens: Collection[int], min_mass: float, max_tokens: int
) -> list[Column]:
    """Returns for each row of logits (n, V) the fewest tokens whose probabilities reach `min_mass`,
    at most `max_tokens`, and beside these all that end the text.

    After a position whose best token ends the text there are none.
    """
    log_probs = rows.log_softmax(-1)
    top_tokens = log_probs.topk(min(max_tokens, log_probs.shape[-1]), -1)
    columns = []
    for row_log_probs, token_logs, tokens in zip(
        log_probs, top_tokens.values.tolist(), top_tokens.indices.tolist(), strict=True
    ):
        column: Column = []
        reached_mass = 0.0
        for token, log_probability in zip(tokens, token_logs, strict=True):
            if reached_mass >= min_mass or log_probability == -math.inf:
                break
            column.append((token, log_probability))
            reached_mass += math.exp(log_probability)
        column_tokens = {token for token, _ in column}
        end_pairs = [
            (token, float(row_log_probs[token])) for token in sorted({*end_tokens} - column_tokens)
        ]
        columns.append(
            column
            + [
                (token, log_probability)
                for token, log_probability in end_pairs
                if log_probability > -math.inf
            ]
        )
        if tokens[0] in end_tokens:
            break
    return columns


def search_path(
    columns: Sequence[Column],
    end_tokens: Collection[int],
    beam_width: int,
    model_weight: float,
    causal: Causal,
) -> Path:
    """The path of the highest score that a beam finds: the sum over its tokens of `model_weight` ln
    p, of the model's probability, and 1 - `model_weight` ln q, of the causal one.

    A path that ends the text is complete, and stays among the others with the score it has. Of
    equal scores the lower token ids come first.
    """
    beam_paths: list[tuple[float, Path]] = [(0.0, ())]
    for column in columns:
        longer_paths = []
        for score, path in beam_paths:
            if path and path[-1][0] in end_tokens:
                longer_paths.append((score, path))
                continue
            path_tokens = [token for token, _ in path]
            for token, log_probability in column:
                token_score = model_weight * log_probability
                if model_weight < 1:
                    token_score += (1 - model_weight) * math.log(causal(path_tokens, token))
                longer_paths.append((score + token_score, (*path, (token, log_probability))))
        longer_paths.sort(key=lambda beam_entry: (-beam_entry[0], beam_entry[1]))
        beam_paths = longer_paths[:beam_width]
        if all(path[-1][0] in end_tokens for _, path in beam_paths):
            break
    return beam_paths[0][1]

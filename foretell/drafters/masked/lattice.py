"""A lattice: for each of several positions the tokens that may stand there, and a path through it.

Its chances are those of a model that says of each position apart from the others what stands there.
The search sets against them what a law from left to right says of the tokens in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

Column = list[tuple[int, float]]  # tokens and the logarithms of their chances, the likeliest first
Path = tuple[tuple[int, float], ...]  # of each column one
Causal = Callable[[Sequence[int], int], float]  # (tokens of a path, the next) -> its chance


def best_path(rows: torch.Tensor, ends: Collection[int]) -> Path:
    """The best token of each row of logits (n, V), up to the first that ends the text."""
    path: list[tuple[int, float]] = []
    best = rows.log_softmax(-1).max(-1)
    for token, log in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        path.append((token, log))
        if token in ends:
            break
    return tuple(path)


def lattice(rows: torch.Tensor, ends: Collection[int], mass: float, most: int) -> list[Column]:
    """Of each row of logits (n, V) the fewest tokens whose chances reach `mass`, `most` of them at
    most, and all that end the text beside these.

    Behind a position whose best token ends the text there are none.
    """
    laws = rows.log_softmax(-1)
    best = laws.topk(min(most, laws.shape[-1]), -1)
    columns = []
    for law, logs, tokens in zip(laws, best.values.tolist(), best.indices.tolist(), strict=True):
        column: Column = []
        reached = 0.0
        for token, log in zip(tokens, logs, strict=True):
            if reached >= mass or log == -math.inf:
                break
            column.append((token, log))
            reached += math.exp(log)
        held = {token for token, _ in column}
        others = [(token, float(law[token])) for token in sorted({*ends} - held)]
        columns.append(column + [(token, log) for token, log in others if log > -math.inf])
        if tokens[0] in ends:
            break
    return columns


def search(
    columns: Sequence[Column], ends: Collection[int], beam: int, weight: float, causal: Causal
) -> Path:
    """The path of the highest score that a beam finds: the sum over its tokens of `weight` ln p,
    of the model's chance, and 1 - `weight` ln q, of the causal one.

    A path that ends the text is complete, and stays among the others with the score it has. Of
    equal scores the lower token ids come first.
    """
    beams: list[tuple[float, Path]] = [(0.0, ())]
    for column in columns:
        longer = []
        for score, path in beams:
            if path and path[-1][0] in ends:
                longer.append((score, path))
                continue
            before = [token for token, _ in path]
            for token, log in column:
                gained = weight * log
                if weight < 1:
                    gained += (1 - weight) * math.log(causal(before, token))
                longer.append((score + gained, (*path, (token, log))))
        longer.sort(key=lambda one: (-one[0], one[1]))
        beams = longer[:beam]
        if all(path[-1][0] in ends for _, path in beams):
            break
    return beams[0][1]

"""Laws for the lab's tests, and what drafts do by going through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import torch

Drafts = Iterator[tuple[tuple[int, ...], float]]  # drafted tokens in order, and their probability


def law(seed: int, vocab: int, sharpness: float = 2.0, zeros: int = 0) -> torch.Tensor:
    """A random law (V,), with some tokens impossible."""
    draw = torch.Generator().manual_seed(seed)
    p = (sharpness * torch.randn(vocab, dtype=torch.float64, generator=draw)).softmax(-1)
    p[torch.randperm(vocab, generator=draw)[:zeros]] = 0
    return p / p.sum()


def independent(q: torch.Tensor, k: int) -> Drafts:
    for tokens in product(range(len(q)), repeat=k):
        yield tokens, float(q[list(tokens)].prod())


def unreplaced(q: torch.Tensor, k: int) -> Drafts:
    """Where fewer tokens are possible than k, all of them."""

    def further(tokens: tuple[int, ...], chance: float) -> Drafts:
        rest = q.clone()
        rest[list(tokens)] = 0
        if len(tokens) == k or not bool(rest.any()):
            yield tokens, chance
            return
        for token in rest.nonzero()[:, 0].tolist():
            yield from further((*tokens, token), chance * float(rest[token] / rest.sum()))

    return further((), 1.0)


def one_drawn(q: torch.Tensor, k: int) -> Drafts:
    order = q.argsort(descending=True, stable=True)[: k - 1].tolist()
    best = tuple(token for token in order if q[token] > 0)
    rest = q.clone()
    rest[list(best)] = 0
    if not bool(rest.any()):
        yield best, 1.0
        return
    for token in rest.nonzero()[:, 0].tolist():
        yield (token, *best), float(rest[token] / rest.sum())


def subsets(vocab: int) -> Iterator[set[int]]:
    for size in range(vocab + 1):
        yield from map(set, combinations(range(vocab), size))


def optimum(p: torch.Tensor, drafts: Drafts) -> float:
    """By the dual over all sets of tokens."""
    every = list(drafts)
    least = 0.0
    for inside in subsets(len(p)):
        drafted = sum(chance for tokens, chance in every if set(tokens) <= inside)
        least = min(least, float(p[list(inside)].sum()) - drafted)
    return 1 + least


def transported(p: torch.Tensor, drafts: Drafts) -> float:
    """The optimum itself: the most that flows from drafts to tokens that they hold, by the longest
    augmenting paths that there are.
    """
    chances: dict[frozenset[int], float] = {}
    for tokens, chance in drafts:
        chances[frozenset(tokens)] = chances.get(frozenset(tokens), 0.0) + chance
    left = dict(chances)
    room = dict(enumerate(p.tolist()))
    flow: dict[tuple[frozenset[int], int], float] = {}
    total = 0.0
    while True:
        before: dict[object, object] = {draft: None for draft, rest in left.items() if rest > 1e-15}
        queue: list[object] = list(before)
        end = None
        while queue and end is None:
            at = queue.pop(0)
            if isinstance(at, frozenset):
                following: list[object] = [t for t in at if t not in before]
            else:
                following = [d for d in left if d not in before and flow.get((d, at), 0.0) > 1e-15]
            for one in following:
                before[one] = at
                queue.append(one)
                if isinstance(one, int) and room[one] > 1e-15:
                    end = one
                    break
        if end is None:
            return total
        path: list[object] = [end]
        while before[path[-1]] is not None:
            path.append(before[path[-1]])
        path.reverse()
        steps = list(pairwise(path))
        amount = min(left[path[0]], room[end])
        for here, there in steps:
            if isinstance(here, int):
                amount = min(amount, flow[there, here])
        for here, there in steps:
            pair = (here, there) if isinstance(here, frozenset) else (there, here)
            sign = 1 if isinstance(here, frozenset) else -1
            flow[pair] = flow.get(pair, 0.0) + sign * amount
        left[path[0]] -= amount
        room[end] -= amount
        total += amount

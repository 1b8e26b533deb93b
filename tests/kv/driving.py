"""A cache policy alone: a cache under it is driven with drafts, and what it attends to is compared.

Queries, keys and values are made up from the text before them, so a node of a draft has those that
its token has where it is decoded plainly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from foretell.cache.cache import Cache
from foretell.cache.policy import NEVER, CachePolicy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.ops.attention import LayerQuery

HEADS, GROUPS, WIDTH, LAYERS = 4, 2, 8, 2
TIMES = HEADS // GROUPS
LAYOUT = ((GROUPS, WIDTH, WIDTH),) * LAYERS
SCALE = 1 / math.sqrt(WIDTH)
VOCAB = 11
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Which places of a text a head reads of the last one's query: (text, layer, head of queries)
Twin = Callable[[tuple[int, ...], int, int], Sequence[int]]


class Full(CachePolicy):
    """Does nothing, but forwards end with the prompt as they do under others."""

    def room_left(self, length: int) -> int:
        return self.prompt - length if length < self.prompt else NEVER


@cache
def rows_of(text: tuple[int, ...], layer: int) -> Rows:
    """Query (H, D), key and value (KV, D) of a text's last token."""
    random = torch.Generator().manual_seed(hash((text, layer)) % (1 << 40))
    sizes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH))
    q, k, v = (torch.randn(size, generator=random, dtype=torch.float64) for size in sizes)
    return q, k, v


def text_of(length: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=random).tolist()


def drafted(tokens: Sequence[int], whole: Sequence[int], depth: int, wrong: bool) -> TokenTree:
    """What follows `tokens` in the whole text, with a wrong token beside each; `wrong`: the second
    one of it is another.
    """
    tree, node = TokenTree(tokens[-1]), 0
    depth = min(depth, len(whole) - len(tokens))
    for step in range(depth):
        token = whole[len(tokens) + step]
        if wrong and step == 1:
            token = (token + 1) % VOCAB
        other = tree.add(node, (token + 3) % VOCAB)
        if step + 1 < depth:
            tree.add(other, token)
        node = tree.add(node, token)
    return tree


def drive(
    policy: CachePolicy,
    prompt: int,
    whole: Sequence[int],
    depth: int = 0,
    wrong: bool = False,
    chunk: int = 1000,
    told: Callable[[Any], None] | None = None,
) -> Iterator[tuple[tuple[int, ...], int, torch.Tensor]]:
    """(text up to a node, layer, what it gets (H, D)) of all nodes of all forwards.

    `told` hears of the policy of the whole text.
    """
    cache = Cache(LAYOUT, torch.float64, torch.device("cpu"))
    cache.use(policy, prompt)
    tokens = list(whole[:prompt])
    while len(tokens) < len(whole):
        assert cache.policy is not None
        room = cache.policy.room_left(len(tokens) - 1) - 1
        tree = drafted(tokens, whole, min(depth, room), wrong)
        done = False
        while not done:
            job, done = cache.prepare(Ask(tree), tokens, chunk)
            plan = cache.plan
            assert plan is not None
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(plan.tokens, plan.parents, strict=True):
                above = paths[parent] if parent >= 0 else tuple(tokens[: cache.length])
                paths.append((*above, token))
            new = paths[len(paths) - len(job.tokens) :]
            for layer in range(LAYERS):
                parts = zip(*(rows_of(text, layer) for text in new), strict=True)
                q, k, v = (torch.stack(part, 1) for part in parts)
                out = job.attend(LayerQuery(layer, q, k, v, SCALE))
                yield from ((text, layer, out[i]) for i, text in enumerate(new))
            cache.finish()
        node, begun = 0, True
        while begun and len(tokens) < len(whole):
            tokens = [*tokens, whole[len(tokens)]]
            node = tree.find_child(node, tokens[-1])
            begun = node > 0
    cache.commit(tokens)
    if told is not None:
        told(cache.policy)


def attended(text: tuple[int, ...], layer: int, twin: Twin) -> torch.Tensor:
    """What a text's last token gets of the places that the twin names, (H, D), by loops."""
    out = []
    q = rows_of(text, layer)[0]
    for head in range(HEADS):
        read = twin(text, layer, head)
        rows = [rows_of(text[: place + 1], layer) for place in read]
        scores = torch.stack([q[head] @ k[head // TIMES] for _, k, _ in rows]) * SCALE
        values = torch.stack([v[head // TIMES] for _, _, v in rows])
        out.append(scores.softmax(0) @ values)
    return torch.stack(out)


def differs(
    policy: CachePolicy,
    prompt: int,
    whole: Sequence[int],
    twin: Twin,
    depth: int = 0,
    wrong: bool = False,
    chunk: int = 1000,
) -> float:
    """How far what the nodes get is from what the twin says; prompts are read as a whole."""
    most = 0.0
    for text, layer, got in drive(policy, prompt, whole, depth, wrong, chunk):
        everything = len(text) <= prompt
        want = attended(text, layer, every_place if everything else twin)
        most = max(most, float((got - want).abs().max()))
    return most


def every_place(text: tuple[int, ...], layer: int, head: int) -> Sequence[int]:
    return range(len(text))

"""Whether a model's logits are the same to the last bit in any tree, batch and chunking.

Plain steps, one token a forward, write down the rows of a random text. A random step takes a part
of that text in by chunks and hangs a tree below it, which holds the text's own continuation among
random branches; it runs alone or beside a step of another text, sometimes on a fork. The rows of
the continuation and of one random node are compared with those of plain steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask

CHUNKS = (1, 3, 7, 16, 50, 512)  # tokens of a prompt that a forward takes in
STEPS_PER_TEXT = 25  # random steps before new texts are drawn
MARGIN = 16  # tokens of the context that trees may take


@dataclass
class Text:
    """A random text, its rows by plain steps, and the cache its random steps go on with."""

    tokens: list[int]
    rows: list[torch.Tensor]
    cache: Cache


@dataclass
class Check:
    """A tree below the first `cut` tokens of a text; `path`: its nodes that continue the text."""

    text: Text
    cut: int
    tree: TokenTree
    path: list[int]
    job: Job


@torch.inference_mode()
def compare(model: Model, steps: int, seed: int = 0, longest: int = 160) -> tuple[int, str]:
    """How many of these random steps give plain steps' logits to the last bit, and in words the
    first difference, "" if there is none. `longest`: tokens of a text.
    """
    rng = random.Random(seed)
    longest = min(longest, model.context - MARGIN)
    same = 0
    first = ""
    texts: list[Text] = []
    for step in range(steps):
        if step % STEPS_PER_TEXT == 0:
            texts = [_random_text(model, rng, longest) for _ in range(2)]
        batch = rng.sample(texts, rng.randint(1, 2))
        checks = [_random_check(model, rng, text) for text in batch]
        replies = model.forward([check.job for check in checks])
        differences = []
        for check, reply in zip(checks, replies, strict=True):
            rows = dict(zip(reply.nodes, reply.logits, strict=True))
            differences += _differences(model, rng, check, rows)
        same += not differences
        if differences and not first:
            first = f"step {step}, {differences[0]}"
    return same, first


def _prepared(
    model: Model, cache: Cache, tree: TokenTree, tokens: Sequence[int], chunk: int
) -> Job:
    """The job that answers for `tree`, once the chunks before it are through."""
    job, done = cache.prepare(Ask(tree), tokens, chunk)
    while not done:
        model.forward([job])
        job, done = cache.prepare(Ask(tree), tokens, chunk)
    return job


def _plain_row(model: Model, cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
    """Logits (V,) after `tokens`, one token a forward."""
    job = _prepared(model, cache, TokenTree(tokens[-1]), tokens, 1)
    return model.forward([job])[0].logits[0]


def _random_text(model: Model, rng: random.Random, longest: int) -> Text:
    length = rng.randint(longest // 2, longest)
    tokens = [rng.randrange(model.vocab) for _ in range(length)]
    cache = model.cache()
    rows = [_plain_row(model, cache, tokens[: end + 1]) for end in range(length)]
    return Text(tokens, rows, model.cache())


def _random_check(model: Model, rng: random.Random, text: Text) -> Check:
    chunk = rng.choice(CHUNKS)
    cut = rng.randint(2, len(text.tokens) - 10)
    # A cache that has taken in less goes on from there; one that has more starts afresh.
    if text.cache.length >= cut or rng.random() > 0.7:
        text.cache = model.cache()
    if rng.random() < 0.3:
        text.cache = text.cache.fork()
    tree = TokenTree(text.tokens[cut - 1])
    path = [0]
    for token in text.tokens[cut : cut + rng.randint(0, 8)]:
        for _ in range(rng.randint(0, 3)):  # branches before and between
            tree.add(rng.randrange(len(tree)), rng.randrange(model.vocab))
        path.append(tree.add(path[-1], token))
    job = _prepared(model, text.cache, tree, text.tokens[:cut], chunk)
    return Check(text, cut, tree, path, job)


def _differences(
    model: Model, rng: random.Random, check: Check, rows: dict[int, torch.Tensor]
) -> list[str]:
    """In words, each of the tree's `rows` (by node) that is not a plain step's.

    Nodes that the cache had already are not computed again and have no row.
    """
    tokens = check.text.tokens[: check.cut]
    expected = {
        node: check.text.rows[check.cut - 1 + depth]
        for depth, node in enumerate(check.path)
        if node in rows
    }
    other = rng.choice([*rows])
    cache = model.cache()
    model.forward([_prepared(model, cache, TokenTree(tokens[-1]), tokens, 512)])
    after = _plain_row(model, cache, [*tokens, *check.tree.tokens_to(other)])
    pairs = [*expected.items(), (other, after)]
    differences = []
    for node, plain in pairs:
        row = rows[node]
        if not torch.equal(row, plain):
            differences.append(
                f"node {node} of {len(check.tree)} behind {check.cut} tokens: "
                f"{int((row != plain).sum())} of {len(plain)} logits differ, by at most "
                f"{float((row - plain).abs().max()):.2g}"
            )
    return differences

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
def compare_steps(
    model: Model, steps: int, seed: int = 0, max_length: int = 160
) -> tuple[int, str]:
    """Counts the random steps that give plain steps' logits to the last bit; also says the first
    difference in words, "" if there is none. `max_length`: tokens of a text.
    """
    random_source = random.Random(seed)
    max_length = min(max_length, model.context - MARGIN)
    identical_count = 0
    first_difference = ""
    texts: list[Text] = []
    for step in range(steps):
        if step % STEPS_PER_TEXT == 0:
            texts = [_random_text(model, random_source, max_length) for _ in range(2)]
        chosen_texts = random_source.sample(texts, random_source.randint(1, 2))
        checks = [_random_check(model, random_source, text) for text in chosen_texts]
        replies = model.forward([check.job for check in checks])
        differences = []
        for check, reply in zip(checks, replies, strict=True):
            rows_by_node = dict(zip(reply.nodes, reply.logits, strict=True))
            differences += _differences(model, random_source, check, rows_by_node)
        identical_count += not differences
        if differences and not first_difference:
            first_difference = f"step {step}, {differences[0]}"
    return identical_count, first_difference


def _prepare_job(
    model: Model, cache: Cache, tree: TokenTree, tokens: Sequence[int], chunk: int
) -> Job:
    """Prepares the job that answers for `tree`, once the chunks before it are through."""
    job, is_done = cache.prepare(Ask(tree), tokens, chunk)
    while not is_done:
        model.forward([job])
        job, is_done = cache.prepare(Ask(tree), tokens, chunk)
    return job


def _plain_row(model: Model, cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
    """Computes logits (V,) after `tokens`, one token a forward."""
    step_job = _prepare_job(model, cache, TokenTree(tokens[-1]), tokens, 1)
    return model.forward([step_job])[0].logits[0]


def _random_text(model: Model, random_source: random.Random, max_length: int) -> Text:
    length = random_source.randint(max_length // 2, max_length)
    tokens = [random_source.randrange(model.vocab) for _ in range(length)]
    cache = model.cache()
    plain_rows = [
        _plain_row(model, cache, tokens[: token_index + 1]) for token_index in range(length)
    ]
    return Text(tokens, plain_rows, model.cache())


def _random_check(model: Model, random_source: random.Random, text: Text) -> Check:
    chunk = random_source.choice(CHUNKS)
    prefix_length = random_source.randint(2, len(text.tokens) - 10)
    # A cache that has taken in less goes on from there; one that has more starts afresh.
    if text.cache.length >= prefix_length or random_source.random() > 0.7:
        text.cache = model.cache()
    if random_source.random() < 0.3:
        text.cache = text.cache.fork()
    tree = TokenTree(text.tokens[prefix_length - 1])
    continuation_path = [0]
    for token in text.tokens[prefix_length : prefix_length + random_source.randint(0, 8)]:
        for _ in range(random_source.randint(0, 3)):  # branches before and between
            tree.add(random_source.randrange(len(tree)), random_source.randrange(model.vocab))
        continuation_path.append(tree.add(continuation_path[-1], token))
    job = _prepare_job(model, text.cache, tree, text.tokens[:prefix_length], chunk)
    return Check(text, prefix_length, tree, continuation_path, job)


def _differences(
    model: Model, random_source: random.Random, check: Check, rows: dict[int, torch.Tensor]
) -> list[str]:
    """Says in words where each of the tree's `rows` (by node) is not a plain step's.

    Nodes that the cache had already are not computed again and have no row.
    """
    tokens = check.text.tokens[: check.cut]
    expected = {
        node: check.text.rows[check.cut - 1 + depth]
        for depth, node in enumerate(check.path)
        if node in rows
    }
    random_node = random_source.choice([*rows])
    cache = model.cache()
    model.forward([_prepare_job(model, cache, TokenTree(tokens[-1]), tokens, 512)])
    node_row = _plain_row(model, cache, [*tokens, *check.tree.tokens_to(random_node)])
    node_rows = [*expected.items(), (random_node, node_row)]
    differences = []
    for node, plain_row in node_rows:
        row = rows[node]
        if not torch.equal(row, plain_row):
            differences.append(
                f"node {node} of {len(check.tree)} after {check.cut} tokens: "
                f"{int((row != plain_row).sum())} of {len(plain_row)} logits differ, by at most "
                f"{float((row - plain_row).abs().max()):.2g}"
            )
    return differences

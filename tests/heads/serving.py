"""Heads of random weights on a small transformer: what a drafter proposes and what comes of it."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.strategy import Speculative
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.families.decoder import Decoder
from foretell.heads.base import Head, Texts
from foretell.heads.folder import build, load, save, target_shape
from foretell.heads.output import Output
from foretell.strategies.plain import Plain
from tests.families.families import tiny
from tests.heads.driving import trees
from tests.memory.users import run

TEXT = [(11 * i + i * i) % 90 for i in range(15)]


def llama_layers() -> int:
    return target_shape(llama()).layers


@cache
def llama() -> Decoder:
    return Decoder(tiny("llama"), "llama")


def folder_of(kind: str, where: Path, **options: Any) -> str:
    """Such a head on disk."""
    torch.manual_seed(1)
    head = build(kind, target_shape(llama()), options)
    head.begin(llama())
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.05 * torch.randn_like(weight)
    save(head, None, where, llama(), {})
    return str(where)


def drafted(kind: str, drafter: Drafter, where: Path, **options: Any) -> TokenTree:
    """The first tree that it proposes behind TEXT."""
    given: Any = drafter
    headed = dataclasses.replace(given, head=folder_of(kind, where, **options))
    target: Any = llama()
    (tree, *_), _ = trees(headed, target, TEXT)
    return tree


def check_values(kind: str, drafter: Drafter, where: Path, **options: Any) -> None:
    """What the nodes of all trees are worth, against the head's laws in training on their paths.

    Trees that follow are of texts whose last tokens were drafted nodes before.
    """
    folder = folder_of(kind, where, **options)
    given: Any = drafter
    seen: list[tuple[list[int], TokenTree]] = []
    made: Any = type(drafter)

    class Spy(made):  # type: ignore[misc]
        def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
            tree = yield from super().steps(ctx, state, budget)
            seen.append((list(ctx.tokens), tree))
            return tree

    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    strategy = Speculative(Spy(**(fields | {"head": folder})), nodes=8)
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    run({"target": llama()}, Request(TEXT, strategy, sampling))
    head, _ = load(Path(folder), llama(), kind)
    assert sum(max(tree.depths) > 1 for _, tree in seen) > 2
    for text, tree in seen:
        for node in range(1, len(tree)):
            assert tree.values[node] == pytest.approx(worth(head, text, tree, node), rel=2e-3)


@torch.inference_mode()
def worth(head: Head, text: list[int], tree: TokenTree, node: int) -> float:
    """The chance of the path to a node, by the training pass over text and path."""
    path: list[int] = []
    while node:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    target, last = llama(), llama_layers()
    ask = Ask(TokenTree(text[-1]), taps=(last,))
    job, _ = target.cache().prepare(ask, text, len(text))
    states = target.forward([job])[0].hidden[last]
    output = Output(target, None)
    if head.reads_normed:
        states = output.norm(states)
    # Row i reads the state of token i - 1; rows of the path have none.
    features = torch.zeros(len(text) + len(path), states.shape[1])
    features[1 : len(text)] = states[:-1]
    tokens = torch.tensor([[*text, *path]])
    embedded = target.embedded(tokens)
    batch = Texts(tokens, embedded, features.repeat(1, len(head.taps))[None], embedded)
    chance = 1.0
    for drafted in head.unroll(batch, len(path)):
        law = output.logits(drafted.states[0, len(text) - 1][None])[0].softmax(-1)
        chance *= float(law[path[drafted.depth]])
    return chance


def check_answers(kind: str, drafter: Drafter, where: Path, **options: Any) -> None:
    """The tokens of plain decoding, alone and beside others, in pieces and interrupted."""
    given: Any = drafter
    headed = dataclasses.replace(given, head=folder_of(kind, where, **options))
    models: dict[str, Model] = {"target": llama()}
    texts = (TEXT, TEXT[:4])
    for temperature, settings in ((0.0, {"chunk": 4}), (0.9, {"preempt": 5})):
        sampling = Sampling(max_new_tokens=8, temperature=temperature, seed=2)
        plain = [run(models, Request(text, Plain(), sampling))[0].ctx.output for text in texts]
        strategy = Speculative(headed, nodes=8)
        lives = run(models, *(Request(text, strategy, sampling) for text in texts), **settings)
        assert [live.ctx.output for live in lives] == plain
        assert all(live.ctx.stats.drafted for live in lives)

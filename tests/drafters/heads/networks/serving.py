"""Heads of random weights on a small transformer: what a drafter proposes and what comes of it."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.heads.networks.base import Head, Texts
from foretell.drafters.heads.networks.folder import build_head, load_head, save_head, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.drafters.heads.networks.output import Output
from foretell.engine.engine import Engine
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from tests import laws
from tests.cache.users import run
from tests.drafters.heads.networks.driving import trees
from tests.models.decoder.families import tiny

NEAR = 1e-4  # float32, of states that were computed in other batches
TEXT = [(11 * i + i * i) % 90 for i in range(15)]


def llama_layers() -> int:
    return target_shape(llama()).layers


@cache
def llama() -> Decoder:
    return Decoder(tiny("llama"), "llama")


def folder_of(kind: str, where: Path, **options: Any) -> str:
    """Such a head on disk."""
    torch.manual_seed(1)
    head = build_head(kind, target_shape(llama()), options)
    head.take_weights(llama())
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.05 * torch.randn_like(weight)
    save_head(head, None, where, llama(), {})
    return str(where)


def drafted(kind: str, drafter: Drafter, where: Path, **options: Any) -> TokenTree:
    """The first tree that it proposes after TEXT."""
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
    head, _ = load_head(Path(folder), llama(), kind)
    assert sum(max(tree.depths) > 1 for _, tree in seen) > 2
    for text, tree in seen:
        for node in range(1, len(tree)):
            assert tree.values[node] == pytest.approx(worth(head, text, tree, node), rel=2e-3)


@torch.inference_mode()
def worth(head: Head, text: list[int], tree: TokenTree, node: int) -> float:
    """The probability of the path to a node, by the training pass over text and path."""
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
        states = output.norm_states(states)
    # Row i reads the state of token i - 1; rows of the path have none.
    features = torch.zeros(len(text) + len(path), states.shape[1])
    features[1 : len(text)] = states[:-1]
    tokens = torch.tensor([[*text, *path]])
    embedded = target.embedded(tokens)
    batch = Texts(tokens, embedded, features.repeat(1, len(head.taps))[None], embedded)
    chance = 1.0
    for drafted in head.unroll_depths(batch, len(path)):
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


@torch.inference_mode()
def check_held_rows(kind: str, drafter: Drafter, rounds: int, **options: Any) -> int:
    """After so many rounds of random texts, a head's cache holds what it makes of a text at once:
    rows, and what it remembers beside them. Returns how many rounds there were.
    """
    torch.manual_seed(2)
    network = build_head(kind, target_shape(llama()), options)
    network.take_weights(llama())
    for weight in network.parameters():
        weight += 0.05 * torch.randn_like(weight)
    head = HeadModel(network, None, llama())
    draw = random.Random(3)
    done = accepted = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(drafter), "bring", lambda self, models: {"head": head})
        while done < rounds:
            engine = Engine({"target": llama()})
            sampling = Sampling(temperature=0.2, seed=draw.randrange(99), max_new_tokens=40)
            prompt = [draw.randrange(90) for _ in range(9)]
            live = engine.add(Request(prompt, Speculative(drafter, nodes=9), sampling))
            while engine.live:
                engine.step()
                done += 1
                if done % 10 == 0 and ("head", 0) in live.caches:
                    held = live.caches["head", 0]
                    check_rows(head, llama(), held, list(live.ctx.tokens), NEAR)
            assert live.error is None, live.error
            accepted += live.ctx.stats.accepted
    assert accepted > 5, "nothing that was drafted was kept"
    return done


def check_rows(head: HeadModel, target: Decoder, held: Cache, text: list[int], near: float) -> None:
    """What a head's cache holds of a text is what a fresh one makes of the text's true states."""
    beside = laws.fresh_states(head, target, text)
    held = held.fork()
    held.beside = beside
    held.commit(text)
    fresh = head.cache(None, beside)
    job, _ = fresh.prepare(Ask(TokenTree(text[-1])), text, len(text))
    head.forward([job])
    fresh.commit([*text, 0])
    for ours, theirs in zip((*held.k, *held.v), (*fresh.k, *fresh.v), strict=True):
        gap = (ours[:, : held.base] - theirs[:, : held.base]).abs().max() if held.base else 0.0
        assert gap <= near, "stale rows in the cache"
    if held.states is not None and fresh.states is not None and held.length:
        for tap in held.states.taps:
            ours, theirs = (one.states.read_states((tap,), 0, held.length) for one in (held, fresh))
            assert (ours - theirs).abs().max() <= near, "stale states beside the rows"
    held.drop()

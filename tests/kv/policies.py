"""Every cache policy there is, small enough to change the rows of short texts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretell import registry
from foretell.core.drafter import Drafter, Drafting
from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.request import Request
from foretell.core.strategy import Speculative, Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.families.decoder import Decoder
from foretell.ops.gates import save
from foretell.ops.keeping import KV
from foretell.ops.words import Words
from foretell.spec import kv_of
from foretell.strategies.plain import Plain
from tests import laws
from tests.families.families import VOCAB, tiny

NAMES = registry.names("kv")
# What makes each of them change the rows of a text of some 30 tokens; those of a `budget` by it.
SMALL = {
    "streaming-llm": "streaming-llm:sinks=2,window=8,every=3",
    "double-sparsity": "double-sparsity:budget=8,channels=8,bits=4,dense=1",
    "quest": "quest:budget=12,page=4,dense=1",
    "treekv": "treekv:budget=10,sinks=1,every=3,block=2",
    "sentence-kv": "sentence-kv:budget=8,factor=2,sinks=2,recent=3,window=3,kernel=3",
    "snapkv": "snapkv:budget=10,window=3,kernel=3",
    "ems": "ems:budget=10,every=3,window=3,sinks=2,kernel=3,tau=0.2",
    "elastic-cache": "elastic-cache:ratio=0.3,distance=-5,every=5",
    "duo-attention": "duo-attention:sparsity=0.5,sinks=2,recent=6,every=3,gates={gates}",
    "lserve": "lserve:budget=12,page=4,part=2,reuse=2,sinks=4,recent=4,prompt=8,gates={gates}",
}
LARGE = {
    "double-sparsity": "double-sparsity:budget=400,channels=8",
    "streaming-llm": "streaming-llm:sinks=2,window=400",
    "elastic-cache": "elastic-cache:ratio=0",
    "duo-attention": "duo-attention:sparsity=0",
    "lserve": "lserve:sparsity=0,bits=16",
}
# Every fourth token ends a sentence.
WORDS = Words([b"." if token % 4 == 0 else b"a%d" % token for token in range(VOCAB)])
PROMPT = [(11 * i + i * i) % 90 for i in range(21)]


def small(name: str) -> KV:
    """It with settings that change the rows of short texts."""
    return kv_of(SMALL.get(name, f"{name}:budget=10,every=3").replace("{gates}", gates()))


@cache
def gates() -> str:
    """A file of gates for the target, which are spread over all of its heads."""
    path = Path(tempfile.mkdtemp()) / "gates.safetensors"
    save(torch.tensor([[0.9, 0.1], [0.8, 0.7], [0.2, 0.3]]), path, target(), 1)
    return str(path)


def large(name: str) -> KV:
    """It with room for everything."""
    return kv_of(LARGE.get(name, f"{name}:budget=400"))


@cache
def target(family: str = "llama", dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(tiny(family, dtype=dtype), family)
    decoder.tokenizer = WORDS
    return decoder


@dataclass(frozen=True)
class Known(Drafter):
    """Drafts a known text, `wrong` of every 10 tokens not; with a sibling beside each."""

    text: tuple[int, ...]
    wrong: int = 0
    length: int = 4

    def steps(self, ctx: Any, state: Any, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        node, place = 0, len(ctx.output)
        for depth in range(min(self.length, ctx.depth, (budget - 1) // 2)):
            token = self.text[(place + depth) % len(self.text)]
            if (7 * (place + depth)) % 10 < self.wrong:
                token = (token + 1) % 90
            tree.add(node, (token + 5) % 90)
            node = tree.add(node, token)
        return tree
        yield


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    kv: KV | None,
    strategy: Strategy | None = None,
    tokens: int = 24,
    **engine: Any,
) -> list[Live]:
    """Greedy texts of these prompts, side by side."""
    made = Engine({"target": model}, **engine)
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    policy = None if kv is None else kv.policy(model)
    method = strategy or Plain()
    lives = [made.add(Request(list(p), method, sampling, policy=policy)) for p in prompts]
    laws.finish(made, *lives)
    return lives


def drafted(text: Sequence[int], wrong: int) -> Strategy:
    return Speculative(Known(tuple(text), wrong), nodes=8)

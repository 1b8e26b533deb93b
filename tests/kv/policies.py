"""Every cache policy there is, small enough to change the rows of short texts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretell import registry
from foretell.cache.cache import Cache
from foretell.core.drafter import Drafter, Drafting
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Words
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.diffusion.planner import CanvasKV
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.kv.base import KV
from foretell.kv.select.gates import save_gates
from foretell.models.decoder.decoder import Decoder
from foretell.spec import build_cache_policy
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from tests import laws
from tests.kv.encoded.encoders import folder
from tests.models.decoder.families import VOCAB, tiny

NAMES = [
    n
    for n in registry.method_names("kv")
    if not issubclass(registry.load_method(n, "kv"), CanvasKV)
]
# What makes each of them change the rows of a text of some 30 tokens; those of a `budget` by it.
SMALL = {
    "ape": "ape:prefix=3,sizes=5 7,temperature=0.5,scale=0.5",
    "arc-encoder": "arc-encoder:prefix=3,sizes=5 7,folder={arc-encoder}",
    "lclm": "lclm:prefix=3,sizes=5 7,folder={lclm}",
    "streaming-llm": "streaming-llm:sinks=2,window=8,every=3",
    "double-sparsity": "double-sparsity:budget=8,channels=8,bits=4,dense=1",
    "quest": "quest:budget=12,page=4,dense=1",
    "treekv": "treekv:budget=10,sinks=1,every=3,block=2",
    "sentence-kv": "sentence-kv:budget=8,factor=2,sinks=2,recent=3,window=3,kernel=3",
    "snapkv": "snapkv:budget=10,window=3,kernel=3",
    "dapq": "dapq:budget=10,pseudo=6,window=2,kernel=3",
    "ems": "ems:budget=10,every=3,window=3,sinks=2,kernel=3,tau=0.2",
    "elastic-cache": "elastic-cache:ratio=0.3,distance=-5,every=5",
    "gear": "gear:bits=2,buffer=4",
    "block-quantization": "block-quantization:bits=2,block=4,sort=yes,buffer=5",
    "offload": "offload:block=4",
    "infllm": "infllm:initial=1,local=6,block=3,blocks=2,representatives=2,every=4,alone=3",
    "actqkv": "actqkv:initial=1,local=6,block=3,blocks=2,least=1,representatives=2,every=4,"
    "alone=3,history=4",
    "minicache": "minicache:buffer=4,gamma=0.1",
    "lazyllm": "lazyllm:every=3",
    "fastkv": "fastkv:budget=10,length=14,window=3,kernel=3",
    "duo-attention": "duo-attention:sparsity=0.5,sinks=2,recent=6,every=3,gates={gates}",
    "lserve": "lserve:budget=12,page=4,part=2,reuse=2,sinks=4,recent=4,prompt=8,gates={gates}",
}
LARGE = {
    "ape": "ape:prefix=3,sizes=12,temperature=1,scale=1",
    "arc-encoder": "arc-encoder:prefix=3,sizes=40,folder={arc-encoder}",  # a text too short for it
    "lclm": "lclm:prefix=3,sizes=40,folder={lclm}",
    "double-sparsity": "double-sparsity:budget=400,channels=8",
    "streaming-llm": "streaming-llm:sinks=2,window=400",
    "elastic-cache": "elastic-cache:ratio=0",
    "gear": "gear:buffer=400",
    "block-quantization": "block-quantization:buffer=400",
    "offload": "offload:block=400",
    "infllm": "infllm:local=400",
    "actqkv": "actqkv:local=400",
    "minicache": "minicache:buffer=400",
    "lazyllm": "lazyllm:rate=0",
    "duo-attention": "duo-attention:sparsity=0",
    "lserve": "lserve:sparsity=0,bits=16",
}
# Some that are joined, of which each part is small or large.
JOINED = ("snapkv+gear+offload", "snapkv+block-quantization")
# Every fourth token ends a sentence.
WORDS = Words([b"." if token % 4 == 0 else b"a%d" % token for token in range(VOCAB)])
PROMPT = [(11 * i + i * i) % 90 for i in range(21)]


def small(name: str) -> KV:
    """It with settings that change the rows of short texts."""
    return joined(name, SMALL, "budget=10,every=3")


@cache
def gates() -> str:
    """A file of gates for the target, which are spread over all of its heads."""
    path = Path(tempfile.mkdtemp()) / "gates.safetensors"
    save_gates(torch.tensor([[0.9, 0.1], [0.8, 0.7], [0.2, 0.3]]), path, target(), 1)
    return str(path)


def large(name: str) -> KV:
    """It with room for everything."""
    return joined(name, LARGE, "budget=400")


def joined(name: str, specs: Mapping[str, str], usual: str) -> KV:
    """One or several with these settings, or the usual ones."""
    spec = "+".join(specs.get(part, f"{part}:{usual}") for part in name.split("+"))
    if "{gates}" in spec:
        spec = spec.replace("{gates}", gates())
    for kind in ("arc-encoder", "lclm"):
        if f"{{{kind}}}" in spec:
            spec = spec.replace(f"{{{kind}}}", folder(target(), kind))
    return build_cache_policy(spec)


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
    policy = None if kv is None else kv.build_policy(model)
    method = strategy or Plain()
    lives = [made.add(Request(list(p), method, sampling, policy=policy)) for p in prompts]
    laws.finish(made, *lives)
    return lives


def drafted(text: Sequence[int], wrong: int) -> Strategy:
    return Speculative(Known(tuple(text), wrong), nodes=8)


def taken_in(model: Decoder, tokens: list[int], length: int) -> Cache:
    """A cache that has taken in so many first tokens."""
    cache = model.cache()
    job, _ = cache.prepare(Ask(TokenTree(tokens[length - 1])), tokens[:length], 1000)
    with torch.inference_mode():
        model.forward([job])
    cache.commit([*tokens[:length], 0])
    assert cache.length == length
    return cache

"""Every cache policy there is, small enough to change the rows of short texts.

A policy's test file may say by which settings: `SMALL_SPEC` changes the rows of a text of some 30
tokens, `LARGE_SPEC` has room for all of it. Without them these are budgets of 10 and of 400 rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
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
from foretell.errors import BadConfig
from foretell.kv.base import KV
from foretell.kv.select.gates import save_gates
from foretell.models.decoder.decoder import Decoder
from foretell.spec import build_cache_policy
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from tests import laws
from tests.kv.encoded.encoders import folder
from tests.laws.found import constant_of, test_file
from tests.models.decoder.families import VOCAB, tiny

NAMES = [
    n
    for n in registry.method_names("kv")
    if not issubclass(registry.load_method(n, "kv"), CanvasKV)
]
# Some that are joined, of which each part is small or large.
JOINED = ("snapkv+gear+offload", "snapkv+block-quantization")
# Every fourth token ends a sentence.
WORDS = Words([b"." if token % 4 == 0 else b"a%d" % token for token in range(VOCAB)])
PROMPT = [(11 * i + i * i) % 90 for i in range(21)]


def small(name: str) -> KV:
    """It with settings that change the rows of short texts."""
    return joined(name, "SMALL_SPEC", "budget=10,every=3")


@cache
def gates() -> str:
    """A file of gates for the target, which are spread over all of its heads."""
    path = Path(tempfile.mkdtemp()) / "gates.safetensors"
    save_gates(torch.tensor([[0.9, 0.1], [0.8, 0.7], [0.2, 0.3]]), path, target(), 1)
    return str(path)


def large(name: str) -> KV:
    """It with room for everything."""
    return joined(name, "LARGE_SPEC", "budget=400")


def joined(name: str, constant: str, usual: str) -> KV:
    """One or several by the specs that their test files have, or with the usual settings."""
    spec = "+".join(settings_of(part, constant, usual) for part in name.split("+"))
    if "{gates}" in spec:
        spec = spec.replace("{gates}", gates())
    for kind in ("arc-encoder", "lclm"):
        if f"{{{kind}}}" in spec:
            spec = spec.replace(f"{{{kind}}}", folder(target(), kind))
    return build_cache_policy(spec)


def settings_of(name: str, constant: str, usual: str) -> str:
    """A policy's spec: what its test file gives this name to, else with the usual settings."""
    test = test_file(registry.method_files()["kv", name])
    spec = str(constant_of(test, constant) or f"{name}:{usual}")
    try:
        if "{" not in spec:
            build_cache_policy(spec)
    except BadConfig as error:
        pytest.fail(f'{error}; give {test.name} settings of its own: {constant} = "{name}:..."')
    return spec


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

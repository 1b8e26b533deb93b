"""Kangaroo: the first layers run once a token, and the head reads the states that left them.

Its exactness is in test_laws.py; here are the layers it computes, the tokens of a transformer, the
rows that stay, and slips that must be caught.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.cache.states import TappedStates
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.heads.kangaroo import Early, Kangaroo
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws
from tests.cache.users import run
from tests.drafters.heads.networks.driving import trees
from tests.drafters.own.test_layerskip import Counting
from tests.models.decoder.families import tiny

SPECS = ["kangaroo:length=2,eta=0", "kangaroo:length=3,eta=0.5"]
PROMPT = [1, 2, 3, 1, 2]
TEXT = [(11 * i + i * i) % 90 for i in range(15)]
EXIT = 2


def test_every_layer_runs_once_for_every_token() -> None:
    """A step of g drafts: g + 1 tokens through the first layers, then once through the others."""
    model = Counting(8, seed=3)
    drafted, layers = 3, model.layers
    strategy = Speculative(Kangaroo(eta=0, length=drafted), nodes=8)
    live = run({"target": model}, Request(PROMPT, strategy, Sampling(max_new_tokens=30)))[0]
    low, high = tuple(range(EXIT)), tuple(range(EXIT, layers))
    first = len(PROMPT)
    begin = [(first, low), *[(1, low)] * drafted, (first + drafted, high)]
    assert model.ran[: len(begin)] == begin
    step = [*[(1, low)] * (drafted + 1), (drafted + 1, high)]
    assert model.ran[len(begin) : len(begin) + len(step)] == step
    stats = live.ctx.stats
    tokens = first - 1 + stats.drafted + stats.steps + 1  # of the prompt, and the root of each step
    assert model.pairs == tokens * layers
    assert 0 < stats.accepted < stats.drafted


@cache
def llama() -> Decoder:
    """Its last layers change little, so that what leaves the second is often right."""
    hf = tiny("llama", num_hidden_layers=4)
    for layer in list(hf.get_decoder().layers)[EXIT:]:
        part: Any = layer
        with torch.no_grad():
            part.self_attn.o_proj.weight.mul_(0.2)
            part.mlp.down_proj.weight.mul_(0.2)
    return Decoder(hf, "llama")


def folder_of(where: Path, attention: float = 0.1) -> str:
    """A head on disk that says little more than the target's own norm and output matrix."""
    torch.manual_seed(1)
    head = build_head("kangaroo", target_shape(llama()))
    with torch.no_grad():
        head.get_submodule("self_attn.o_proj").weight.mul_(attention)  # type: ignore[operator]
        norm: Any = llama().loop.norm  # type: ignore[union-attr]
        head.get_submodule("norm").weight.copy_(norm.weight)  # type: ignore[operator]
    save_head(head, None, where, llama(), {})
    return str(where)


def test_a_transformers_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    models: dict[str, Model] = {"target": llama()}
    drafter = Kangaroo(folder_of(tmp_path), eta=0.2, length=3)
    for temperature in (0.0, 0.9):
        sampling = Sampling(max_new_tokens=12, temperature=temperature, seed=2)
        texts = (TEXT, TEXT[:4])
        plain = [run(models, Request(t, Plain(), sampling))[0].ctx.output for t in texts]
        for options in ({"chunk": 4}, {"preempt": 5}):
            strategy = Speculative(drafter, nodes=8)
            requests = [Request(t, strategy, sampling, tenant=str(len(t))) for t in texts]
            beside = Request(TEXT, Plain(), sampling, tenant="plain")
            *lives, other = run(models, *requests, beside, **options)
            assert [live.ctx.output for live in lives] == plain
            assert other.ctx.output == plain[0]
            assert temperature or lives[0].ctx.stats.accepted


def rows_of(model: Model, tokens: list[int], beside: Cache | None = None) -> Cache:
    """A cache that took the text in by one forward, with the states of the exit."""
    fresh = model.cache(None, beside)
    if beside is None:
        fresh.states = TappedStates((EXIT,))
    width = llama().config.hidden_size
    features = None if beside is None else torch.zeros(1, width)
    ask = Ask(TokenTree(tokens[-1]), rows=(), features=features)
    job, _ = fresh.prepare(ask, tokens, len(tokens))
    model.forward([job])
    fresh.commit(tokens)
    return fresh


@torch.inference_mode()
def test_rows_that_stay_are_those_of_a_prefill(tmp_path: Path) -> None:
    """Of the target, the layers below the exit included, and of the head, whose rows of accepted
    tokens were made while it drafted and are not made again.
    """
    drafter = Kangaroo(folder_of(tmp_path), eta=0, length=3)
    engine = Engine({"target": llama()})
    request = Request(TEXT, Speculative(drafter, nodes=8), Sampling(max_new_tokens=20))
    live = engine.add(request)
    accepted = 0
    while engine.live:
        target, head = (live.caches.get((name, 0)) for name in ("target", "head"))
        tokens = list(live.ctx.tokens)
        if live.ctx.stats.steps > accepted and target is not None and head is not None:
            accepted = live.ctx.stats.steps
            target.commit(tokens)
            head.commit(tokens)
            model = live.ctx.models["head"]
            fresh = rows_of(llama(), tokens)
            wanted = rows_of(model, tokens, fresh)
            # The head lacks the row of a last draft, which nothing followed.
            assert target.length == len(tokens) - 1 and head.length >= len(tokens) - 2
            for ours, theirs in ((target, fresh), (head, wanted)):
                for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
                    end = ours.length
                    torch.testing.assert_close(a[:, :end], b[:, :end], rtol=1e-4, atol=1e-5)
        engine.step()
    assert accepted > 3 and 0 < live.ctx.stats.accepted < live.ctx.stats.drafted


@pytest.mark.parametrize(("eta", "length"), [(0.0, 4), (1.1, 1)])
def test_the_extremes_of_the_threshold(eta: float, length: int) -> None:
    """0: always the whole length; above 1: one token. Layers run for one token more than that."""
    found, calls = trees(Kangaroo(eta=eta, length=4), ToyLayers(8, seed=3), tokens=12)
    drafted = [len(tree) - 1 for tree in found]
    # The end of the text may leave room for less.
    assert drafted[:2] == [length, length] and max(drafted) == length
    assert calls["layers"] == calls["head"] + sum(count > 0 for count in drafted)


def test_a_draft_ends_behind_the_first_unsure_token() -> None:
    toy = ToyLayers(8, seed=3, sharpness=8.0)
    whole, _ = trees(Kangaroo(eta=0.0, length=6), toy, tokens=20)
    chances = [b / a for a, b in zip(whole[0].values, whole[0].values[1:], strict=False)]
    eta = sorted(chances)[len(chances) // 2]
    (short, *_), _ = trees(Kangaroo(eta=eta, length=6), toy, tokens=20)
    ends = next(place for place, chance in enumerate(chances) if chance < eta)
    assert short.tokens == whole[0].tokens[: ends + 2] and 2 <= len(short) < len(whole[0])


def test_states_of_another_token_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Early.exit_states

    def wrong(self: Early, tree: TokenTree) -> Any:
        states = yield from right(self, tree)
        return states.roll(1, 0)

    strategy = laws.build("kangaroo:eta=0,length=2")
    laws.check_close(strategy, 0.0, tokens=4)
    monkeypatch.setattr(Early, "exit_states", wrong)
    with pytest.raises(AssertionError, match="stale rows"):
        laws.check_close(strategy, 0.0, tokens=4)


def test_an_exit_that_the_model_lacks_is_refused() -> None:
    shape = target_shape(Decoder(tiny("llama", num_hidden_layers=2), "two"))
    with pytest.raises(BadConfig, match="layers=2: must be between 1 and 1 for this target"):
        build_head("kangaroo", shape)
    with pytest.raises(Unsupported, match="layers"):
        run({"target": Toy(8)}, Request([1], Speculative(Kangaroo()), Sampling()))

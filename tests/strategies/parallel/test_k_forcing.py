"""Tokens out of noise: beside transformers' own forwards, that tokens ignore later noise, and that
verified the text is the model's own.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.heads.extra_rows import read_beside
from foretell.drafters.heads.networks.anchored import Rows
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.strategies.parallel import k_forcing
from foretell.strategies.parallel.k_forcing import KForcing
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.cache.users import run
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(9)]
VERIFIED = KForcing(verified=True, k=3)
SEED = 5


@cache
def target() -> Any:
    return Decoder(tiny("llama", dtype=torch.float64), "tiny")


def folder_of(where: Path) -> str:
    """A network of random numbers that survive bfloat16."""
    head: Any = build_head("k-forcing", target_shape(target()))
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_((0.3 * torch.randn_like(weight)).bfloat16())
    save_head(head, None, where, target(), {})
    return str(where)


def tokens_of(strategy: Any, count: int = 24, **sampling: Any) -> tuple[list[int], Any]:
    options = Sampling(max_new_tokens=count, **{"temperature": 0.7, "seed": SEED, **sampling})
    (live,) = run({"target": target()}, Request(TEXT, strategy, options))
    return live.ctx.output, live.ctx.stats


@torch.inference_mode()
def by_loops(head: Any, k: int, count: int) -> list[int]:
    """Of whole forwards over embeddings; k new ones each, all of them taken."""
    hf: Any = target().hf
    tokens = list(TEXT)
    while len(tokens) < len(TEXT) + count:
        rows = min(k, len(TEXT) + count - len(tokens))
        done = len(tokens) - len(TEXT)
        noise = torch.tensor([Rng(SEED).uniform("target", done + i) for i in range(rows)])
        made = head.noise_vectors(noise.double(), torch.full((rows,), 0.7).double())
        inputs = hf.get_input_embeddings()(torch.tensor(tokens))
        inputs = torch.cat([inputs, made.to(inputs)])
        logits = hf(inputs_embeds=inputs[None], use_cache=False).logits[0]
        tokens += logits[len(tokens) :].argmax(-1).tolist()
    return tokens[len(TEXT) :]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_what_is_said_is_that_of_whole_forwards(k: int, tmp_path: Path) -> None:
    strategy = KForcing(head=folder_of(tmp_path), k=k)
    head = strategy.bring({"target": target()})["head"].head  # type: ignore[attr-defined]
    output, stats = tokens_of(strategy)
    assert output == by_loops(head, k, 24) and stats.calls["target"] == 24 // k
    assert stats.drafted == stats.accepted == 24, "no token is the model's own word"
    assert output != tokens_of(strategy, seed=SEED + 1)[0]  # it hears its noise


def rows_said(head: str, monkeypatch: pytest.MonkeyPatch, changed: int) -> torch.Tensor:
    """The logits (4, V) of the first step's rows, with another number at this place."""
    seen: list[torch.Tensor] = []

    def reading(ctx: Any, tree: TokenTree, beside: Any) -> Any:
        reply, below = yield from read_beside(ctx, tree, beside)
        seen.append(below[0])
        return reply, below

    def noise(ctx: Any, position: int, index: int = 0) -> float:
        return 0.9 if position == changed else 0.1 + 0.1 * position

    with monkeypatch.context() as patch:
        patch.setattr(k_forcing, "read_beside", reading)
        patch.setattr(k_forcing, "noise_at", noise)
        tokens_of(KForcing(head=head), 5)
    return seen[0]


def test_tokens_ignore_later_noise_and_hear_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = folder_of(tmp_path)

    def holds() -> None:
        usual = rows_said(head, monkeypatch, -1)
        for changed in range(4):
            other = rows_said(head, monkeypatch, changed)
            assert torch.equal(usual[:changed], other[:changed])
            assert all(
                (a != b).any() for a, b in zip(usual[changed:], other[changed:], strict=True)
            )

    holds()
    noised = Rows.noise_vectors
    leaking = lambda self, noise, heat: noised(self, [sum(noise) / 9] * len(noise), heat)  # noqa: E731
    monkeypatch.setattr(Rows, "noise_vectors", leaking)
    with pytest.raises(AssertionError):
        holds()


@pytest.mark.parametrize("setting", ["plain", "penalties", "end", "form"])
def test_verified_its_law_is_the_models(setting: str) -> None:
    laws.check_law(VERIFIED, setting, tokens=3 if setting == "plain" else 2, drafts=False)


def test_verified_its_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    laws.check_batch([VERIFIED])
    laws.check_close(VERIFIED, 1.0)
    head = folder_of(tmp_path)
    for shared in (True, False):
        for sampling in ({}, {"temperature": 0.0}, {"top_p": 0.8}):
            wanted = tokens_of(Plain(), **sampling)[0]
            strategy = KForcing(head=head, verified=True, shared=shared)
            assert tokens_of(strategy, **sampling)[0] == wanted


def test_trusted_it_keeps_no_row_of_noise_and_its_law_is_another() -> None:
    laws.check_close(KForcing(), 1.0)
    assert laws.check_ends(KForcing(), 1.0)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(KForcing(), "plain", drafts=False)


def drawing(seed: int) -> Any:
    """`read_beside` where rows say what the model draws of their noise: a perfect student's."""

    def reading(ctx: Any, tree: TokenTree, beside: Any) -> Any:
        reply, below = yield from read_beside(ctx, tree, beside)
        door = Rng(seed)
        for node, rows in enumerate(below):
            text = [*ctx.tokens, *tree.tokens_to(node)]
            for row in rows:
                with torch.inference_mode():
                    logits = target().hf(torch.tensor([text])).logits[0, -1]
                p = ctx.sampler.law(logits, [])
                place = len(text) - len(TEXT)
                text.append(door.sample(p, "target", place))
                row.zero_()
                row[text[-1]] = 9.0
        return reply, below

    return reading


def test_the_verifiers_own_noise_is_accepted_and_other_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = KForcing(head=folder_of(tmp_path), verified=True)
    wanted = tokens_of(Plain(), temperature=1.5)[0]
    steps = []
    for seed in (SEED, SEED + 1):
        monkeypatch.setattr(k_forcing, "read_beside", drawing(seed))
        output, stats = tokens_of(strategy, temperature=1.5)
        assert output == wanted
        steps.append(stats.calls["target"])
    assert steps[0] == 7 < 16 < steps[1]  # 1 + 5 * 4 + 3 tokens


def test_what_it_was_not_tuned_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="layers"):
        Engine({"target": Toy(12)}).add(Request([1], KForcing(), name="k-forcing"))
    with pytest.raises(Unsupported, match=r"none ships.*foretell train k-forcing"):
        Engine({"target": target()}).add(Request([1], KForcing(), name="k-forcing"))

    @dataclasses.dataclass(frozen=True)
    class Other(Source):
        pass

    engine = Engine({"target": target()})
    strategy = KForcing(head=folder_of(tmp_path))
    with pytest.raises(BadConfig, match="reads the target itself"):
        engine.add(Request(TEXT, strategy, source=Other()))
    with pytest.raises(BadConfig, match="k-forcing cannot honour top_p"):
        engine.add(Request(TEXT, strategy, Sampling(top_p=0.9)))
    with pytest.raises(BadConfig, match="k-forcing:k=0"):
        KForcing(k=0)


def test_with_other_weights_it_is_refused(tmp_path: Path) -> None:
    other = Decoder(tiny("llama", dtype=torch.float64), "other")
    with torch.no_grad():
        other.loop.norm.weight.mul_(1.5)  # type: ignore[union-attr]
    with pytest.raises(BadModel, match="weights other than those of other, and what it says"):
        KForcing(head=folder_of(tmp_path)).bring({"target": other})

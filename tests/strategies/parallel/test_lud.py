"""Lexical units: what is said without a check beside transformers' own forwards, and that nothing
changes where rows are verified or never sure.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.drafters.heads.extra_rows import read_beside
from foretell.drafters.heads.networks.anchored import Rows
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import verify_and_commit
from foretell.strategies.parallel import lud
from foretell.strategies.parallel.lud import Lud
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.cache.users import run
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(9)]
VERIFIED = Lud(verified=True, beta=0.0, k=3)


@cache
def target() -> Any:
    model = Decoder(tiny("llama", dtype=torch.float64), "tiny")
    with torch.no_grad():  # or it would be sure of nothing
        model.hf.get_output_embeddings().weight.mul_(4)
    return model


def folder_of(where: Path) -> str:
    """A PAD row of random numbers that survive bfloat16."""
    head: Any = build_head("lud", target_shape(target()))
    torch.manual_seed(3)
    with torch.no_grad():
        head.vectors.copy_(torch.randn_like(head.vectors).bfloat16())
    save_head(head, None, where, target(), {})
    return str(where)


def tokens_of(strategy: Any, count: int = 24, **sampling: Any) -> tuple[list[int], Any]:
    options = Sampling(max_new_tokens=count, **{"temperature": 0.0, **sampling})
    (live,) = run({"target": target()}, Request(TEXT, strategy, options))
    return live.ctx.output, live.ctx.stats


@torch.inference_mode()
def by_loops(pad: torch.Tensor, k: int, beta: float, count: int) -> tuple[list[int], int]:
    """The text and the steps, of whole forwards over embeddings."""
    hf: Any = target().hf
    tokens, steps = list(TEXT), 0
    while len(tokens) < len(TEXT) + count:
        rows = min(k - 1, len(TEXT) + count - len(tokens) - 1)
        inputs = hf.get_input_embeddings()(torch.tensor(tokens))
        inputs = torch.cat([inputs, pad.to(inputs).repeat(rows, 1)])
        laws_ = hf(inputs_embeds=inputs[None], use_cache=False).logits[0].softmax(-1)
        laws_ = laws_[len(tokens) - 1 :]
        said = [int(laws_[0].argmax())]
        for law in laws_[1:]:
            if float(law.max()) < beta or int(law.argmax()) == said[-1]:
                break
            said.append(int(law.argmax()))
        tokens += said
        steps += 1
    return tokens[len(TEXT) :], steps


@pytest.mark.parametrize(("k", "beta"), [(4, 0.0), (3, 0.4), (4, 0.6)])
def test_what_is_said_is_that_of_whole_forwards(k: int, beta: float, tmp_path: Path) -> None:
    head = folder_of(tmp_path)
    strategy = Lud(head=head, k=k, beta=beta)
    pad = strategy.bring({"target": target()})["head"].head.vectors  # type: ignore[attr-defined]
    wanted, steps = by_loops(pad, k, beta, 24)
    output, stats = tokens_of(strategy)
    assert output == wanted and stats.calls["target"] == steps < 24
    assert stats.drafted == stats.accepted == 24 - steps, "each forward's first is the model's own"
    assert output != tokens_of(Plain())[0]


def test_the_comparison_has_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that repeats is noticed, and one that enters as something else."""
    strategy = Lud(head=folder_of(tmp_path), beta=0.0)
    right = tokens_of(strategy)[0]
    sure = Lud.is_sure
    monkeypatch.setattr(Lud, "is_sure", lambda self, scores, before: sure(self, scores, -1))
    repeating = tokens_of(strategy)[0]
    assert repeating != right
    monkeypatch.undo()
    entering = Rows.entering
    monkeypatch.setattr(Rows, "entering", lambda *args: entering(*args) * 0.9)
    assert tokens_of(strategy)[0] != right


@pytest.mark.parametrize("verified", [False, True])
def test_never_sure_it_is_plain_decoding(verified: bool, tmp_path: Path) -> None:
    strategy = Lud(head=folder_of(tmp_path), beta=1.5, verified=verified)
    for sampling in ({}, {"temperature": 0.9, "seed": 4}):
        plain, stats = tokens_of(Plain(), **sampling)
        output, own = tokens_of(strategy, **sampling)
        assert output == plain and own.calls == stats.calls


@pytest.mark.parametrize("setting", ["plain", "penalties", "end", "form"])
def test_verified_its_law_is_the_models(setting: str) -> None:
    laws.check_law(VERIFIED, setting, tokens=3 if setting == "plain" else 2, drafts=False)


def test_verified_its_tokens_are_those_of_plain_decoding() -> None:
    laws.check_greedy([VERIFIED], 8)
    laws.check_batch([VERIFIED])
    assert laws.check_ends(VERIFIED, 0.0)
    laws.check_close(VERIFIED, 1.0)


def test_trusted_it_keeps_no_row_of_a_pad_and_asks_nothing_behind_an_end() -> None:
    trusted = Lud(beta=0.0)
    laws.check_close(trusted, 0.0)
    laws.check_close(trusted, 1.0)
    assert laws.check_ends(trusted, 1.0)
    with pytest.raises(AssertionError, match="the law of the first"):
        laws.check_law(trusted, "plain", drafts=False)


def test_a_verifier_that_trusts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(ctx: Any, tree: Any, reply: Any) -> Any:
        path = [*range(1, len(tree))]
        best = int(reply.logits[len(tree) - 1].argmax())
        return verify_and_commit(ctx, tree, reply, lambda *_: Outcome(path, best))

    monkeypatch.setattr(lud, "verify_and_commit", trusting)
    with pytest.raises(AssertionError):
        laws.check_law(VERIFIED, "plain", drafts=False)
    with pytest.raises(AssertionError):
        laws.check_greedy([VERIFIED], 20, free=True)


def test_verified_rows_that_are_right_save_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that say what the model will say are accepted: the shift is right."""
    strategy = Lud(head=folder_of(tmp_path), verified=True)
    plain = tokens_of(Plain())[0]

    def knowing(ctx: Any, tree: TokenTree, beside: Any) -> Any:
        reply, below = yield from read_beside(ctx, tree, beside)
        for node, rows in enumerate(below):
            said = len(ctx.output) + tree.depths[node]
            for place, row in enumerate(rows):
                row.zero_()
                row[plain[min(said + place + 1, 23)]] = 99.0
        return reply, below

    monkeypatch.setattr(lud, "read_beside", knowing)
    monkeypatch.setattr(Lud, "is_sure", lambda self, scores, before: True)
    output, stats = tokens_of(strategy)
    assert output == plain and stats.calls["target"] == 7  # 1 + 5 * 4 + 3


def test_it_is_refused_where_its_rows_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="layers"):
        Engine({"target": Toy(12)}).add(Request([1], Lud(), name="lud"))
    with pytest.raises(Unsupported, match=r"none ships.*foretell train lud"):
        Engine({"target": target()}).add(Request([1], Lud(), name="lud"))

    @dataclasses.dataclass(frozen=True)
    class Other(Source):
        pass

    engine = Engine({"target": target()})
    with pytest.raises(BadConfig, match="reads the target itself"):
        engine.add(Request(TEXT, Lud(head=folder_of(tmp_path)), source=Other()))


def test_with_other_weights_it_is_refused(tmp_path: Path) -> None:
    head = folder_of(tmp_path)
    other = Decoder(tiny("llama", dtype=torch.float64), "other")
    with torch.no_grad():
        other.loop.norm.weight.mul_(1.5)  # type: ignore[union-attr]
    with pytest.raises(BadModel, match="weights other than those of other, and what it says"):
        Lud(head=head).bring({"target": other})
    wide = Decoder(tiny("llama", hidden_size=64, dtype=torch.float64), "wide")
    with pytest.raises(BadModel, match="hidden="):
        Lud(head=head).bring({"target": wide})

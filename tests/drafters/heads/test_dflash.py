"""DFlash as a drafter: one pass a step, and rows of a block are nobody's afterwards.

Its exactness is in test_laws.py, its network in tests/heads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cache.job import Job
from foretell.cache.states import TappedStates
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.heads.dflash import Dflash
from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.caches import UnknownStates
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws
from tests.cache.users import run
from tests.drafters.heads.networks.driving import trees
from tests.models.decoder.families import tiny

SPECS = ["dflash:length=2"]
TOY = Toy(5, seed=2, sharpness=6.0)
TEXT = [(11 * i + i * i) % 90 for i in range(15)]


def test_one_pass_drafts_a_chain() -> None:
    found, calls = trees(Dflash(length=4), TOY, tokens=9)
    assert found[0].parents == [-1, 0, 1, 2, 3] and found[0].sources[1:] == ["dflash"] * 4
    assert calls["head"] == sum(len(tree) > 1 for tree in found)
    whole, _ = trees(Dflash(length=64), TOY, tokens=30)
    assert len(whole[0]) == 8 and whole[0].tokens[:5] == found[0].tokens


@cache
def llama() -> Decoder:
    return Decoder(tiny("llama", num_hidden_layers=6), "llama")


def folder_of(where: Path) -> str:
    torch.manual_seed(1)
    head = build_head("dflash", target_shape(llama()))
    save_head(head, torch.arange(0, 90, 2), where, llama(), {})
    return str(where)


def test_a_transformers_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    models: dict[str, Model] = {"target": llama()}
    strategy = Speculative(Dflash(folder_of(tmp_path)), nodes=8)
    sampling = Sampling(max_new_tokens=10)
    texts = (TEXT, TEXT[:4])
    plain = [run(models, Request(t, Plain(), sampling))[0].ctx.output for t in texts]
    for options in ({"chunk": 4}, {"preempt": 3}):
        requests = [Request(t, strategy, sampling, tenant=str(len(t))) for t in texts]
        lives = run(models, *requests, **options)
        assert [live.ctx.output for live in lives] == plain
        assert all(live.ctx.stats.drafted for live in lives)


@torch.inference_mode()
def block_of(model: HeadModel, tokens: list[int]) -> torch.Tensor:
    """The rows (7, Vd) of a block after a text, as training computes them."""
    target = llama().cache()
    target.states = TappedStates(model.feeds)
    job, _ = target.prepare(Ask(TokenTree(tokens[-1]), rows=()), tokens, len(tokens))
    llama().forward([job])
    features = target.states.read_states(model.feeds, 0, len(tokens))[None]
    embedded = llama().embed(tokens)[None]
    texts = Texts(torch.tensor([tokens]), embedded, features, embedded)
    rows = [drafted.states[0, -1] for drafted in model.head.unroll_depths(texts, 7)]
    return model.output.logits(torch.stack(rows))


def drafts(folder: str) -> tuple[list[TokenTree], list[list[int]], Any]:
    """The trees of a request, the text of each, and the head."""
    found: list[TokenTree] = []
    texts: list[list[int]] = []

    class Spy(Dflash):
        def steps(self, ctx: Any, state: Any, budget: int) -> Any:
            texts.append(list(ctx.tokens))
            tree = yield from super().steps(ctx, state, budget)
            found.append(tree)
            return tree

    engine = Engine({"target": llama()})
    request = Request(TEXT, Speculative(Spy(folder), nodes=8), Sampling(max_new_tokens=12))
    live = engine.add(request)
    for _ in engine.run():
        pass
    return found, texts, live.ctx.models["head"]


def gap(folder: str) -> float:
    """The largest difference of a draft's probabilities from those that training computes."""
    largest = 0.0
    found, texts, model = drafts(folder)
    assert len(found) > 5
    for tree, text in zip(found, texts, strict=True):
        if len(tree) > 1:
            chances = block_of(model, text).softmax(-1).max(-1).values
            for node, chance in enumerate(chances[: len(tree) - 1].tolist()):
                given = tree.values[node + 1] / tree.values[node]
                largest = max(largest, abs(given - chance))
    return largest


def trusting(self: UnknownStates, *given: Any) -> None:
    """A row of a block may stand for its anchor, whose true row it is not."""
    FINISH(self, *given)
    self.trusted = len(self.tokens)


def in_order(self: UnknownStates, *given: Any) -> tuple[Job, bool]:
    """Masks see those before them alone."""
    job, whole = PREPARE(self, *given)
    job.seen = None if job.seen is None else job.seen.tril()
    return job, whole


FINISH, PREPARE = UnknownStates.finish, UnknownStates.prepare


def test_a_block_sees_the_text_and_itself_and_no_earlier_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    assert gap(folder) < 1e-5
    monkeypatch.setattr(UnknownStates, "finish", trusting)
    assert gap(folder) > 1e-3
    monkeypatch.setattr(UnknownStates, "finish", FINISH)
    monkeypatch.setattr(UnknownStates, "prepare", in_order)
    assert gap(folder) > 1e-3


def test_stale_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = laws.build("dflash:length=2")
    laws.check_close(strategy, 0.0, tokens=4)
    monkeypatch.setattr(UnknownStates, "finish", trusting)
    with pytest.raises(AssertionError, match="stale rows"):
        laws.check_close(strategy, 0.0, tokens=4)


def test_a_model_without_states_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="dflash cannot run on recurrent"):
        Dflash().bring({"target": ToyRecurrent()})

"""Drafts that leave a draft model after the first exit that is sure: which exit drafts and by what
law, and what is computed. What the lazy cache holds is in tests/drafters/model/test_lazy_layers.py;
the law of the output is in test_laws.py.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model.exit_table import FIELD
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.model.s2d import S2D, Sorted
from foretell.drafters.model.trimming import trim_head
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.ops.fingerprint import norm_mark
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.testing.toy_layers import ToyLayers
from tests import laws, tiny

SPECS = ["s2d:length=3,exits=1 2,thresholds=0.45 0.6", "s2d:best=yes,thresholds=0.5"]
TEXT = [5, 9, 13, 5, 9, 40, 2]
EXITS = (2, 4, 6)
TREES: list[TokenTree] = []  # that `Noting` drafted


@cache
def target() -> Decoder:
    return Decoder(tiny.llama(num_hidden_layers=6), "tiny", fused_blocks)


def draft(exits: Any = EXITS, **more: Any) -> Decoder:
    """A relative with exits; its later layers change little, so early exits are often right."""
    hf = tiny.relative(tiny.llama(num_hidden_layers=6), 0.02)
    body: Any = hf.get_decoder()
    with torch.no_grad():
        for layer in body.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    if exits:
        setattr(hf.config, FIELD, {"layers": list(exits), **more})
    return Decoder(hf, "draft", fused_blocks)


@cache
def usual() -> Decoder:
    return draft()


def run(spec: str, model: Model | None = None, count: int = 16, **options: Any) -> Live:
    setting = laws.Setting(Sampling(max_new_tokens=count, **options))
    made: dict[str, Model] = {"target": target(), "draft": model or usual()}
    return laws.generate(laws.build(spec, nodes=8), TEXT, setting, made)


class Noting(S2D):
    """Keeps the trees it drafts, with the text before them."""

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, reader, budget)
        TREES.append(copy.deepcopy(tree))
        TEXTS.append(list(ctx.tokens))
        return tree


TEXTS: list[list[int]] = []


def noted(drafter: S2D, model: Model | None = None, **options: Any) -> Live:
    TREES.clear()
    TEXTS.clear()
    setting = laws.Setting(Sampling(max_new_tokens=16, **options))
    made: dict[str, Model] = {"target": target(), "draft": model or usual()}
    return laws.generate(Speculative(drafter, nodes=8), TEXT, setting, made)


def sources() -> set[str]:
    return {source for tree in TREES for source in tree.sources[1:]}


# --- which exit drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thresholds_above_one_are_the_draft_model_itself(temperature: float) -> None:
    """To the token, and by as many forwards."""
    options = {"temperature": temperature, "seed": 1}
    plain = run("draft:length=3", **options)
    for thresholds in ("2", "1.5 9"):
        ours = run(f"s2d:length=3,thresholds={thresholds}", **options)
        assert ours.ctx.output == plain.ctx.output
        assert ours.ctx.stats.accepted == plain.ctx.stats.accepted
        assert ours.ctx.stats.calls["s2d"] == plain.ctx.stats.calls["draft"]
    noted(Noting(3, thresholds=(2.0,)), temperature=temperature)
    assert sources() == {"s2d-6"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thresholds_of_zero_are_the_first_exit(temperature: float) -> None:
    live = noted(Noting(3, thresholds=(0.0,)), temperature=temperature)
    assert sources() == {"s2d-2"} and live.ctx.stats.drafted
    assert live.ctx.stats.calls["s2d"] == live.ctx.stats.drafted


@torch.inference_mode()
def row_at(exit_layer: int, tokens: list[int]) -> torch.Tensor:
    """The exit's logits by transformers' own forward."""
    hf: Any = usual().hf
    out = hf.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    h = out.last_hidden_state if exit_layer == 6 else hf.model.norm(out.hidden_states[exit_layer])
    row: torch.Tensor = hf.lm_head(h[0, -1])
    return row


def test_a_token_is_drawn_by_the_law_of_the_first_exit_that_is_sure() -> None:
    thresholds = (0.15, 0.14)
    noted(Noting(4, thresholds=thresholds), temperature=0.8, seed=1)
    assert sources() == {"s2d-2", "s2d-4", "s2d-6"}
    for text, tree in zip(TEXTS, TREES, strict=True):
        for node in range(1, len(tree)):
            before = [*text, *tree.tokens_to(tree.parents[node])]
            rows = {exit_layer: row_at(exit_layer, before) for exit_layer in EXITS}
            sure = [e for e, t in zip(EXITS, thresholds, strict=False) if most(rows[e]) >= t]
            exit_layer = next(iter(sure), 6)
            assert tree.sources[node] == f"s2d-{exit_layer}"
            law = tree.laws[node]
            assert law is not None
            q = (rows[exit_layer] / 0.8).softmax(-1)
            assert torch.allclose(law.probs, q, atol=1e-5)


def most(row: torch.Tensor) -> float:
    return float(row.softmax(-1).max())


def test_a_draft_ends_where_the_last_exit_is_not_sure() -> None:
    lengths = set()
    for confidence in (0.0, 0.15):
        noted(Noting(5, thresholds=(0.4,), confidence=confidence), temperature=1.0)
        for text, tree in zip(TEXTS, TREES, strict=True):
            chain = [*text, *tree.tokens[1:]]
            lengths.add(len(tree))
            if len(tree) < min(6, len(TEXT) + 16 - len(text)) and tree.tokens[-1] != 0:
                assert most(row_at(6, chain)) < confidence
            for node in range(1, len(tree)):
                if tree.sources[node] == "s2d-6":
                    assert most(row_at(6, chain[: len(text) + node - 1])) >= confidence
    assert {1, 6} < lengths, "drafts of one length"


# --- what is computed


class Counting(Sorted):
    """Notes of every job its layers and positions."""

    def compute(self, jobs: Any, taps: Any) -> Any:
        RAN.extend((job.layers, job.positions) for job in jobs)
        return super().compute(jobs, taps)


RAN: list[tuple[tuple[int, ...], list[int]]] = []


def test_later_layers_are_run_together_and_none_twice_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A position is computed again only where its token was rejected."""
    monkeypatch.setattr("foretell.drafters.model.s2d.Sorted", Counting)
    RAN.clear()
    live = run("s2d:length=3,thresholds=0.12 0.15,best=yes")
    pairs = [(layer, at) for layers, positions in RAN for layer in layers for at in positions]
    rejected = live.ctx.stats.drafted - live.ctx.stats.accepted
    assert 0 < len(pairs) - len(set(pairs)) <= rejected * 6
    first = [layers for layers, _ in RAN if layers[0] == 0]
    later = [positions for layers, positions in RAN if layers[0] > 0]
    assert all(layers == (0, 1) for layers in first) and later
    assert any(len(positions) > 1 for positions in later[2:]), "none was ever filled in"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_were_lost_are_computed_again(temperature: float) -> None:
    """A request that is paused in the middle of a draft goes on as if alone."""
    spec = "s2d:length=3,thresholds=0.12 0.15"
    want = run(spec, temperature=temperature, seed=3).ctx.output
    for steps in (2, 3, 4, 6, 9):
        engine = Engine({"target": target(), "draft": usual()})
        sampling = Sampling(max_new_tokens=16, temperature=temperature, seed=3)
        live = engine.add(Request(TEXT, laws.build(spec, nodes=8), sampling))
        for _ in range(steps):
            engine.step()
        assert engine.preempt_request(live)
        laws.finish(engine, live)
        assert live.ctx.output == want


def test_greedy_tokens_are_plain_decodings_with_a_trimmed_head() -> None:
    kept = [token for token in range(usual().vocab) if token % 13]
    model = trim_head(draft(), kept)
    live = run("s2d:length=3,thresholds=0.12 0.15", model)
    assert live.ctx.output == run("plain").ctx.output and live.ctx.stats.accepted


# --- the law has power


class Deepest(S2D):
    """A slip: it says of its tokens that they were drawn from the last exit's law."""

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = yield from super().steps(ctx, reader, budget)
        for node in range(1, len(tree)):
            last: Any = reader.model
            layers = tuple(range(last.exits[-1]))
            reply = yield Ask(tree, "s2d", ctx.branch, rows=[node - 1], layers=layers)
            output = [*ctx.output, *tree.tokens_to(node - 1)]
            tree.laws[node] = Law(ctx.sampler.law(reply.logits[0], output))
        return tree


def test_a_law_of_another_exit_is_caught() -> None:
    options: dict[str, Any] = {"length": 2, "exits": (1, 2), "thresholds": (0.45, 0.6)}
    laws.check_law(Speculative(S2D(**options), nodes=3), "plain", 2)
    with pytest.raises(AssertionError, match="off by"):
        laws.check_law(Speculative(Deepest(**options), nodes=3), "plain", 2)


def test_the_toys_draft_from_more_than_one_exit() -> None:
    """Or the laws of test_laws.py would prove little."""
    for options in ({}, {"length": 3, "exits": (1, 2), "thresholds": (0.45, 0.6)}):
        strategy = Speculative(Noting(**options), nodes=6)
        TREES.clear()
        for seed in range(4):
            setting = laws.Setting(Sampling(temperature=1.0, seed=seed, max_new_tokens=12))
            laws.generate(strategy, [0, 1, 2, seed % 3], setting, laws.world(strategy))
        assert len(sources()) == 3


# --- the draft model's table, and what is refused


def made_for(model: Decoder, drafter: S2D) -> Sorted:
    found = drafter.bring({"target": target(), "draft": model})["s2d"]
    assert isinstance(found, Sorted)
    return found


def test_thresholds_are_the_targets_unless_they_are_given() -> None:
    table = {"norm": norm_mark(target()), "name": "tiny"}
    tables = [
        {**table, "norm": "another", "format": "float32", "thresholds": [0.1, 0.1]},
        {**table, "format": "int4", "thresholds": [0.2, 0.3]},
        {**table, "format": "float32", "thresholds": [0.5, 2.0]},
    ]
    found = made_for(draft(targets=tables), S2D())
    assert found.exits == (2, 6) and found.thresholds == [0.5, 0.0]  # above 1: left out
    other = made_for(draft(targets=tables[:2]), S2D())  # of the same weights in another format
    assert other.exits == EXITS and other.thresholds == [0.2, 0.3, 0.0]
    for others in ([], tables[:1]):
        assert made_for(draft(targets=others), S2D()).thresholds == [0.6, 0.6, 0.0]
    given = made_for(draft(targets=tables), S2D(thresholds=(0.9, 0.8)))
    assert given.exits == EXITS and given.thresholds == [0.9, 0.8, 0.0]
    assert made_for(draft(), S2D(exits=(4,))).exits == (4, 6)
    assert made_for(draft((1, 6)), S2D(thresholds=(0.0,))).exits == (1, 6)


def test_a_model_that_was_not_trained_with_the_exits_drafts_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"not trained with exits after 2 4 6 .*--exits"):
        assert made_for(draft(None), S2D()).exits == EXITS
    with pytest.warns(UserWarning, match="exits after 3 6"):
        made_for(draft(), S2D(exits=(3,)))


@pytest.mark.parametrize(
    "told",
    [
        "six",
        {},
        {"layers": [2, 9]},
        {"layers": [4, 2, 6]},
        {"layers": [2, 6], "targets": [{"norm": "a", "format": "int8", "thresholds": [0.1, 0.2]}]},
        {"layers": [2, 6], "targets": [{"norm": "a", "thresholds": [0.1]}]},
        {"layers": [2, 6], "targets": [{"norm": "a", "format": "int8", "thresholds": [-1]}]},
    ],
)
def test_a_damaged_table_is_told_in_a_line(told: Any) -> None:
    model = draft(None)
    setattr(model.hf.config, FIELD, told)
    with pytest.raises(BadModel, match=r"draft: foretell_exits .*train it again") as caught:
        made_for(model, S2D())
    assert "\n" not in str(caught.value)


def test_models_whose_layers_cannot_be_run_one_by_one_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"s2d cannot run on toy: .*one by one"):
        Engine({"target": Toy(8), "draft": Toy(8)}).add(Request([1], Speculative(S2D())))
    with pytest.raises(Unsupported, match="draft"):
        Engine({"target": Toy(8)}).add(Request([1], Speculative(S2D())))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"exits": (2, 5)}, "s2d:exits='2 5': must be numbers of layers from 1 to 4"),
        ({"thresholds": (0.1, 0.2, 0.3)}, "one for each of the 2 exits before the last"),
    ],
)
def test_a_bad_value_is_told(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        S2D(**fields).bring({"target": ToyLayers(4), "draft": ToyLayers(4)})
    assert said in str(caught.value)


def test_best_tokens_draw_nothing_and_leave_a_seed_its_tokens() -> None:
    strategy = laws.build("s2d:thresholds=0.5,best=yes")
    assert isinstance(strategy, Speculative) and not strategy.drafter.draws
    laws.check_seeds(strategy)
    assert dataclasses.replace(strategy.drafter, best=False).draws  # type: ignore[type-var]

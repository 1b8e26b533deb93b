"""The trainer of rows through the target: what they learn, where, and that runs go on."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.tree import TokenTree
from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.folder import load_head
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import pack_layers
from foretell.speculation.costs import Costs
from foretell.train import answers
from foretell.train.heads.anchored import (
    RANKS,
    AnchoredRun,
    Through,
    anchored_loss,
    anchors_of,
    begin_anchored,
    hits_of,
    plan_anchored,
    ranks_in,
    runs_through_target,
    train_anchored,
)
from foretell.train.heads.head import TrainHead
from foretell.train.heads.head_data import NONE, Corpus, Known
from tests.models.decoder.families import tiny

PROMPT, LENGTH = 4, 20
SETTINGS = TrainHead(kind="ppd", tokens=64 * 6, batch=64, micro=64, window=32, anchors=8)


@cache
def target() -> Decoder:
    return Decoder(tiny("llama"), "tiny")


@torch.inference_mode()
def greedy(prompt: list[int]) -> answers.Text:
    """The target's best answer, as a file of answers has it."""
    tokens = list(prompt)
    while len(tokens) < LENGTH:
        tokens.append(int(target().hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    best = np.array(tokens[PROMPT:], np.int32)[:, None]
    return answers.Text(np.array(tokens, np.int32), PROMPT, best, np.zeros(best.shape, np.float16))


@cache
def known(seed: int = 0) -> Known:
    text = greedy(np.random.default_rng(seed).integers(0, 90, PROMPT).tolist())
    return Known(text.tokens, text.prompt, text.top_tokens[:, 0], NONE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("answers") / "0.safetensors"
    answers.save_texts(path, [greedy(draw.integers(0, 90, PROMPT).tolist()) for _ in range(6)])
    return [path]


def fresh(**settings: Any) -> Anchored:
    head = begin_anchored(target(), dataclasses.replace(SETTINGS, **settings))
    head.take_weights(target())
    return head


def logits_by_row(head: Anchored, text: Known, anchor: int) -> torch.Tensor:
    """(P, V) of the rows of one anchor, of an own forward of the text up to it."""
    through = Through(target())
    tokens = torch.from_numpy(text.tokens[: anchor + 1].astype(np.int64))
    with torch.no_grad():
        _, states = through(head, tokens, torch.tensor([anchor]))
        logits: torch.Tensor = target().hf.get_output_embeddings()(states[0])
    return logits


def test_the_loss_is_the_divergence_from_the_targets_laws_at_each_place() -> None:
    """By a loop over anchors and rows, each of a text of its own."""
    text, head = known(), fresh(anchors=99)
    through = Through(target())
    loss = anchored_loss(head, text, through, dataclasses.replace(SETTINGS, anchors=99), 0).item()
    with torch.no_grad():
        tokens = torch.from_numpy(text.tokens[None].astype(np.int64))
        laws = target().hf(tokens).logits[0].softmax(-1)
    by_row: list[list[float]] = [[], [], []]
    for anchor in range(PROMPT - 2, LENGTH - 2):
        said = logits_by_row(head, text, anchor).log_softmax(-1)
        for i in range(3):
            if anchor + i + 2 < LENGTH:  # the token that row i speaks of is in the answer
                law = laws[anchor + i + 1]
                by_row[i].append(float((law * (law.log() - said[i])).sum()))
    expected = sum(0.8**i * np.mean(values) for i, values in enumerate(by_row)) / 3
    assert loss == pytest.approx(expected, rel=1e-4)


def test_anchors_are_places_whose_rows_speak_of_the_answer() -> None:
    text = known()
    every = anchors_of(text, 99, 0).tolist()
    assert every == list(range(PROMPT - 2, LENGTH - 2))
    some = anchors_of(text, 5, 0).tolist()
    assert len(some) == 5 and some == sorted({*some}) and {*some} < {*every}
    assert some != anchors_of(text, 5, 1).tolist()


@pytest.mark.parametrize("kind", ["ppd", "hidden-transfer"])
def test_ranks_are_those_of_the_texts_own_tokens(kind: str) -> None:
    head, text = fresh(kind=kind), known()
    (ranks,) = ranks_in(head, [text], Through(target()))
    anchors = range(PROMPT - 2, LENGTH - 4)
    assert len(ranks) == len(anchors)
    for row, anchor in zip(ranks, anchors, strict=True):
        order = logits_by_row(head, text, anchor).argsort(-1, descending=True).tolist()
        own = [order[i].index(text.tokens[anchor + i + 2]) for i in range(3)]
        assert row.tolist() == [min(rank, RANKS) for rank in own]
    other = Known(text.tokens, text.prompt, text.top_tokens + 1, NONE)
    assert ranks_in(head, [other], Through(target())) == []  # it is not greedy


def test_hits_count_a_row_if_all_before_it_are_right() -> None:
    ranks = [np.array([[0, 0, 1], [0, 3, 0]]), np.array([[1, 0, 0], [0, 0, 0]])]
    assert hits_of(ranks) == [0.75, 0.5, 0.25]
    assert hits_of([]) == []


@pytest.mark.parametrize(("kind", "rate"), [("ppd", 0.1), ("hidden-transfer", 0.01)])
def test_one_text_is_learnt_by_heart(kind: str, rate: float) -> None:
    head, text, through = fresh(kind=kind), known(), Through(target())
    settings = dataclasses.replace(SETTINGS, anchors=99)
    optimiser = torch.optim.Adam(head.parameters(), lr=rate)
    losses = []
    for _ in range(40):
        loss = anchored_loss(head, text, through, settings, 0)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(weight.grad is None for weight in target().hf.parameters())


def test_weights_loaded_for_inference_are_trained_beside_and_stay_as_they_are() -> None:
    with torch.inference_mode():
        model = Decoder(tiny("llama"), "tiny")
        for module in model.hf.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(weight.clone(), requires_grad=False))
    before = model.score([3, 5, 7], TokenTree(7))
    head = fresh()
    loss = anchored_loss(head, known(), Through(model), SETTINGS, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.vectors.grad is not None
    assert torch.equal(model.score([3, 5, 7], TokenTree(7)), before)
    again = anchored_loss(head, known(), Through(target()), SETTINGS, 0)
    assert loss.item() == pytest.approx(again.item())


def run(files: list[Path], out: Path, settings: TrainHead, **more: Any) -> dict[str, Any]:
    lm: Any = SimpleNamespace(models={"target": target()})
    return train_anchored(lm, files, out, settings, quiet=True, **more)


@pytest.mark.parametrize("kind", ["ppd", "hidden-transfer"])
def test_stopped_and_run_again_it_is_the_same_to_the_last_bit(
    kind: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(SETTINGS, kind=kind)
    report = run(files, tmp_path / "whole", settings)
    assert report["tokens_seen"] == 64 * 6 and len(report["hits"]) == 3
    right = AnchoredRun.advance_on
    steps = 0

    def stopping(self: AnchoredRun, *args: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 4:
            self.save()
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(AnchoredRun, "advance_on", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path / "parts", settings)
    monkeypatch.undo()
    run(files, tmp_path / "parts", settings)
    one, other = (
        load_head(tmp_path / name / "head", target())[0].state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    begun = fresh(kind=kind).state_dict()
    assert any(not torch.allclose(one[name], begun[name], atol=2e-3) for name in one)
    told = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert told["ranks"] == report["ranks"] and len(report["ranks"]) == 3
    head, _ = load_head(tmp_path / "whole" / "head", target(), kind)
    assert head.ranks == report["ranks"]


def test_it_goes_on_from_another_of_the_same_options(files: list[Path], tmp_path: Path) -> None:
    run(files, tmp_path / "first", SETTINGS)
    settings = dataclasses.replace(SETTINGS, tokens=64, rate=1e-9)
    run(files, tmp_path / "second", settings, init=tmp_path / "first" / "head")
    first, _ = load_head(tmp_path / "first" / "head", target())
    second, _ = load_head(tmp_path / "second" / "head", target())
    assert torch.equal(first.state_dict()["vectors"], second.state_dict()["vectors"])
    other = dataclasses.replace(settings, depths=2)
    with pytest.raises(BadConfig, match="has options"):
        run(files, tmp_path / "third", other, init=tmp_path / "first" / "head")


def test_settings_become_options() -> None:
    assert begin_anchored(target(), dataclasses.replace(SETTINGS, depths=2)).deepest == 2
    maps = begin_anchored(target(), TrainHead(kind="hidden-transfer", entry=2))
    assert (
        maps.entry == 2 and begin_anchored(target(), TrainHead(kind="hidden-transfer")).entry == 1
    )
    with pytest.raises(BadConfig, match="ppd: has no option 'entry'"):
        begin_anchored(target(), dataclasses.replace(SETTINGS, entry=1))
    for field, value in (("anchors", 0), ("rate", -1.0)):
        with pytest.raises(BadConfig, match=f"{field}={value}"):
            dataclasses.replace(SETTINGS, **{field: value})
    assert runs_through_target("ppd") and runs_through_target("hidden-transfer")
    assert not runs_through_target("medusa") and not runs_through_target("nothing")


def test_hours_are_told_by_the_costs_of_forwards() -> None:
    costs = Costs()
    costs.seconds = dict.fromkeys((1, 64, 128), 3.6)
    settings = dataclasses.replace(SETTINGS, window=72, batch=72, micro=72, tokens=128_000)
    told = plan_anchored(100, 48, settings, 3, costs)
    # 4,800 tokens 48 at a time; 1,000 forwards of 128, and 3 * 3 * 8 / 72 = 1 row's work beside.
    assert "4,800 tokens of answers: 0.1 hours" in told and "about 2.0 hours" in told


def test_packed_weights_are_refused_by_name() -> None:
    hf = tiny("llama").bfloat16()
    pack_layers(hf, "int8")
    with pytest.raises(Unsupported, match="states-dtype bfloat16"):
        Through(Decoder(hf, "tiny"))


def test_nothing_is_held_back_from_too_few_answers(tmp_path: Path) -> None:
    answers.save_texts(tmp_path / "0.safetensors", [greedy([1, 2, 3, 4])])
    with pytest.raises(BadConfig, match="too few answers"):
        Corpus([tmp_path / "0.safetensors"], None, 32)

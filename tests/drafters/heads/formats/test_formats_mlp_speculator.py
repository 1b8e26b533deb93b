"""MLP speculators as IBM publishes them, against their computation written plainly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretell.drafters.heads.formats.mlp_speculator import fold_head
from foretell.drafters.heads.formats.reading import check_taps, list_formats, load_any_head
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.drafters.heads.networks.mlp_speculator import MlpSpeculator
from foretell.drafters.heads.networks.model import HeadModel
from foretell.errors import BadConfig, BadModel
from tests.drafters.heads.networks.published import (
    TEXT,
    Tensors,
    change,
    check_greedy,
    check_our_layout,
    drawn,
    logits_of,
    said,
    states_of,
    target,
    written,
)

HIDDEN, VOCAB, STEPS = 32, 97, 4
BELOW = [7, 50, 12]
NAMES = ("emb", "proj", "head", "ln")


def folder(
    tied: bool = False, scaled: bool = False, inner: int = 0, once: bool = False
) -> tuple[dict[str, Any], Tensors]:
    """`once`: what the steps share stands in the file one time."""
    width = inner or HIDDEN
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(STEPS):
        shapes[f"emb.{i}.weight"] = shapes[f"head.{i}.weight"] = (VOCAB, width)
        shapes[f"proj.{i}.weight"] = (width, width if i else HIDDEN)
        shapes[f"ln.{i}.weight"] = shapes[f"ln.{i}.bias"] = (width,)
    tensors = drawn(shapes)
    if tied:
        for name in list(tensors):
            part, step, end = name.split(".")
            first = 1 if part == "proj" else 0
            if int(step) > first:
                tensors[name] = tensors[f"{part}.{first}.{end}"].clone()
                if once:
                    del tensors[name]
    told = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": HIDDEN,
        "inner_dim": inner,
        "n_predict": STEPS,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    return told, {f"speculator.{name}": t for name, t in tensors.items()}


def twin(told: dict[str, Any], tensors: Tensors, below: Sequence[int]) -> list[torch.Tensor]:
    """What the steps say after the text and these tokens."""
    t = {name.removeprefix("speculator."): value for name, value in tensors.items()}
    norm: Any = target().loop.norm  # type: ignore[union-attr]
    state = norm(states_of(target(), (3,))[len(TEXT) - 1])
    if told["scale_input"]:
        state = state * torch.rsqrt(state.square().mean() + 1e-6) / math.sqrt(2)
    inner = told["inner_dim"] or told["emb_dim"]
    state_weight = 0.5 ** (0.5 / told["n_predict"])
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    found = []
    for i, token in enumerate([TEXT[-1], *below]):
        first = min(i, 1) if told["tie_weights"] else i  # of the projections
        own = 0 if told["tie_weights"] else i
        z = t[f"proj.{first}.weight"] @ state
        z = z + token_weight / state_weight * t[f"emb.{own}.weight"][token]
        z = z * torch.rsqrt(z.square().mean() + 1e-6) * t[f"ln.{own}.weight"] + t[f"ln.{own}.bias"]
        state = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        found.append(t[f"head.{own}.weight"] @ state)
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "untied and wider": {"inner": 80},
    "untied and scaled": {"scaled": True, "inner": 20},
    "tied": {"tied": True, "scaled": True},
    "tied and kept once": {"tied": True, "scaled": True, "once": True, "inner": 33},
}


def close(place: Path, wanted: Sequence[torch.Tensor]) -> None:
    rows = said(target(), place, "mlp-speculator", BELOW)
    for ours, theirs in zip(rows, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_steps_say_what_the_published_code_says(layout: str, tmp_path: Path) -> None:
    told, tensors = folder(**LAYOUTS[layout])
    place = written(tmp_path / "theirs", told, tensors)
    close(place, twin(told, tensors, BELOW))


@pytest.mark.parametrize("layout", ["untied and wider", "tied"])
def test_greedy_tokens_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    place = written(tmp_path / "theirs", *folder(**LAYOUTS[layout]))
    check_greedy(target(), "mlp-speculator", place)
    check_our_layout(target(), place, "mlp-speculator", tmp_path / "ours")
    with pytest.raises(BadConfig, match="taps='output'"):
        load_any_head(place, target(), taps="output")
    assert list(check_taps(place, target(), TEXT)) == ["mlp-speculator"]


@torch.inference_mode()
def test_slips_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of another depth, and a state that is not scaled."""
    told, tensors = folder(scaled=True)
    place = written(tmp_path, told, tensors)
    wanted = twin(told, tensors, BELOW)
    taken = MlpSpeculator.token_rows
    with monkeypatch.context() as patch:
        patch.setattr(
            MlpSpeculator, "token_rows", lambda self, e, ids, depth: taken(self, e, ids, 0)
        )
        with pytest.raises(AssertionError):
            close(place, wanted)
    with pytest.raises(AssertionError):
        close(written(tmp_path, {**told, "scale_input": False}, tensors), wanted)


@torch.inference_mode()
def test_steps_are_counted_in_the_file(tmp_path: Path) -> None:
    told, tensors = folder()
    close(written(tmp_path, {**told, "n_predict": 2}, tensors), twin(told, tensors, BELOW))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_what_is_exported_says_the_same_when_it_is_loaded(layout: str, tmp_path: Path) -> None:
    told, tensors = folder(**LAYOUTS[layout])
    place = written(tmp_path / "in", told, {n: t.bfloat16() for n, t in tensors.items()})
    head, kept = load_any_head(place, target())
    list_formats()["mlp-speculator"].write_head(head, kept, target(), tmp_path / "out")
    before, after = (
        said(target(), folder, "mlp-speculator", BELOW) for folder in (place, tmp_path / "out")
    )
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found = load_file(tmp_path / "out" / "model.safetensors")
    # vLLM strips `speculator.` and reads one of what is tied.
    assert {*found} <= {*folder(**{**LAYOUTS[layout], "once": False})[1]}
    once = folder(**{**LAYOUTS[layout], "once": True})[1]
    assert {*found} == {*once}
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert {name: config[name] for name in told} == told
    assert len(config["top_k_tokens_per_head"]) == STEPS


def trained() -> MlpSpeculator:
    """A head of our build whose weights and norms are all of some size."""
    torch.manual_seed(3)
    head = build_head("mlp-speculator", target_shape(target()))
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    assert isinstance(head, MlpSpeculator)
    return head.eval()


def rows_of(head: MlpSpeculator) -> list[torch.Tensor]:
    with torch.inference_mode():
        model = HeadModel(head, None, target())
        return logits_of(model, states_of(target(), head.taps), BELOW[:2])


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """How far rows are from being multiples of each other."""
    pairs = zip(ours, theirs, strict=True)
    return max(1 - float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs)


def test_a_head_trained_here_drafts_the_same_tokens_when_it_is_exported(tmp_path: Path) -> None:
    head = trained()
    exact = rows_of(fold_head(head, target()))
    assert apart(rows_of(head), exact) < 1e-5
    list_formats()["mlp-speculator"].write_head(head, torch.tensor([1, 5]), target(), tmp_path)
    again, kept = load_any_head(tmp_path, target(), "mlp-speculator")
    assert isinstance(again, MlpSpeculator) and kept is None and again.deepest == 3
    rounded = rows_of(again)
    assert apart(exact, rounded) < 1e-3
    assert [int(row.argmax()) for row in rows_of(head)] == [int(row.argmax()) for row in exact]
    assert max(float((a - b).abs().max()) for a, b in zip(rows_of(head), exact, strict=True)) > 0.1


def test_an_eps_that_is_not_folded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    head = trained()
    head.inner.eps = 0.5
    assert apart(rows_of(head), rows_of(fold_head(head, target()))) < 1e-5
    monkeypatch.setattr("foretell.drafters.heads.formats.mlp_speculator.EPS", 0.5)
    assert apart(rows_of(head), rows_of(fold_head(head, target()))) > 1e-3


def test_a_state_that_is_not_centred_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    head = trained()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "mean", lambda self, *args, **kwargs: 0 * self[:1])
        bare = fold_head(head, target())
    assert apart(rows_of(head), rows_of(bare)) > 1e-3


def test_what_the_layout_cannot_hold_is_not_written(tmp_path: Path) -> None:
    head = build_head("medusa", target_shape(target()))
    with pytest.raises(BadConfig, match="holds no medusa head"):
        list_formats()["mlp-speculator"].write_head(head, None, target(), tmp_path)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 98}, "vocab_size=98"),
    "width": ({"emb_dim": 64}, "emb_dim=64"),
    "inner": ({"inner_dim": 48}, r"emb.0.weight is \(97, 32\)"),
    "no number": ({"inner_dim": "wide"}, "inner_dim='wide'"),
    "steps": ({"n_predict": 5}, "n_predict=5, and the file has 4"),
    "none": ({"n_predict": 0}, "n_predict=0"),
    "table": ({"speculator.emb.1.weight": None}, "lacks the table of step 1"),
    "missing": ({"speculator.ln.2.bias": None}, "lacks ln.2.bias"),
    "unknown": ({"speculator.cell.0.weight": torch.ones(2)}, "has cell.0.weight"),
    "rows": ({"speculator.head.3.weight": torch.ones(98, 32)}, r"head.3.weight is \(98, 32\)"),
    "tied": ({"tie_weights": True}, "emb.0.weight and emb.1.weight differ"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, message = WRONG[wrong]
    told, tensors = folder()
    change(told, tensors, changes)
    with pytest.raises(BadModel, match=message):
        load_any_head(written(tmp_path, told, tensors), target())

"""Judges on disk, for whom they were made, and the states that they read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from foretell.core.types import Reply
from foretell.errors import BadFile, Unsupported
from foretell.ops import assets
from foretell.ops.fingerprint import norm_mark
from foretell.testing.toy import Toy
from foretell.verification import judge_model as judging
from foretell.verification.judge_model import (
    FILE,
    SCHEMA,
    LinearJudge,
    judge_of,
    load_judge,
    save_judge,
    states_at_nodes,
)

GOOD = {"weight": torch.ones(3), "bias": torch.zeros(1), "excluded": torch.tensor([1])}


def judge(norm: str = "") -> LinearJudge:
    weight = torch.tensor([0.5, -1.0, 2.0])
    return LinearJudge(weight, torch.tensor(0.25), frozenset({4, 7}), norm)


def decoder(mark: float) -> SimpleNamespace:
    """As much of a target as a judge is chosen by."""
    norm = SimpleNamespace(weight=torch.full((3,), mark))
    loop = SimpleNamespace(norm=norm)
    return SimpleNamespace(name="decoder", caps=frozenset({"taps"}), loop=loop)


def test_a_judge_comes_back_as_it_was(tmp_path: Path) -> None:
    save_judge(judge("abc"), tmp_path / "j")
    found = load_judge(tmp_path / "j")
    assert torch.equal(found.weight, judge().weight) and float(found.bias) == 0.25
    assert (found.excluded, found.norm, found.width) == (frozenset({4, 7}), "abc", 3)


def test_a_chance_is_the_sigmoid_of_a_product() -> None:
    states = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 60.0]])
    want = torch.tensor([0.75, 1.25, 120.25]).sigmoid().tolist()
    assert judge().good_chances(states) == pytest.approx(want)
    assert judge().good_chances(states.bfloat16()) == pytest.approx(want)
    assert max(judge().good_chances(states)) <= 1, "with delta=1 nothing may pass"


def test_states_are_found_by_node_whatever_stands_before_the_tree() -> None:
    states = torch.arange(10.0).reshape(5, 2)
    reply = Reply(torch.empty(0), {3: states * 0, 7: states}, [], [-2, -1, 0, 1, 2])
    assert torch.equal(states_at_nodes(reply, [2, 1]), states[[4, 3]])


@pytest.mark.parametrize(
    ("tensors", "about", "said"),
    [
        (GOOD, {}, "has not the schema"),
        (GOOD, {"schema": "foretell.judge/9"}, "has not the schema"),
        ({"weight": torch.ones(3)}, {"schema": SCHEMA}, "has not the schema"),
        ({**GOOD, "bias": torch.zeros(2)}, {"schema": SCHEMA}, "its tensors are not"),
        ({**GOOD, "weight": torch.ones(1, 3)}, {"schema": SCHEMA}, "its tensors are not"),
        ({**GOOD, "weight": torch.tensor([1.0, torch.nan])}, {"schema": SCHEMA}, "not a finite"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], about: dict[str, str], said: str
) -> None:
    save_file(tensors, tmp_path / "j", about)
    with pytest.raises(BadFile, match=said) as caught:
        load_judge(tmp_path / "j")
    assert "foretell train judge" in str(caught.value) and "\n" not in str(caught.value)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    for name in ("text", "missing"):
        with pytest.raises(BadFile, match="cannot be read"):
            load_judge(tmp_path / name)


def test_a_judge_of_another_target_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    save_judge(judge(norm_mark(decoder(1.0))), Path(path))
    assert judge_of(decoder(1.0), path).width == 3
    with pytest.raises(BadFile, match="made for another target than decoder"):
        judge_of(decoder(2.0), path)
    with pytest.raises(BadFile, match="made for another target than toy"):
        judge_of(Toy(4), path)


def test_the_one_that_ships_is_found_by_the_targets_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mark in (("one", 1.0), ("two", 2.0)):
        save_judge(judge(norm_mark(decoder(mark))), tmp_path / name / FILE)
    monkeypatch.setattr(assets, "model_folders", lambda: [tmp_path])
    judging._shipped_judges.cache_clear()
    try:
        assert judge_of(decoder(2.0), "").norm == norm_mark(decoder(2.0))
        with pytest.raises(Unsupported, match="none ships for this model; give rule=judge,weights"):
            judge_of(decoder(3.0), "")
        assert judge_of(Toy(4), "").width == 2, "a toy has one of its own, for the laws"
    finally:
        judging._shipped_judges.cache_clear()

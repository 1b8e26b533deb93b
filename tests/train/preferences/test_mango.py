"""train/preferences/mango.py: what is minimised, what is read, and that comments are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadConfig
from foretell.train.preferences.mango import TrainMango, read_mango
from foretell.train.preferences.preferences import train_pairs
from tests import tiny

SETTINGS = TrainMango(
    rank=4, length=120, epochs=4, batch=4, micro=2, rate=0.01, margin=0.5, precision="float32"
)


def test_the_loss_is_that_of_the_paper() -> None:
    """Beside the plain formula; the gradient of the hinge is there where the margin lacks."""
    config = TrainMango(margin=0.5, hinge=2.0)
    now = torch.tensor([[-20.0, -11.0], [-10.0, -24.0], [-20.0, -9.0]], dtype=torch.float64)
    counts = torch.tensor([[10, 11], [10, 12], [10, 10]])
    now.requires_grad_()
    found = config.loss(now, now, counts)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    # It lacks 0.5 - (-2 - -1) = 1.5; is above by 1 - 0.5; has too few tokens without comments.
    assert found.tolist() == pytest.approx([2 + 2 * 1.5, 1, 2])
    assert gradient[0].tolist() == pytest.approx([-0.1 - 2 * 0.1, 2 / 11])
    assert gradient[1:].tolist() == [[-0.1, 0], [-0.1, 0]]
    plain = TrainMango(hinge=0.0).loss(now, now, counts)
    assert plain.tolist() == pytest.approx([2, 1, 2]) and bool((found >= plain).all())


def code(folder: Path, count: int = 10) -> str:
    rows: list[dict[str, Any]] = [
        {
            "prompt": f"def add_{n}(a, b):",
            "answer": f"\n    # The sum.\n    return a + b + {n}  # and {n}\n",
        }
        for n in range(count)
    ]
    rows += [{"prompt": "def f(a):", "answer": "\n    return a\n"}]
    rows += [{"prompt": "def f(a):", "answer": "\n    return (a  # open\n"}]
    path = folder / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_comments_are_learnt(tmp_path: Path) -> None:
    lm, path = tiny.lm(), code(tmp_path)
    report = train_pairs(
        lm, read_mango(lm, [path], SETTINGS), tmp_path / "run", SETTINGS, quiet=True, merged=""
    )
    assert (report["pairs"], report["held_out"]) == (8, 2)
    assert report["left_out"] == {"without comments": 1, "not read by Python": 1}
    before, after = report["before"], report["after"]
    assert before["above"] == 0 and after["above"] == 1
    assert after["commented"] < before["commented"] - 0.5 and after["loss"] < before["loss"]
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report


def test_the_other_form_of_an_answer_is_the_same_without_comments(tmp_path: Path) -> None:
    lm = tiny.lm()
    better, other = read_mango(lm, [code(tmp_path)], SETTINGS).pairs[0]
    assert lm.decode(better[0]).startswith("def add_0(a, b):\n    # The sum.\n    return a + b + 0")
    assert lm.decode(other[0]).removesuffix(tiny.EOS) == "def add_0(a, b):\n    return a + b + 0\n"
    assert better[1] == other[1] == len(lm.encode("def add_0(a, b):"))


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    for fields in ({"margin": -1.0}, {"hinge": -0.5}):
        with pytest.raises(BadConfig, match=f"{next(iter(fields))}=-"):
            TrainMango(**fields)
    with pytest.raises(BadConfig, match=r"code.jsonl: 1 pairs .*1 without comments; 1 not read"):
        lm = tiny.lm()
        train_pairs(lm, read_mango(lm, [code(tmp_path, 1)], SETTINGS), tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run").exists()

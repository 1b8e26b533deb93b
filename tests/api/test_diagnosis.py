"""Who computes a model: in full, and said once where it is not who `auto` would have chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import foretell
from foretell.api import diagnosis
from foretell.api.diagnosis import ModelReport, diagnose, print_notice
from foretell.testing.toy import Toy
from tests import tiny


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_shown_notices", set())


def test_a_notice_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("one", "two", "one"):
        print_notice(message)
    assert capsys.readouterr() == ("", "note: one\nnote: two\n")


def test_every_model_is_reported() -> None:
    lm = foretell.wrap(tiny.llama(), tiny.tokenizer(), tiny.gpt2(), "tiny")
    target, draft = diagnose(lm)
    assert target.description is not None and draft.description is not None
    assert target.description.described_by.endswith("families/llama.py")
    assert replace(target, description=None) == ModelReport(
        "target", "tiny", "llama", "float32", "torch", (), True, True, 2, 330, tiny.CONTEXT
    )
    assert (draft.name, draft.family, draft.loop, draft.fused) == ("draft", "gpt2", True, True)
    (toy,) = diagnose(foretell.LM(Toy(5)))
    assert (toy.family, toy.backend, toy.vocab) == ("toy", "torch", 5)


def test_who_is_refused_is_said_once_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's layers widen without a gate, over which OpenVINO's compiler ends the process."""
    path = tiny.save(tiny.gpt2(), tmp_path / "gpt2")
    lm = foretell.load(path)
    (report,) = diagnose(lm)
    ((refused, why),) = report.refusals
    assert (refused, report.backend) == ("openvino", "torch") and "without a gate" in why
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == 1 and f"{path} is computed by torch: openvino does not take it" in said[0]
    assert f"({why})" in said[0] and f"`foretell doctor {path}`" in said[0]
    foretell.load(path)
    assert "note:" not in capsys.readouterr().err
    foretell.load(path, backend="torch")
    assert "openvino" not in capsys.readouterr().err


def test_nothing_is_said_where_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.save(tiny.llama(), tmp_path / "llama")
    lm = foretell.load(path, backend="torch", models={"other": path})
    assert "note:" not in capsys.readouterr().err
    assert [report.refusals for report in diagnose(lm)] == [(), ()]


def test_a_gguf_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="needs foretell[gguf]")
    pytest.importorskip("gguf", reason="needs the package gguf, to write files")
    lm = foretell.load(tiny.gguf(tiny.llama(), tmp_path / "tiny.gguf"))
    (report,) = diagnose(lm)
    assert (report.backend, report.family, report.layers) == ("llama.cpp", "llama", 2)
    assert not report.refusals and "note:" not in capsys.readouterr().err

"""The lab as a whole, and the command `foretell lab`."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from foretell import cli
from foretell.api.lm import LM
from foretell.errors import BadConfig, Unsupported
from foretell.lab import Settings, lab
from foretell.lab.report import Key, Mean, Report
from foretell.lab.runner import BOUND, PAIRS
from foretell.testing.toy import Toy
from tests import tiny

SETS = {"one": [[1, 2, 3, 1], [2, 2, 4]], "two": [[0, 5, 1, 3, 3]]}


def toys(**draft: Any) -> LM:
    return LM(Toy(8, copy=2.0), models={"draft": Toy(8, noise=0.5, copy=2.0, name="d", **draft)})


# --- the measurement


def test_every_pair_is_measured_at_every_place() -> None:
    settings = Settings((0.7, 1.5), k=3, length=2, positions=4, limit=1)
    told: list[tuple[str, int, int]] = []
    report = lab(toys(), settings, SETS, lambda *what: told.append(what))  # type: ignore[arg-type]
    assert report.places == 16 and not report.skipped
    assert [done for _, done, _ in told] == list(range(16)) and {t for *_, t in told} == {16}
    assert told[0][0] == "one, temperature 0.7" and told[-1][0] == "two, temperature 1.5"
    document = report.to_dict()
    assert document["schema"] == "foretell.measure.lab/1"
    assert len(document["rows"]) == 2 * 3 * len(PAIRS) * 3
    assert len(document["chains"]) == 2 * 3 * 2 * 2
    for row in document["rows"]:
        assert row["places"] == (8 if row["set"] is None else 4)
        bound = Key(row["temperature"], row["set"], row["drafts"], BOUND, row["k"])
        slack = 1e-9 + 5 * (row["draws_error"] or 0)
        assert row["acceptance"] <= report.means[bound].value + slack
        drawn = row["drafts"] == "unreplaced" and row["rule"] == "walk" and row["k"] == 3
        assert (row["draws_error"] is not None) == drawn
    for row in document["chains"]:
        assert 0 < row["accepted"] < row["k"] and row["error"] > 0


def test_a_seed_gives_its_numbers_again() -> None:
    settings = Settings(k=4, length=2, positions=3, seed=5)
    first, again = (lab(toys(), settings, SETS).to_dict() for _ in range(2))
    assert first == again
    other = lab(toys(), Settings(k=4, length=2, positions=3, seed=6), SETS).to_dict()
    assert other["rows"] != first["rows"]


def test_places_beyond_the_draft_model_are_counted_and_left_out() -> None:
    report = lab(toys(context=6), Settings(length=2, positions=4, limit=1), SETS)
    assert (report.places, report.skipped) == (3, 5)
    with pytest.raises(BadConfig, match="d has no law at any of 8 places"):
        lab(toys(context=2), Settings(length=2, positions=4, limit=1), SETS)


def test_without_a_draft_model_there_is_nothing_to_measure() -> None:
    with pytest.raises(Unsupported, match="the lab cannot run on toy: it needs a draft model"):
        lab(LM(Toy(8)), Settings(), SETS)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("k", 0, "k=0: must be between 1 and 8"),
        ("k", 9, "k=9: must be between 1 and 8"),
        ("length", 65, "length=65"),
        ("positions", 0, "positions=0"),
        ("limit", 0, "limit=0"),
        ("draws", 1, "draws=1: must be between 2"),
        ("temperatures", (), "name one at least"),
        ("temperatures", (0.0,), "temperature=0.0: must be above 0.* every rule is the walk"),
        ("temperatures", (math.nan,), "temperature=nan"),
        ("temperatures", (1.0, 1.0), "must be different numbers"),
    ],
)
def test_a_bad_setting_is_told_with_its_range(field: str, value: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Settings(**{field: value})


# --- what is shown


def test_means_have_both_errors() -> None:
    mean = Mean()
    for value, variance in ((0.2, None), (0.4, 0.04), (0.6, 0.05)):
        mean.add(value, variance)
    assert mean.value == pytest.approx(0.4)
    assert mean.draws_error == pytest.approx(math.sqrt(0.09) / 3)
    assert mean.error == pytest.approx(0.2 / math.sqrt(3))
    assert Mean(1, 0.5, 0.25).error == math.inf
    assert Mean(1, 0.5, 0.25).draws_error is None


def test_tables_and_chart_have_all_sets_together() -> None:
    settings = Settings((1.0, 2.0), k=6, length=1)
    report = Report(settings, "big", "small", places=2)
    for temperature in settings.temperatures:
        for k in range(1, 7):
            for name, value in (("a", 0.1 * k), ("b", 0.1)):
                key = Key(temperature, name, "unreplaced", "walk", k)
                report.note_value(key, value, None if k < 3 else 0.0004)
        for value in (0.4, 0.6):
            report.note_value(Key(temperature, "a", "chain", "block", 1), value)
    tables = report.tables()
    assert [title for title, _ in tables][:2] == [
        "chance that one of k tokens is accepted, temperature 1",
        "accepted tokens of a drawn chain, temperature 1",
    ]
    head, line = tables[0][1]
    assert head == ["drafts", "rule", *(f"k={k}" for k in range(1, 7))]
    assert line[:4] == ["without replacement", "walk", "0.100", "0.150"]
    assert line[4] == "0.200 ±0.014"
    assert tables[1][1][1] == ["chain", "block", "0.500 ±0.100"]
    report.means = {key: Mean(1, mean.value) for key, mean in report.means.items()}
    assert report.tables()[1][1][1] == ["chain", "block", "0.500"], "one place has no error"
    words = [text.text for text in ET.fromstring(report.svg()).iter() if text.text]
    assert "big with drafts of small: 2 places" in words
    assert "without replacement, walk, temperature 2" in words
    assert [word for word in words if word.startswith("k=")] == ["k=1", "k=3", "k=4", "k=6"]


# --- the command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        code = cli.run(["lab", *args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_command_on_the_embedded_pair(run: Any, tmp_path: Path) -> None:
    few = ["--prompts", "chat", "--limit", "1", "--positions", "2", "--k", "2", "--length", "2"]
    files = ["--json", f"{tmp_path}/o.json", "--plot", f"{tmp_path}/o.svg"]
    code, out, err = run(*few, *files, "--temperature", "0.8,1", "--threads", "1")
    assert code == 0
    assert err == "4 places of demo, drafts of demo (draft)\n"
    assert "chance that one of k tokens is accepted, temperature 0.8\n" in out
    assert "accepted tokens of a drawn chain, temperature 1\n" in out
    assert out.count("kseq") == 2
    document = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert document["places"] == 4 and document["settings"]["temperatures"] == [0.8, 1.0]
    assert "<svg" in (tmp_path / "o.svg").read_text("utf-8")
    code, out, err = run(*few, "--json", "-")
    assert code == 0 and err == ""
    assert json.loads(out)["schema"] == "foretell.measure.lab/1"


def test_a_model_without_a_draft_model_is_told_what_to_name(run: Any, tmp_path: Path) -> None:
    code, out, err = run("--model", str(tiny.save(tiny.llama(), tmp_path)), "--prompts", "chat")
    assert (code, out) == (2, "")
    assert err == (
        f"error: --draft: {tmp_path} comes without a draft model; name a smaller model with the "
        "same tokenizer\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--temperature", "0"], "temperature=0.0: must be above 0"),
        (["--temperature", "warm"], "--temperature warm: write numbers"),
        (["--temperature", ","], "temperature is empty"),
        (["--k", "9"], "k=9: must be between 1 and 8"),
        (["--draws", "1"], "draws=1"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--plot", "o.png"], "give a name that ends in .svg"),
        (["--plot", "./no/such.svg"], "folder does not exist"),
        (["--json", "."], "a folder"),
        (["--model", "./nowhere"], "no such folder"),
        (["--threads", "0"], "--threads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run: Any, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err

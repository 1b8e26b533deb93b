"""Tuning: what is measured and chosen, when a profile counts, and the command. Real seconds decide
nothing here.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell import cli
from foretell.drafters.ngram import Ngram
from foretell.errors import BadConfig, UnknownMethod
from foretell.families.toy import Toy
from foretell.measure import bench, report, tuning
from foretell.measure.profiling import folder
from foretell.spec import AUTO, QUICK, resolve
from foretell.strategies.plain import Plain
from tests import tiny

SETS = {"code": ["def add(a, b):"], "prose": ["The quick brown fox", "The fox"]}
OTHER = "ngram:n=2,k=3"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of its own, the memory's speed given, and the shortest plan."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(tuning, "SIZES", ((8, 2, 1),))
    monkeypatch.setattr("foretell.api.STEP", 0.0)  # however quick these models are


def invent(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, float], second: dict[str, float]
) -> list[list[str]]:
    """Replaces measured ratios: `first` where all are measured, `second` in the duel; notes who
    took part.
    """
    seen: list[list[str]] = []
    whole, real = bench.bench, bench.cells

    def begun(settings: Any, *rest: Any) -> dict[str, Any]:
        seen.append(settings.specs)
        return whole(settings, *rest)

    def cells(contenders: Any, *rest: Any) -> list[dict[str, Any]]:
        found = real(contenders, *rest)
        for cell in found:
            value = (first if len(seen) == 1 else second).get(cell["contender"], 1.0)
            cell["ratio"] = {"median": value, "low": value, "high": value}
        return found

    monkeypatch.setattr(bench, "bench", begun)
    monkeypatch.setattr(bench, "cells", cells)
    return seen


def tune(lm: foretell.LM | None = None, **options: Any) -> dict[str, Any]:
    return tuning.tune(lm or tiny.lm(), SETS, [OTHER], **options)


# --- what is chosen


def test_a_method_that_wins_twice_is_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 2.0, OTHER: 2.1}, {AUTO: 2.0, OTHER: 2.05})
    lm = tiny.lm()
    assert lm.auto == AUTO
    profile = tune(lm)
    assert (
        seen == [["plain", AUTO, OTHER], ["plain", AUTO, OTHER]]
        and profile["chosen"] == OTHER == lm.auto
    )
    assert profile["means"] == pytest.approx({"plain": 1.0, AUTO: 2.0, OTHER: 2.1})
    assert profile["final"]["means"][OTHER] == pytest.approx(2.05)
    assert profile["best"] == {"code": OTHER, "prose": OTHER} and profile["default"] == AUTO
    assert "won a second measurement" in report.reasons(profile)
    fresh = tiny.lm()
    assert fresh.auto == OTHER and fresh.resolve("auto") == resolve(OTHER)
    assert set(fresh.generate("a b a b a b a b", max_new_tokens=20).draft) <= {"ngram", "target"}
    assert bench.Method(fresh, "auto").about == f"stands for {OTHER}, as foretell tune found"
    assert json.loads(Path(profile["file"]).read_text("utf-8")) == json.loads(json.dumps(profile))


def test_luck_in_the_first_measurement_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 2.01})
    profile = tune()
    assert profile["chosen"] == AUTO == tiny.lm().auto and profile["final"]["challenger"] == OTHER
    assert "did not find behind" in report.reasons(profile)


def test_the_default_stays_where_nothing_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 2.0, OTHER: 2.01}, {})
    profile = tune()
    assert profile["chosen"] == AUTO and profile["final"] is None and len(seen) == 1
    assert "It is the default" in report.reasons(profile)
    assert bench.Method(tiny.lm(), "auto").about == f"stands for {AUTO}, the default"


def test_the_default_is_simpler_where_a_step_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm()
    lm.measure()
    step = lm.engine.costs["target"].single()
    for limit, later, expected in ((step / 2, step / 9, AUTO), (step * 2, step * 9, QUICK)):
        monkeypatch.setattr("foretell.api.STEP", limit)
        lm = tiny.lm()
        assert lm.auto == lm.default == expected
        costs = lm.engine.costs["target"]
        for _ in range(99):
            costs.note(1, later)
        assert (costs.single() < limit) != (expected == QUICK) and lm.default == expected, (
            "what is seen later changes it"
        )
        assert bench.Method(lm, "auto").about == f"stands for {expected}, the default"
    monkeypatch.setattr(tuning, "CANDIDATES", (OTHER,))
    invent(monkeypatch, {QUICK: 2.0}, {})
    monkeypatch.setattr("foretell.api.STEP", 1e9)
    assert tune()["default"] == QUICK == tiny.lm().auto


def test_plain_decoding_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 0.9, OTHER: 0.8}, {AUTO: 0.9})
    assert tune()["chosen"] == "plain" == tiny.lm().auto and seen[1] == ["plain", AUTO]


def test_what_cannot_follow_costs_is_shown_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invent(monkeypatch, {AUTO: 2.0, "draft": 9.0, "ngram:nodes=4": 9.0}, {})
    profile = tuning.tune(tiny.lm(), SETS, ["draft", "ngram:nodes=4", "auto"])
    assert profile["chosen"] == AUTO and profile["shown_only"] == ["draft", "ngram:nodes=4"]
    assert profile["best"]["code"] in (
        "draft",
        "ngram:nodes=4",
    ) and "draft, ngram:nodes=4" in report.reasons(profile)
    assert [c["contender"] for c in profile["bench"]["cells"][:4]] == [
        "plain",
        AUTO,
        "draft",
        "ngram:nodes=4",
    ]


@pytest.mark.parametrize(
    ("spec", "able"),
    [
        ("plain", True),
        (AUTO, True),
        ("ngram:n=2", True),
        ("draft", False),
        ("ngram:nodes=3", False),
        ("stand", False),
        ("ngram:rule=typical", False),
        ("superposed", False),
    ],
)
def test_only_guarded_methods_are_eligible(spec: str, able: bool) -> None:
    assert tuning.eligible(*resolve(spec)) is able


def test_ahead_needs_a_margin() -> None:
    assert tuning.ahead({AUTO: 1.0, "a": 1.005, "b": 0.5}, [AUTO, "a", "b"], AUTO) is None
    assert tuning.ahead({AUTO: 1.0, "a": 1.2, "b": 1.3}, [AUTO, "a"], AUTO) == "a"
    assert tuning.ahead({"a": 1.2}, ["a"], AUTO) == "a", (
        "a default that failed is beaten by anybody"
    )
    assert tuning.ahead({}, [], AUTO) is None


def test_the_plan_fits_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SIZES", ((64, 4, 2), (64, 1, 1), (8, 1, 1)))
    assert tuning.plan(0.0001, 5, 5, 10.0) == (64, 4, 2)
    # 64 tokens x 3 plain decodings' worth x 4 prompts x 5 kinds x 3 rounds: 11,520 plain tokens
    assert tuning.plan(0.001, 5, 5, 11.6) == (64, 4, 2) and tuning.plan(0.001, 5, 5, 11.4) == (
        64,
        1,
        1,
    )
    assert tuning.plan(9.0, 5, 5, 10.0) == (8, 1, 1), "nothing fits: the shortest"


def test_wrong_methods_and_prompts_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = tiny.lm()
    with pytest.raises(UnknownMethod, match="zzz"):
        tuning.tune(lm, SETS, ["ngram:zzz=1"])
    assert not lm.models["target"].calls > 100
    with pytest.raises(BadConfig, match="shorten"):
        tuning.tune(lm, {"code": ["a"], "long": ["x y z " * 400]}, [OTHER])
    assert not list((folder() / "tuned").glob("*")), "nothing is kept of a failure"


def test_progress_is_told_and_the_answer_is_the_same() -> None:
    told: list[tuple[str, int, int]] = []
    lm = tiny.lm()
    tune(lm, tell=lambda *now: told.append(now))
    assert told and {what.partition(":")[0] for what, _, _ in told} == {"tiny code", "tiny prose"}
    words = lm.generate("The quick brown fox", max_new_tokens=20).tokens
    assert words == tiny.lm().generate("The quick brown fox", "plain", max_new_tokens=20).tokens


# --- when a profile counts


def profile_of(lm: foretell.LM, **change: Any) -> Path:
    """A small profile written by hand, for `lm` here."""
    about = tuning.place(lm.models)
    path = tuning.file(lm.models, lm.path, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": tuning.SCHEMA,
        "about": about,
        "chosen": OTHER,
        "best": {},
        "means": {},
        "bench": {},
    } | change
    path.write_text(json.dumps(document), "utf-8")
    return path


def said(lm: foretell.LM) -> str:
    """The one warning that `auto` gives; it is given once."""
    with pytest.warns(UserWarning) as caught:
        assert lm.auto == AUTO
    (warning,) = caught
    text = str(warning.message)
    assert "\n" not in text and "`foretell tune` measures anew" in text
    assert lm.auto == AUTO
    return text


def test_no_profile_is_no_trouble_and_one_that_fits_counts() -> None:
    assert tiny.lm().auto == AUTO
    profile_of(tiny.lm())
    assert tiny.lm().auto == OTHER


def test_another_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of(tiny.lm())
    dtype = said(tiny.lm(torch.bfloat16))
    assert "dtype torch.float32 there, torch.bfloat16 here)" in dtype, (
        "rounding is no other set of weights"
    )
    assert "(draft model)" in said(tiny.lm(draft=False))
    assert "(weights)" in said(
        foretell.wrap(tiny.llama(3), tiny.tokenizer(), tiny.relative(tiny.llama()), "tiny")
    )
    with monkeypatch.context() as patch:
        patch.setattr(foretell, "__version__", "9.9")
        assert "foretell 0.1.0 there, foretell 9.9 here" in said(tiny.lm())
    with monkeypatch.context() as patch:
        patch.setattr("foretell.measure.profiling.processor", lambda: "Other CPU")
        assert "there, Other CPU here)" in said(tiny.lm())
    other = foretell.wrap(tiny.llama(), tiny.tokenizer(), name="another")
    assert other.auto == AUTO, "a model nobody tuned is none of its business"


def test_threads_may_change_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm()
    profile_of(lm)
    assert lm.auto == OTHER
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    assert "(1 threads there, 7 threads here)" in said(lm)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert lm.auto == OTHER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": "foretell.tune/2"}',
        {"schema": "foretell.tune/1"},
        {"chosen": "gone"},
        {"chosen": 3},
        {"chosen": "ngram:zzz=1"},
        {"best": []},
        {"about": 1},
    ],
    ids=str,
)
def test_a_damaged_profile_is_noticed_and_redone(
    text: str | dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile_of(tiny.lm(), **text) if isinstance(text, dict) else profile_of(tiny.lm())
    if isinstance(text, str):
        path.write_text(text)
    assert "damaged" in said(tiny.lm())
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 3.0})
    assert tune()["file"] == str(path) and tiny.lm().auto == OTHER


def test_a_profile_under_a_wrong_name_does_not_count() -> None:
    path = profile_of(tiny.lm())
    about = tuning.place(tiny.lm().models)
    profile_of(tiny.lm(), about=about | {"threads": "64 threads"})
    assert "of another place" in said(tiny.lm()) and path.is_file()


def test_loading_does_not_look_for_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("looked up")

    monkeypatch.setattr(tuning, "kept", never)
    lm = tiny.lm()
    assert (
        lm.generate("a", "plain", max_new_tokens=2).tokens
        and lm.generate("a", Ngram(), max_new_tokens=2).tokens
    )
    with pytest.raises(AssertionError, match="looked up"):
        lm.generate("a", max_new_tokens=2)


def test_models_that_show_no_weights_are_known_by_their_shape() -> None:
    assert tuning.weights(Toy(5)) == tuning.weights(Toy(5)) != tuning.weights(Toy(6))
    lm = foretell.LM(Toy(5))
    profile_of(lm)
    assert foretell.LM(Toy(5)).auto == OTHER and resolve("plain")[1] == Plain()


def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadConfig, match="set FORETELL_CACHE to another folder"):
        tune()


# --- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune")
    tiny.save(tiny.llama(), path / "model")
    (path / "mine.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], model: Path) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        words = [
            "--model",
            f"{model}/model",
            "--prompts",
            f"{model}/mine.jsonl",
            "--threads",
            "1",
            *args,
        ]
        code = cli.run(["tune", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_command_shows_what_it_chose(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 3.0})
    code, out, err = run("--methods", OTHER, "--html", f"{tmp_path}/o.html")
    assert (
        code == 0
        and f"auto stands for {OTHER}. It won" in out
        and "1.0 GB/s" in out
        and "mine" in out
    )
    assert (
        "ms by tokens" in out
        and "3.00x" in out
        and err.startswith("kept in ")
        and err.count("\n") == 1
    )
    page = (tmp_path / "o.html").read_text("utf-8")
    assert (
        page.count("<svg") == 3
        and f"auto stands for {OTHER}" in page
        and "Tokens per second" in page
    )
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: pytest.fail("measured again"))
    code, out, _ = run("--show", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "foretell.tune/2" and document["chosen"] == OTHER
    assert (
        document["bench"]["models"][0]["seconds"]["64"]["1"] > 0 and document["bench"]["bandwidth"]
    )


def test_a_stale_profile_is_one_line_and_redone(
    run: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = foretell.load(model / "model")
    path = profile_of(lm)
    path.rename(path.with_name(path.name[:-6] + "0.json"))
    old = path.with_name(path.name[:-6] + "0.json")
    document = json.loads(old.read_text("utf-8"))
    document["about"]["threads"] = "64 threads"
    old.write_text(json.dumps(document), "utf-8")
    code, out, err = run("--methods", OTHER, "--json")
    assert code == 0 and json.loads(out)["about"]["threads"] == "1 threads"
    assert (
        err.startswith("warning: the profile of ") and "(64 threads there, 1 threads here)" in err
    )
    assert err.count("\n") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert foretell.load(model / "model").auto in (AUTO, OTHER, "plain")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--show"], "no profile"),
        (["--methods", "zzz"], "unknown method"),
        (["--prompts", "gone.jsonl"], "gone.jsonl"),
        (["--html", "/gone/x.html"], "--html"),
        (["--methods", ","], "--methods is empty"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_a_mistake_is_one_line(run: Any, args: list[str], words: str) -> None:
    code, out, err = run(*args)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_what_failed_is_exit_1(run: Any) -> None:
    code, out, err = run("--methods", "draft")
    assert code == 1 and "'draft' model" in err and "auto stands for" in out

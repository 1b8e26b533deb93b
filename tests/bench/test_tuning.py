"""Tuning: what is measured and chosen, when a profile counts, and the command. Real seconds decide
nothing here.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell import bench, cli
from foretell.api import profiles
from foretell.bench import report, runner, tuning
from foretell.engine import cost_profile as profiling
from foretell.engine.cost_profile import folder
from foretell.errors import BadConfig, BadFile, UnknownMethod
from foretell.spec import AUTO, QUICK, resolve_method
from tests import files, tiny

SETS = {"code": ["def add(a, b):"], "prose": ["The quick brown fox", "The fox"]}
OTHER = "ngram:n=2,k=3"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of its own, the memory's speed given, and the shortest plan."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "measure_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(tuning, "PLANS", ((8, 2, 1),))
    monkeypatch.setattr(tuning, "ENOUGH", 1)
    monkeypatch.setattr(profiling, "REPEATS", 1)
    monkeypatch.setattr("foretell.api.defaults.STEP", 0.0)  # however quick these models are


def invent(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, float], second: dict[str, float]
) -> list[list[str]]:
    """Replaces measured ratios: `first` where all are measured, `second` in the duel; notes who
    took part.
    """
    seen: list[list[str]] = []
    whole = bench.run_bench
    real = runner.group_cells

    def begun(settings: Any, *rest: Any) -> dict[str, Any]:
        seen.append(settings.specs)
        return whole(settings, *rest)

    def cells(contenders: Any, *rest: Any) -> list[dict[str, Any]]:
        found = real(contenders, *rest)
        for cell in found:
            value = (first if len(seen) == 1 else second).get(cell["contender"], 1.0)
            cell["ratio"] = {"median": value, "low": value, "high": value}
        return found

    monkeypatch.setattr(bench, "run_bench", begun)
    monkeypatch.setattr(runner, "group_cells", cells)
    return seen


def tune(lm: foretell.LM | None = None, **options: Any) -> dict[str, Any]:
    return tuning.tune_model(lm or tiny.lm(), SETS, [OTHER], **options)


# --- what is chosen


def test_a_method_that_wins_twice_is_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 2.0, OTHER: 2.1}, {AUTO: 2.0, OTHER: 2.05})
    lm = tiny.lm()
    assert lm.auto == AUTO
    profile = tune(lm)
    assert seen == [["plain", AUTO, OTHER], ["plain", AUTO, OTHER]]
    assert profile["chosen"] == OTHER == lm.auto
    assert profile["means"] == pytest.approx({"plain": 1.0, AUTO: 2.0, OTHER: 2.1})
    assert profile["final"]["means"][OTHER] == pytest.approx(2.05)
    assert profile["best"] == {"code": OTHER, "prose": OTHER}
    assert profile["default"] == AUTO
    assert "won a second measurement" in report.explain_choice(profile)
    fresh = tiny.lm()
    assert fresh.auto == OTHER
    assert fresh.resolve("auto") == resolve_method(OTHER)
    assert set(fresh.generate("a b a b a b a b", max_new_tokens=20).draft) <= {"ngram", "target"}
    assert bench.Method(fresh, "auto").about == f"stands for {OTHER}, as foretell tune found"
    assert json.loads(Path(profile["file"]).read_text("utf-8")) == json.loads(json.dumps(profile))


def test_luck_in_the_first_measurement_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 2.01})
    profile = tune()
    assert profile["chosen"] == AUTO == tiny.lm().auto
    assert profile["final"]["challenger"] == OTHER
    assert "did not find after" in report.explain_choice(profile)


def test_the_default_stays_where_nothing_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 2.0, OTHER: 2.01}, {})
    profile = tune()
    assert profile["chosen"] == AUTO
    assert profile["final"] is None
    assert len(seen) == 1
    assert "It is the default" in report.explain_choice(profile)
    assert bench.Method(tiny.lm(), "auto").about == f"stands for {AUTO}, the default"


def test_the_default_is_simpler_where_a_step_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "REPEATS", 3)  # or a slow moment has it measured again
    lm = tiny.lm()
    lm.measure()
    step = lm.engine.costs_of(lm.models["target"]).one_token_seconds()
    for limit, later, expected in ((step / 2, step / 9, AUTO), (step * 2, step * 9, QUICK)):
        monkeypatch.setattr("foretell.api.defaults.STEP", limit)
        lm = tiny.lm()
        assert lm.auto == lm.default == expected
        costs = lm.engine.costs_of(lm.models["target"])
        for _ in range(99):
            costs.note_forward(1, later)
        assert (costs.one_token_seconds() < limit) != (
            expected == QUICK
        ) and lm.default == expected, "what is seen later changes it"
        assert bench.Method(lm, "auto").about == f"stands for {expected}, the default"
    monkeypatch.setattr(tuning, "CANDIDATES", (OTHER,))
    invent(monkeypatch, {QUICK: 2.0}, {})
    monkeypatch.setattr("foretell.api.defaults.STEP", 1e9)
    assert tune()["default"] == QUICK == tiny.lm().auto


def test_chat_messages_are_texts_to_a_model_without_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invent(monkeypatch, {AUTO: 2.0}, {})
    chat = {"chat": [[{"role": "user", "content": "The quick brown fox"}]]}
    assert tuning.tune_model(tiny.lm(), chat, [OTHER])["chosen"] == AUTO


def test_a_model_may_draft_for_itself_where_its_layers_can_be_run_one_by_one() -> None:
    lm = tiny.lm()
    assert {*tuning.candidate_methods(lm)} > {"swift:best=yes", "layerskip:best=yes"}
    assert all(profiles.find_objection(spec) is None for spec in tuning.SELF)
    lm.models["target"].caps -= {"parts"}
    assert not {*tuning.candidate_methods(lm)} & {*tuning.SELF}


def test_plain_decoding_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = invent(monkeypatch, {AUTO: 0.9, OTHER: 0.8}, {AUTO: 0.9})
    assert tune()["chosen"] == "plain" == tiny.lm().auto
    assert seen[1] == ["plain", AUTO]


def test_what_cannot_follow_costs_is_shown_and_never_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invent(monkeypatch, {AUTO: 2.0, "draft": 9.0, "ngram:nodes=4": 9.0}, {})
    profile = tuning.tune_model(tiny.lm(), SETS, ["draft", "ngram:nodes=4", "auto"])
    assert profile["chosen"] == AUTO
    assert profile["shown_only"] == ["draft", "ngram:nodes=4"]
    assert profile["best"]["code"] in ("draft", "ngram:nodes=4")
    assert "draft, ngram:nodes=4" in report.explain_choice(profile)
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
    assert (profiles.find_objection(spec) is None) is able


def test_ahead_needs_a_margin() -> None:
    assert tuning.best_ahead({AUTO: 1.0, "a": 1.005, "b": 0.5}, [AUTO, "a", "b"], AUTO) is None
    assert tuning.best_ahead({AUTO: 1.0, "a": 1.2, "b": 1.3}, [AUTO, "a"], AUTO) == "a"
    assert tuning.best_ahead({"a": 1.2}, ["a"], AUTO) == "a", (
        "a default that failed is beaten by anybody"
    )
    assert tuning.best_ahead({}, [], AUTO) is None


def test_the_plan_fits_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PLANS", ((64, 4, 2), (64, 1, 1), (8, 1, 1)))
    assert tuning.choose_plan(0.0001, 5, 5, 10.0) == (64, 4, 2)
    # 64 tokens x 3 plain decodings' worth x 4 prompts x 5 kinds x 3 rounds: 11,520 plain tokens
    assert tuning.choose_plan(0.001, 5, 5, 11.6) == (64, 4, 2)
    assert tuning.choose_plan(0.001, 5, 5, 11.4) == (64, 1, 1)
    assert tuning.choose_plan(9.0, 5, 5, 10.0) == (8, 1, 1), "nothing fits: the shortest"


def test_wrong_methods_and_prompts_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = tiny.lm()
    with pytest.raises(UnknownMethod, match="zzz"):
        tuning.tune_model(lm, SETS, ["ngram:zzz=1"])
    assert not lm.models["target"].calls > 100
    with pytest.raises(BadConfig, match="shorten"):
        tuning.tune_model(lm, {"code": ["a"], "long": ["x y z " * 400]}, [OTHER])
    assert not list((folder() / "tuned").glob("*")), "nothing is kept of a failure"


def test_progress_is_told_and_the_answer_is_the_same() -> None:
    told: list[tuple[str, int, int]] = []
    lm = tiny.lm()
    tune(lm, tell=lambda *now: told.append(now))
    assert told
    assert {what.partition(":")[0] for what, _, _ in told} == {"tiny code", "tiny prose"}
    words = lm.generate("The quick brown fox", max_new_tokens=20).tokens
    assert words == tiny.lm().generate("The quick brown fox", "plain", max_new_tokens=20).tokens


# --- the profile that is written


def test_a_damaged_profile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 3.0})
    path = Path(tune()["file"])
    path.write_text("{")
    with pytest.warns(UserWarning, match="the profile is damaged"):
        assert tiny.lm().auto == AUTO
    assert tune()["file"] == str(path)
    assert tiny.lm().auto == OTHER
    assert list(path.parent.iterdir()) == [path]


def test_what_is_written_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, {AUTO: 2.0, OTHER: 3.0}, {AUTO: 2.0, OTHER: 3.0})
    profile = tune()
    assert profiles.read_profile(Path(profile["file"])) == json.loads(json.dumps(profile))


def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadFile, match="set FORETELL_CACHE to another folder"):
        tune()


def test_a_full_disk_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm()
    lm.measure()
    monkeypatch.setattr(lm, "measure", lambda fresh=False: {"about": "", "seconds": {}})
    with files.full_disk(), pytest.raises(BadFile, match=r"cannot be written \(File too large\)"):
        tune(lm)
    assert not list((folder() / "tuned").iterdir())


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
    assert code == 0
    assert f"auto stands for {OTHER}. It won" in out
    assert "1.0 GB/s" in out
    assert "mine" in out
    assert "ms by tokens" in out
    assert "3.00x" in out
    assert err.startswith("kept in ")
    assert err.count("\n") == 1
    page = (tmp_path / "o.html").read_text("utf-8")
    assert page.count("<svg") == 3
    assert f"auto stands for {OTHER}" in page
    assert "Tokens per second" in page
    monkeypatch.setattr(tuning, "tune_model", lambda *_, **__: pytest.fail("measured again"))
    code, out, _ = run("--show", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "foretell.tune/2"
    assert document["chosen"] == OTHER
    assert document["bench"]["models"][0]["seconds"]["64"]["1"] > 0
    assert document["bench"]["bandwidth"]


def test_a_stale_profile_is_one_line_and_redone(
    run: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = run("--methods", OTHER, "--json")
    document = json.loads(out)
    path = Path(document["file"])
    document["about"]["version"] = "foretell 0"
    path.unlink()
    path.with_name(f"{path.stem[:-1]}.json").write_text(json.dumps(document), "utf-8")
    code, out, err = run("--methods", OTHER, "--json")
    assert code == 0
    assert json.loads(out)["about"]["version"] == f"foretell {foretell.__version__}"
    assert err.startswith("warning: the profile of ")
    assert f"(foretell 0 there, foretell {foretell.__version__} here)" in err
    assert err.count("\n") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert foretell.load(model / "model").auto in (AUTO, OTHER, "plain")


def test_the_command_forgets_a_model_s_profiles(run: Any, model: Path) -> None:
    assert run("--methods", OTHER)[0] == 0
    code, out, err = run("--forget")
    assert (code, out) == (0, "") and err.startswith("1 profiles of ") and err.count("\n") == 1
    assert run("--show")[0] == 2 and run("--forget")[2].startswith("0 profiles")


def test_a_handful_of_prompts_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ENOUGH", 16)
    seen = invent(monkeypatch, {AUTO: 2.0, OTHER: 9.0}, {AUTO: 2.0, OTHER: 9.0})
    profile = tune()
    assert profile["chosen"] == AUTO and profile["final"] is None and len(seen) == 1
    assert "3 prompts are too few to choose another by" in report.explain_choice(profile)


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
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_what_failed_is_exit_1(run: Any) -> None:
    code, out, err = run("--methods", "draft")
    assert code == 1
    assert "'draft' model" in err
    assert "auto stands for" in out

"""What makes commands of trainers: their options, their reports, and `--recipe`."""

from __future__ import annotations

import ast
import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import train
from foretell.cli.train import _trainer
from foretell.cli.train._trainer import Report, progress, read_settings, show_report, trainer
from foretell.train import recipes
from tests.cli.train.test_answer_runs import SIZE


def settings_classes() -> dict[str, str]:
    """Command -> the settings that its decorator names, for those that have some."""
    found = {}
    for path in Path(train.__file__).parent.glob("[!_]*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                (decorator,) = node.decorator_list
                for place in getattr(decorator, "args", ()):
                    found[node.name] = ast.literal_eval(place)
    return found


@pytest.mark.parametrize(("command", "place"), sorted(settings_classes().items()))
def test_every_field_of_the_settings_is_an_option(command: str, place: str) -> None:
    module, _, name = place.rpartition(".")
    settings = getattr(import_module(f"foretell.train.{module}"), name)
    options = {field.name: field.default for field in dataclasses.fields(read_settings(place))}
    assert options == {field.name: field.default for field in dataclasses.fields(settings)}


def test_what_a_function_takes_and_returns_are_its_options() -> None:
    @trainer()
    def count(width: int) -> Report:
        return Report({"width": width}, f"{width} wide")

    @trainer("caches.gates.TrainGates")
    def tell(config: Any, recipe: dict[str, Any], width: int = 3) -> str:
        return f"{config.steps} {width}"

    parameters = {
        function: list(function.__signature__.parameters)  # type: ignore[attr-defined]
        for function in (count, tell)
    }
    assert parameters[count] == ["width", "as_json"]
    assert parameters[tell] == ["invocation", "recipe", "width", "config"]


def test_a_report_is_a_document_or_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({"rows": 2}, "two rows", "one failed")
    assert show_report(report, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"rows": 2} and not err
    show_report(report, as_json=False)
    assert capsys.readouterr() == ("two rows\n", "warning: one failed\n")
    show_report("", as_json=False)
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_is_full_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = _trainer.progress_bar()
    monkeypatch.setattr(_trainer, "progress_bar", lambda: bars)
    with progress() as tell:
        (task,) = bars.tasks
        assert not task.visible
        tell("reading", 1, 2)
        assert task.visible and task.description == "reading" and task.total == 2
        tell("reading", 2, 2)
        assert not task.visible


def lines(fields: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())


@pytest.mark.parametrize("name", sorted(recipes.shipped_recipes()))
def test_those_that_ship_are_recipes_of_a_command(name: str, run: Any) -> None:
    """It goes on to read what it is to learn from, which is not there."""
    missing = {"head": "--prompts", "draft": "--prompts", "dlm": "--init"}
    ends = [
        run("train", command, "--recipe", name, option, "not-there.jsonl")
        for command, option in missing.items()
    ]
    assert {code for code, _, _ in ends} == {2}
    assert sum("not-there.jsonl" in err for _, _, err in ends) == 1


def test_a_run_is_repeated_by_what_it_kept(run: Any, folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def add_{i}(a, b):"}) for i in range(3)))
    fields = {
        "target": folder,
        "prompts": [str(prompts)],
        "answers": str(tmp_path / "answers"),
        "states": str(tmp_path / "states"),
        "out": str(tmp_path / "first"),
        "answer-tokens": 16,
        "kind": "medusa",
        "dtype": "float32",
        "states_dtype": "float32",
        "save-every": 60,
        "seed": 3,
    }
    fields |= {name[2:]: int(value) for name, value in zip(SIZE[::2], SIZE[1::2], strict=True)}
    recipe = tmp_path / "mine.toml"
    recipe.write_text(lines(fields))
    code, _, _ = run("train", "head", "--recipe", str(recipe), "--tokens", "128")
    assert code == 0
    report = json.loads((tmp_path / "first" / "report.json").read_text())
    assert report["settings"]["tokens"] == 128  # the command line's, not the recipe's 256
    assert report["settings"]["seed"] == 3 and report["settings"]["kind"] == "medusa"
    kept = recipes.read_recipe(tmp_path / "first" / "recipe.toml")
    assert kept == report["recipe"]
    assert kept["tokens"] == 128 and kept["prompts"] == [str(prompts)] and kept["keep"] == 0.4

    again = str(tmp_path / "first" / "recipe.toml")
    code, _, _ = run("train", "head", "--recipe", again, "--out", str(tmp_path / "second"))
    assert code == 0
    one, other = (
        (tmp_path / name / "head" / "model.safetensors").read_bytes()
        for name in ("first", "second")
    )
    assert one == other


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token": 1}, "mine.toml: token is no setting of `foretell train head`; it takes target"),
        ({"recipe": "x"}, "mine.toml: recipe is no setting"),
        ({"hidden": 64}, "mine.toml: hidden is no setting"),
        ({"tokens": "many"}, "mine.toml: tokens='many': must be a whole number"),
        ({"tokens": 1.5}, "mine.toml: tokens=1.5: must be a whole number"),
        ({"seed": True}, "mine.toml: seed=True: must be a whole number"),
        ({"keep": "half"}, "mine.toml: keep='half': must be a number"),
        ({"out": 3}, "mine.toml: out=3: must be a text"),
        ({"prompts": "a.jsonl"}, "mine.toml: prompts='a.jsonl': must be a list of texts"),
        ({"prompts": [1]}, "mine.toml: prompts=[1]: must be a list of texts"),
        ({"answer-tokens": 0}, "mine.toml: answer-tokens=0: must be at least 1"),
        ({"tokens": 0}, "mine.toml: tokens=0: must be between 1 and"),
        ({"other-rate": -1}, "mine.toml: other_rate=-1: must be between 0 and 10"),
        ({"decay": 2}, "mine.toml: decay=2: must be between 0 and 1"),
        ({"depths": 65}, "mine.toml: depths=65: must be between 0"),
        ({"kind": "eagle9"}, "mine.toml: kind='eagle9': must be one of"),
        ({"micro": 1000}, "mine.toml: batch=1024: must be a multiple of micro=1000"),
        ({"window": 2000}, "mine.toml: micro=1024: must be at least window=2000, which a lower"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(
    fields: dict[str, Any], words: str, run: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(lines(fields))
    code, out, err = run("train", "head", "--recipe", str(path))
    assert code == 2 and not out and err.count("\n") == 1
    assert words in err


def test_a_wrong_option_is_refused_as_before(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("tokens = 1000\n")
    code, _, err = run("train", "head", "--recipe", str(path), "--tokens", "many")
    assert code == 2 and "--tokens" in err and "mine.toml" not in err
    code, _, err = run("train", "head", "--recipe", "smollm2-eagle3", "--own", "-1")
    assert code == 2 and "--own" in err

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell import cli
from foretell.api.diagnosis import diagnose
from foretell.core.renamed_options import (
    NEW_NAMES,
    RenamedOption,
    rename_options,
    takes_old_names,
)
from foretell.errors import BadConfig, UnknownMethod
from tests import tiny

SHORT = {"max_new_tokens": 6}


def test_an_old_name_is_the_new_one_with_one_line_said() -> None:
    with pytest.warns(RenamedOption, match=r"^rows= is guidance= now; write guidance=$") as said:
        renamed = rename_options({"rows": "cfg", "seed": 3}, NEW_NAMES.values())
    assert renamed == {"guidance": "cfg", "seed": 3} and len(said) == 1


def test_a_name_stays_where_the_new_one_is_no_option() -> None:
    assert rename_options({"executor": "torch"}, {"guidance"}) == {"executor": "torch"}


def test_both_names_are_refused() -> None:
    with pytest.raises(BadConfig, match="warp= is processor= now, and both are given"):
        rename_options({"warp": "rpg", "processor": "momentum"}, NEW_NAMES.values())


def test_a_function_takes_its_keywords_by_old_names() -> None:
    @takes_old_names
    def load(source: str, *, backend: str = "auto") -> tuple[str, str]:
        return source, backend

    with pytest.warns(RenamedOption, match="executor= is backend= now"):
        assert load("demo", executor="torch") == ("demo", "torch")  # type: ignore[call-arg]
    assert load("demo", backend="native") == ("demo", "native")


@pytest.mark.parametrize(
    ("old", "new"), [({"rows": "cfg:g=2"}, {"guidance": "cfg:g=2"}), ({"warp": "rpg"},) * 2]
)
def test_generate_takes_old_names(old: dict[str, Any], new: dict[str, Any]) -> None:
    lm = tiny.lm()
    new = {NEW_NAMES.get(name, name): value for name, value in new.items()}
    wanted = lm.generate("A text of", "plain", **SHORT, **new)
    with pytest.warns(RenamedOption, match=f"{next(iter(old))}= is"):
        assert lm.generate("A text of", "plain", **SHORT, **old).tokens == wanted.tokens
    with pytest.raises(UnknownMethod, match="executor"):
        lm.generate("A text of", executor="torch")


@pytest.mark.filterwarnings("always::foretell.core.renamed_options.RenamedOption")
def test_a_command_says_so_in_a_line_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny.save(tiny.llama(), tmp_path / "model"))
    capsys.readouterr()
    given = ["--model", folder, "--raw", "--max-new-tokens", "4", "--executor", "torch"]
    assert cli.run(["generate", *given, "--rows", "cfg:g=2", "A text"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "warning: --executor is --backend now; write --backend",
        "warning: --rows is --guidance now; write --guidance",
    ]


def test_load_takes_old_names(tmp_path: Path) -> None:
    folder = str(tiny.save(tiny.llama(), tmp_path / "model"))
    with pytest.warns(RenamedOption):
        lm = foretell.load(folder, executor="torch")  # type: ignore[call-arg]
    (report,) = diagnose(lm)
    assert report.backend == "torch"


@pytest.mark.filterwarnings("always::foretell.core.renamed_options.RenamedOption")
@pytest.mark.parametrize(
    "given", [["--rows", "cfg", "--guidance", "cfg"], ["--guidance=cfg", "--rows=cfg"]]
)
def test_a_command_refuses_both(capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert cli.run(["generate", *given, "A text"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == "error: --rows is --guidance now, and both are given; leave --rows out"


def test_values_of_other_options_are_no_old_names(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--stop", "--rows", "--model", "nowhere", "--", "--warp"]
    assert cli.run(["generate", *given]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere: no such folder")


def test_a_command_without_the_option_does_not_know_the_old_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["methods", "--rows"]) == 2
    assert "No such option: --rows" in capsys.readouterr().err

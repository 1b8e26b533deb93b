"""What the pages show works: commands are ones that there are, Python is as tidy as the project's
and runs where that is cheap, links lead to something that the site has, and who follows the page on
methods to the letter passes `make check`.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

import foretell
from foretell.cli import app
from foretell.errors import BadFile
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
ENDS = ("|", "&", "&&", ">", ";")  # of a command
CHATS = re.compile(r"smollm2(-dlm|-draft)?$")  # names of chat models
# What ruff cannot know of a block: names that a page has explained, values that are only shown.
FREE = "F821,B018,E402,S"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# Pages of which every block runs, on a small model whatever it is called, and the blocks that lack
# something that a test does not have.
RUN = {
    "README.md": {},
    "docs/chat.md": {},
    "docs/choose.md": {},
    "docs/models.md": {1: "a model that fills canvases"},
    "docs/python.md": {1: "a model that fills canvases", 5: "a trained compressor"},
    "docs/quickstart.md": {5: "inputs of transformers' own, see test_custom_generate.py"},
    "docs/scaling.md": {3: "several GPUs", 7: "vLLM", 8: "SGLang"},
    "docs/structured.md": {},
}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text("utf-8"), re.M | re.S)


def test_a_method_has_figures_or_its_page_says_that_there_are_none() -> None:
    pages = [page.read_text("utf-8") for page in (DOCS / "methods").glob("*.md")]
    sections = [one for page in pages for one in page.split("\n## ") if "\n- Guarantee: " in one]
    told = re.compile(r"^(\*\*Measured\*\*|Measured: .+)$", re.M)
    assert len(sections) > 100 and [one for one in sections if not told.search(one)] == []


# --- commands


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `foretell` on a page."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if "foretell" not in line or line.startswith("#"):
                continue
            words = [*shlex.split(line, comments=True), ";"]
            while words:
                end = next(i for i, word in enumerate(words) if word in ENDS)
                if end and Path(words[0]).name == "foretell":
                    found.append(words[1:end])
                words = words[end + 1 :]
    return found


def parsed(words: list[str]) -> typer.Context:
    """The command with its options read, and not run. Raises what a wrong one raises."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("foretell", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_of_a_page_can_be_given(page: Path) -> None:
    for words in commands(page):
        try:
            context = parsed(words)
        except (typer.Exit, BadFile):  # --version, or a file that a reader has and we have not
            continue
        except (typer.TyperException, SystemExit) as error:
            pytest.fail(f"foretell {shlex.join(words)}: {error}")
        given = context.params
        if context.info_name in ("generate", "trace") and CHATS.search(given["model"]):
            text = given["prompt"]
            said = given["turn"] is not None or text.rstrip().endswith(("?", ".", "-"))
            assert said, f"{text!r} is no question: say --raw for a text that is continued"


def test_a_command_that_there_is_not_is_noticed() -> None:
    for wrong in (["generate", "--modle", "x", "y"], ["generat", "y"], ["train", "hed"]):
        with pytest.raises(typer.TyperException):
            parsed(wrong)


# --- Python


def test_python_on_the_pages_is_as_tidy_as_the_project_s(tmp_path: Path) -> None:
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            name = named(page).replace("/", "_").replace("-", "_").removesuffix(".md")
            (tmp_path / f"{name}_{number}.py").write_text(block, "utf-8")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for tool in (["check", f"--extend-ignore={FREE}"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *tool, *config]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What blocks find: a small chat model under every name, and files in the working folder."""
    coder = tiny.tokenizer()
    monkeypatch.setattr(coder, "chat_template", TEMPLATE)

    def load(source: str = "demo", **options: Any) -> foretell.LM:
        lm = tiny.lm()
        for name in options.get("models") or {}:
            lm.models[name], lm.tokenizers[name] = lm.models["draft"], coder
        return lm

    monkeypatch.setattr(foretell, "load", load)
    monkeypatch.chdir(tmp_path)
    for name in ("monday", "tuesday", "friday"):
        Path(f"{name}.txt").write_text(f"On {name} all was well.\n")
    Path("module.py").write_text("def add(first, second):\n    return first + second\n" * 3)
    lm = load()
    prompt = lm.encode("def add(a, b):")
    known = {"foretell": foretell, "json": json, "Path": Path, "lm": lm, "prompt": prompt}
    return known | dict.fromkeys(("one", "two", "three"), prompt)


@pytest.mark.parametrize("page", RUN)
@pytest.mark.filterwarnings("ignore::foretell.errors.BareText")
def test_python_on_a_page_runs(page: str, small: dict[str, Any]) -> None:
    found = blocks(ROOT / page, "python")
    assert set(RUN[page]) <= set(range(len(found)))
    for number, block in enumerate(found):
        if number in RUN[page]:
            continue
        with redirect_stdout(io.StringIO()):
            exec(compile(block, f"{page}, block {number}", "exec"), small)
        for said, value in re.findall(r"^(\w+\(.*\))  # = (.+)$", block, re.M):
            want = eval(value, small)
            want = pytest.approx(want) if isinstance(want, float) else want
            assert eval(said, small) == want, said


# --- links


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_something_and_those_of_the_site_stay_in_it(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text("utf-8")):
        there = (page.parent / target).resolve()
        assert there.exists(), f"{named(page)}: there is no {target}"
        if page.is_relative_to(DOCS):
            assert there.is_relative_to(DOCS), f"{named(page)}: the site has no {target}"


# --- docs/add-a-method.md


def test_a_method_made_by_the_page_passes_make_check(tmp_path: Path) -> None:
    """In a copy of the project: lint, format, sizes, generated pages, and its own tests."""
    for name in ("foretell", "docs", "scripts", "tests", "dev"):
        ignored = shutil.ignore_patterns("__pycache__", "assets", "src", "*.so", "LOG.md.*")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copytree(ROOT / "foretell/assets", tmp_path / "foretell/assets", copy_function=_light)
    shutil.copytree(ROOT / "models", tmp_path / "models", copy_function=_light)
    for name in ("pyproject.toml", "mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    method, its_test = blocks(DOCS / "add-a-method.md", "python")
    (tmp_path / "foretell/drafters/lookup/echo.py").write_text(method, "utf-8")
    (tmp_path / "tests/drafters/lookup/test_echo.py").write_text(its_test, "utf-8")
    both = ["foretell/drafters/lookup/echo.py", "tests/drafters/lookup/test_echo.py"]
    for command in (
        ["-m", "ruff", "check", "--no-cache", *both],
        ["-m", "ruff", "format", "--check", "--no-cache", *both],
        ["scripts/docs.py"],
        ["scripts/size.py"],
        ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", both[1]],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    page = (tmp_path / "docs/methods/lookup-drafters.md").read_text("utf-8")
    assert "\n## echo\n" in page


def _light(source: str, target: str) -> None:
    """Copies a file, and links one that is large."""
    path = Path(source)
    if path.stat().st_size > 100_000:
        Path(target).symlink_to(path)
    else:
        shutil.copy(source, target)

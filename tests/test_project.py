"""What holds for the project as a whole: names, files, imports, documentation, budgets."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import foretell
from foretell import cards, registry
from foretell.cli import app
from foretell.core.types import Sampling
from foretell.spec import (
    build_cache_policy,
    build_constraint,
    build_guidance,
    build_processors,
    resolve_method,
    with_reward,
)
from tests import laws

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "foretell"
METHODS = sorted(
    key for key, path in registry.method_files().items() if path.is_relative_to(PACKAGE)
)
SAMPLING = {f.name for f in dataclasses.fields(Sampling)}
SPECS = {
    "kv": build_cache_policy,
    "guidance": build_guidance,
    "processor": build_processors,
    "constraint": build_constraint,
}
README_LIMIT = 8192  # bytes


def script(name: str) -> ModuleType:
    """A file of scripts/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


size = script("size")
house = script("house")
docs = script("docs")
method_pages = script("method_pages")
option_tables = script("option_tables")


def runs(*code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, *code], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


# --- public names


def test_public_names_exist_and_are_sorted() -> None:
    order = sorted(
        foretell.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )  # as ruff does
    assert foretell.__all__ == order and len(set(order)) == len(order)
    for name in foretell.__all__:
        value = getattr(foretell, name)
        assert value.__doc__, f"foretell.{name} has no docstring"
        assert not isinstance(value, ModuleType), (
            f"foretell.{name} is a module, not what it should be"
        )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        foretell.generate  # noqa: B018


def test_listing_methods_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, foretell; foretell.methods(); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert runs("-c", code).strip() == "[]"


# --- methods


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_has_a_full_card_and_a_test_file(kind: str, name: str) -> None:
    card = cards.card(name, kind)
    for label in cards.LABELS:
        assert getattr(card, label.lower()), f"{name}: {label} is empty"
    assert re.match(r"(exact|greedy)$|(bounded|lossy): \S", card.guarantee), card.guarantee
    assert card.summary.endswith("."), f"{name}: the first line of the card is one sentence"
    assert card.prose, f"{name}: the card does not say how it works"
    test = laws.test_file(card.file)
    assert test.is_file(), f"{test.relative_to(ROOT)} is missing"


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_the_command_of_a_page_tries_its_method(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one that `foretell generate` takes, and lacks nothing that a spec must say."""
    monkeypatch.chdir(tmp_path)
    Path("FILE.jsonl").write_text('{"tests": ["assert add(1, 2) == 3"]}')
    program, *arguments = shlex.split(method_pages.command(cards.card(name, kind)))
    assert (program, arguments[0]) == ("foretell", "generate")
    command = typer.main.get_command(app)
    top = command.make_context("foretell", arguments)
    _, chosen, rest = command.resolve_command(top, arguments)  # type: ignore[attr-defined]
    options = chosen.make_context("generate", rest, parent=top).params
    flag = method_pages.FLAGS.get(kind, "method")
    assert name in f"{options['method']} {options['reward']} {options[flag]}"
    made = (
        resolve_method
        if options["reward"] is None
        else partial(with_reward, reward=options["reward"])
    )
    made(options["method"])
    for option, read in SPECS.items():
        if options[option]:
            read(options[option])


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_a_method_is_one_frozen_dataclass_with_explained_fields(kind: str, name: str) -> None:
    card = cards.card(name, kind)
    cls = registry.load_method(name, kind)
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    own = method_pages.fields(card)
    assert {f.name for f in own} == set(card.defaults) == {f.name for f in dataclasses.fields(cls)}
    assert {f.name: f.default for f in dataclasses.fields(cls)} == card.defaults
    for field in own:
        assert field.comment or field.name in str(cls.__doc__), (
            f"{name}: nothing says what {field.name} is"
        )


@cache
def read_package() -> dict[Path, tuple[list[ast.ImportFrom], list[str], list[str]]]:
    """Of every file of the package, read once: its imports, private uses, what is forbidden."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        found[path] = (imports, private_uses(nodes), forbidden(nodes))
    return found


def modules() -> dict[str, set[str]]:
    """Of every module of the package the modules it imports, for type hints too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        found[name] = set()
        for node in read_package()[path][0]:
            if node.module in files:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & files.keys()
                found[name] |= inner or {str(node.module)}
    found["foretell"] = set()  # its names are imported when they are used
    return found


def test_no_imports_run_in_a_circle() -> None:
    assert house.circles(modules()) == []


def test_a_circle_is_noticed() -> None:
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def private_uses(nodes: list[ast.AST]) -> list[str]:
    """Private names of other modules that a file imports, or reads of what it imported."""
    imported = set()
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("foretell"):
            for alias in node.names:
                imported.add(alias.asname or alias.name)
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    found.append(alias.name)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private and node.value.id in imported:
                found.append(f"{node.value.id}.{node.attr}")
    return found


def test_private_names_stay_in_their_modules() -> None:
    found = {path.name: uses for path, (_, uses, _) in read_package().items()}
    assert [(name, uses) for name, uses in found.items() if uses] == []
    assert private_uses(list(ast.walk(ast.parse("from foretell import _x"))))


# --- budgets and safety


def test_the_heart_and_every_method_keep_their_budgets() -> None:
    assert size.over() == []


def test_a_broken_budget_is_noticed(tmp_path: Path) -> None:
    for folder in ("ops", "drafters/lookup"):
        (tmp_path / "foretell" / folder).mkdir(parents=True)
    lookup = tmp_path / "foretell" / "drafters" / "lookup"
    (lookup / "ngram.py").write_text("from foretell.ops import a0\n")
    for i in range(10):
        following = f"from foretell.ops import a{i + 1}\n" if i < 9 else ""
        (tmp_path / "foretell" / "ops" / f"a{i}.py").write_text(following + "x = 1\n" * 455)
    (lookup / "long.py").write_text('"""A method.\n\nGuarantee: exact\n"""\n' + "x = 1\n" * 277)
    (tmp_path / "foretell" / "wide.py").write_text("#" * 101)
    heart, method, wide = size.over(tmp_path)
    assert "drafters/lookup/ngram.py reaches 4560 lines, 60 over" in heart
    assert "long.py has 281 lines" in method
    assert "wide.py:1 is wider than 100 columns" in wide


def test_the_budgets_are_written_down_as_they_are_checked() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for number in (size.REACH_LIMIT, size.METHOD_LIMIT, size.FILE_LIMIT, size.COLUMNS):
        assert re.search(rf"\b{number:,}\b", page), f"CONTRIBUTING.md lacks the budget {number:,}"


def forbidden(nodes: list[ast.AST]) -> list[str]:
    """Uses of what can run code that stands in a file, or that reads files which can."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            )
            found += [
                n
                for n in names
                if n.split(".")[0] in ("pickle", "dill", "joblib", "marshal", "shelve")
            ]
        elif isinstance(node, ast.Call):
            simple = isinstance(node.func, ast.Name | ast.Attribute)
            called = ast.unparse(node.func) if simple else ""
            if called in (
                "eval",
                "exec",
                "compile",
                "torch.load",
                "torch.save",
                "os.system",
                "__import__",
            ):
                found.append(called)
            if any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
                for k in node.keywords
            ):
                found.append(f"{called}(shell=...)")
    return found


def test_nothing_unpickles_or_evaluates() -> None:
    found = {path.name: uses for path, (_, _, uses) in read_package().items()}
    assert [(name, uses) for name, uses in found.items() if uses] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "torch.load(f)",
        "eval(x)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_what_is_forbidden_is_noticed(source: str) -> None:
    assert forbidden(list(ast.walk(ast.parse(source))))


def test_versions_and_dependencies_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    )
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    for requirement in wanted:
        name = re.match(r"[\w-]+", requirement)
        assert name and name[0] in pins, f"constraints.txt does not pin {requirement}"
    assert pins["torch"] == "2.13.0"
    assert "[Unreleased]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


# --- documentation


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_LIMIT


def test_generated_documentation_is_up_to_date_and_is_made_without_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import docs; "
        "print(docs.main(['--check']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"], done.stderr


def test_drift_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "methods" / "lookup-drafters.md"
    right = {path: path.read_text("utf-8") for path in page.parent.rglob("*.md")}
    monkeypatch.setattr(docs, "pages", lambda: right)
    assert docs.main(["--check"]) == 0
    monkeypatch.setattr(docs, "pages", lambda: {**right, page: right[page] + "more"})
    assert docs.main(["--check"]) == 1
    assert "docs/methods/lookup-drafters.md differs" in capsys.readouterr().err
    monkeypatch.setattr(docs, "pages", lambda: {p: text for p, text in right.items() if p != page})
    assert docs.main(["--check"]) == 1


def test_an_entry_of_the_log_without_a_verdict_is_noticed() -> None:
    assert "| kept |" in docs.log_index("## 2026-11-22: a try (kept)\n")
    with pytest.raises(SystemExit, match="write '2026-11-22: a try' as"):
        docs.log_index("## 2026-11-22: a try\n")


def test_fields_are_read_with_their_comments() -> None:
    fields = {f.name: f for f in method_pages.fields(cards.card("ngram"))}
    assert (fields["n"].type, fields["n"].default, fields["n"].comment) == (
        "int",
        "3",
        "longest n-gram looked up; between 1 and 64",
    )
    assert method_pages.draws(cards.card("draft")) and not method_pages.draws(cards.card("ngram"))


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []


def test_every_method_has_one_anchor_and_one_line_of_the_index() -> None:
    folder = ROOT / "docs" / "methods"
    index = (folder / "index.md").read_text("utf-8")
    for card in method_pages.read_cards():
        page = folder / f"{method_pages.page_of(method_pages.method_folder(card)).stem}.md"
        assert page.read_text("utf-8").count(f"\n## {card.name}\n") == 1
        assert index.count(f"({page.name}#{card.name})") == 1


def test_a_shared_option_stands_once_and_its_commands_name_it() -> None:
    class Parameter:
        secondary_opts = ()
        metavar, required = "", False

        def __init__(self, name: str, default: object, meaning: str) -> None:
            self.opts, self.default, self.help = [name], default, meaning

    class Command:
        def __init__(self, *params: Parameter) -> None:
            self.params = params

    first = Command(Parameter("--seed", 0, "Of draws."), Parameter("--own", 1, "Its own."))
    second = Command(Parameter("--seed", 7, "Of draws."))
    third = Command(Parameter("--seed", 0, "Of draws."))
    tables = option_tables.OptionTables({"one": first, "two": second, "three": third})
    assert tables.shared_tables().count("| `--seed` | `0` | Of draws. | one, two, three |") == 1
    assert "--seed" not in tables.own_table("one").partition("Shared options")[0]
    assert "`--own`" in tables.own_table("one")
    assert "with `--seed` (`7`)" in tables.own_table("two")


def test_every_page_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in site, f"{page} is not in mkdocs.yml"


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Sampling)])
def test_every_sampling_option_is_explained(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "sampling.md").read_text("utf-8"), re.M)
    assert rows.count(name) == 1, f"docs/sampling.md explains {name} {rows.count(name)} times"


def test_everything_public_is_explained() -> None:
    from foretell import errors
    from foretell.api.outputs import Output, Piece
    from foretell.core.stats import Stats

    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    wanted = [*foretell.__all__, *inspect.signature(foretell.load).parameters]
    wanted += [
        f.name for cls in (Output, Piece, Stats, cards.Card) for f in dataclasses.fields(cls)
    ]
    wanted += [name for name, value in vars(Stats).items() if isinstance(value, property)]
    wanted += [
        n
        for n, v in vars(errors).items()
        if isinstance(v, type) and issubclass(v, errors.ForetellError)
    ]
    missing = [name for name in wanted if not re.search(rf"`(foretell\.)?{name}[`(]", page)]
    assert missing == []


def blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S
    )


def test_the_example_of_a_method_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, tests = blocks("add-a-method.md")
    (tmp_path / "echo.py").write_text(method)
    # Another package's method is a module of its kind's folder.
    (tmp_path / "test_echo.py").write_text(tests.replace("drafters.lookup.echo", "drafters.echo"))
    monkeypatch.setattr(
        registry, "method_files", lambda: {("drafter", "echo"): tmp_path / "echo.py"}
    )
    assert cards.card("echo").defaults == {"k": 8}
    monkeypatch.setitem(
        sys.modules, "foretell.drafters.echo", None
    )  # put back as it was afterwards
    del sys.modules["foretell.drafters.echo"]
    assert registry.load_method("echo", "drafter")().k == 8
    spec = importlib.util.spec_from_file_location("test_echo", tmp_path / "test_echo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(cases) == 2
    for case in cases:
        case()


# --- the command line


def test_the_command_line_offers_every_sampling_option() -> None:
    offered = {option for p in option_tables.commands()["generate"].params for option in p.opts}
    wanted = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(Sampling)} - {
        "--logits-processors",
        "--constraint",
    }
    assert wanted <= offered, f"foretell generate lacks {sorted(wanted - offered)}"


@pytest.mark.parametrize("name", sorted(option_tables.commands()))
def test_a_command_answers_to_help_and_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert f"\n## foretell {name}\n" in page
    for parameter in option_tables.commands()[name].params:
        assert parameter.help or parameter.name in SAMPLING or name == "train lm", (
            f"nothing says what {parameter.name} is"
        )
    run = CliRunner().invoke(app, [*name.split(), "--help"])
    assert run.exit_code == 0 and "Usage" in run.output

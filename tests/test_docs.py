"""The hand-written pages: the names they use exist, their calls come in the order they say, and
their examples run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import house
import pytest

from foretell.backends.graphs import GraphsBackend
from foretell.core import types
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.models import backend_registry as registry
from foretell.models.decoder.decoder import Decoder
from foretell.spec import resolve_method
from foretell.testing.toy import Toy
from foretell.verification import acceptance as verify
from tests.models.decoder.families import tiny

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "foretell"
FOLDERS = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MODULES = "|".join(path.stem for path in PACKAGE.glob("[!_]*.py"))
NAME = re.compile(rf"`((?:(?:{FOLDERS})\.\w+|{MODULES})(?:\.(?!py\b)\w+)+)`")
HAND_WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES = [*HAND_WRITTEN, *sorted((DOCS / "methods").glob("*.md"))]


def text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def exists(name: str) -> bool:
    """Whether `core.tree.TokenTree` exists: modules as far as they go, then attributes."""
    parts = name.split(".")
    value: Any = None
    for i, part in enumerate(parts):
        try:
            value = importlib.import_module(".".join(["foretell", *parts[: i + 1]]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("foretell."):
                pytest.skip(f"{error.name} is not installed here")
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda path: path.name)
def test_every_name_of_a_page_exists(page: Path) -> None:
    missing = [name for name in NAME.findall(page.read_text("utf-8")) if not exists(name)]
    assert missing == []


@pytest.mark.parametrize(
    "name", ["verification.acceptance.wlak", "core.nothing.walk", "engine.engine.Engine.x"]
)
def test_a_name_that_does_not_exist_is_noticed(name: str) -> None:
    assert NAME.findall(f"see `{name}` there") == [name] and not exists(name)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda path: path.name)
def test_python_on_a_page_is_python_and_imports_what_exists(page: Path) -> None:
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("foretell."):
                module = str(node.module).removeprefix("foretell.")
                if module == "drafters.lookup.echo":  # the example that a reader writes
                    continue
                missing = [a.name for a in node.names if not exists(f"{module}.{a.name}")]
                assert missing == [], f"{node.module} has no {missing}"


# --- docs/step.md


def calls(title: str) -> list[str]:
    """The first name of each numbered item below a heading of docs/step.md."""
    section = text("step.md").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    items = re.split(r"^\d+\. ", section, flags=re.M)[1:]
    return [NAME.findall(item)[0] for item in items]


@contextmanager
def noted() -> Iterator[list[str]]:
    """The functions of foretell that are called inside, a resumed generator each time."""
    called: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("foretell."):
            called.append(f"{module.removeprefix('foretell.')}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def in_order(wanted: Sequence[str], called: Sequence[str]) -> str:
    """The first of `wanted` that does not follow those before it, or "" if all do."""
    place = 0
    for name in wanted:
        while place < len(called) and called[place] != name:
            place += 1
        if place == len(called):
            return name
        place += 1
    return ""


def after_the_prompt(engine: Engine, spec: str, prompt: list[int]) -> None:
    """A request whose next step is no part of its prompt any more."""
    engine.add(Request(prompt, resolve_method(spec)[1], Sampling(max_new_tokens=8)))
    engine.step()


def test_a_plain_step_makes_these_calls() -> None:
    engine = Engine({"target": Toy(8)})
    after_the_prompt(engine, "plain", [1, 2, 3])
    with noted() as called:
        engine.step()
        engine.step()
    wanted = calls("A plain step")
    assert len(wanted) == 10 and in_order(wanted, called) == ""
    assert "testing.toy.Toy.run" in called


def test_a_long_prompt_makes_these_calls() -> None:
    engine = Engine({"target": Toy(8)})
    after_the_prompt(engine, "plain", [1, 2, 3])
    writing = engine.live[0]
    with noted() as called:
        live = engine.add(Request([1, 2, 3, 4] * 300, resolve_method("plain")[1]))
        while not live.ctx.output:
            engine.step()
    wanted = calls("A long prompt, in chunks")
    assert len(wanted) == 10 and in_order(wanted, called) == ""
    assert len(writing.ctx.output) >= 3, "the other request had to wait"


def test_a_step_with_drafts_makes_these_calls() -> None:
    model = Decoder(tiny("llama"), "llama")
    model.use(partial(GraphsBackend, record=None))
    engine = Engine({"target": model})
    after_the_prompt(engine, "ngram:nodes=4", [5, 6, 7, 8, 9, 5, 6, 7])
    live = engine.live[0]
    with noted() as called:
        while engine.live:
            engine.step()
    assert live.ctx.stats.drafted
    wanted = calls("A step with drafts, on a backend")
    assert len(wanted) == 10 and in_order(wanted, called) == ""
    backend = "backends.graphs.GraphsBackend.__call__"
    compute = "models.decoder.decoder.Decoder.compute"
    assert in_order([compute, backend, "speculation.strategy.verify_and_commit"], called) == ""


def test_another_order_is_noticed() -> None:
    assert in_order(["a", "b"], ["a", "c", "b"]) == ""
    assert in_order(["b", "a"], ["a", "c", "b"]) == "a"


def test_the_line_that_accepts_a_drafted_token_is_where_the_page_says() -> None:
    page = text("step.md")
    for name, line in (
        ("walk_tree", "outcome.path.append(child)"),
        ("verify_in_order", "outcome.path.append(accepted_child)"),
    ):
        function = getattr(verify, name)
        assert line in inspect.getsource(function)
        assert f"`verification.acceptance.{name}`" in page and f"`{line}`" in page
        path = Path(str(inspect.getsourcefile(function))).relative_to(ROOT).as_posix()
        assert f"`{path}`" in page


# --- docs/glossary.md

TERMS = """branch tree node try row rule walk outcome source drafter law p q segment tap feature ask
commit backend family view tenant store MAT scratch job card head trace profile""".split()


def terms() -> list[str]:
    """Everything that the glossary explains; one entry may have several, with commas between."""
    entries = re.findall(r"^\| \*\*(.+?)\*\* \|", text("glossary.md"), re.M)
    return [term for entry in entries for term in entry.split(", ")]


def test_the_glossary_has_every_term_once() -> None:
    explained = terms()
    assert len(explained) == len(set(explained))
    assert set(TERMS) <= set(explained)
    for group in ("cache policy", "policy of sizes", "plan of a cache", "plan of an engine"):
        assert group in explained


def test_the_letters_of_shapes_are_those_of_the_code() -> None:
    in_code = re.findall(r"\b([A-Z])  (\S+(?: \S+)*)", str(types.__doc__))
    on_page = re.findall(r"^\| `([A-Z])` \| (.+?) \|$", text("glossary.md"), re.M)
    assert sorted(in_code) == sorted(on_page) and len(on_page) == 8


def docstring_lines(path: Path) -> list[str]:
    """The lines of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()


@cache
def searchable() -> str:
    """What grep finds a word of the field in: paths of the package, lines of its docstrings."""
    lines = []
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        lines += [place, place.replace("_", " "), place.replace("_", "-"), *docstring_lines(path)]
    return "\n".join(lines).lower()


def words_of_the_field() -> list[tuple[str, str]]:
    """(word, file below foretell/) of the glossary's first table."""
    section = text("glossary.md").partition("\n## Words of the field\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|`]+?) \| [^|`]+ \| `(\S+)` \|$", section, re.M)


def test_the_glossary_names_words_of_the_field_and_their_files() -> None:
    found = words_of_the_field()
    assert len(found) == len(dict(found)) >= 40
    assert [file for _, file in found if not (PACKAGE / file).is_file()] == []


@pytest.mark.parametrize("word", [word for word, _ in words_of_the_field()])
def test_a_word_of_the_field_is_found_in_the_package(word: str) -> None:
    if word.lower() not in searchable():
        pytest.fail(f"no path and no module's docstring has {word!r}")


def test_a_word_that_the_package_lacks_is_noticed() -> None:
    assert "speculative decodings of the third kind" not in searchable()


def test_a_term_is_explained_in_one_sentence() -> None:
    for line in re.findall(r"^\| \*\*.+?\*\* \| (.+?) \|$", text("glossary.md"), re.M):
        assert line.endswith(".") and ". " not in line, line


# --- docs/where.md

PLAIN_WORDS = "come does each from have here into many more that their them they this what when "
PLAIN_WORDS += "where which with work works"
ENDINGS = ("ised", "ized", "ings", "ing", "ed", "es", "s", "er")


def questions(page: str) -> list[tuple[str, list[str]]]:
    """(question, files below foretell/) of a page's tables."""
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", page, re.M)
    return [(question, re.findall(r"`([^`]+)`", files)) for question, files in rows]


def stem(word: str) -> str:
    """A word without its ending: evicted -> evict."""
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word


def complaints_about(question: str, files: Sequence[str]) -> list[str]:
    """What is wrong with a question of docs/where.md and the files that it leads to."""
    missing = [file for file in files if not (PACKAGE / file).is_file()]
    if missing or not 1 <= len(files) <= 3:
        return [f"{question} needs one to three files that exist: {missing or files}"]
    words = set(re.findall(r"[a-z]{4,}", question.lower())) - set(PLAIN_WORDS.split())
    known = " ".join([files[0], *docstring_lines(PACKAGE / files[0])]).lower()
    if any(stem(word) in known for word in words):
        return []
    return [f"{question} no word of it stands in {files[0]}"]


def test_every_question_leads_to_files_by_a_word_of_it() -> None:
    found = questions(text("where.md"))
    assert len(found) >= 25
    assert [one for pair in found for one in complaints_about(*pair)] == []


@pytest.mark.parametrize(
    ("question", "files"),
    [
        ("How are KV entries evicted?", ["kv/evict/none.py"]),
        ("How are KV entries evicted?", ["errors.py"]),
        ("How are KV entries evicted?", []),
        ("How are KV entries evicted?", ["kv/evict/h2o.py"] * 4),
    ],
)
def test_a_question_that_leads_nowhere_is_noticed(question: str, files: list[str]) -> None:
    assert complaints_about(question, files)


# --- docs/tour.md


def test_the_tour_names_files_that_exist() -> None:
    named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text("tour.md"))
    roots = (PACKAGE, ROOT)
    missing = [file for file in named if not any((root / file).is_file() for root in roots)]
    assert len(named) > 60 and missing == []


def test_the_tour_goes_through_every_folder() -> None:
    page = text("tour.md").partition("<!-- /layers -->")[2]
    tops = {name.partition("/")[0] for name, _ in house.LAYERS if not name.endswith(".py")}
    assert [name for name in sorted(tops) if f"`{name}/" not in page] == []


# --- docs/add-a-model.md


def files(page: str) -> dict[str, str]:
    """The Python blocks of a page, by the file that the line before each names."""
    pattern = r"(?:`(\w+\.py)`[^`]*?)?\n\n```python\n(.*?)^```"
    found = {}
    for i, (name, code) in enumerate(re.findall(pattern, text(page), re.M | re.S)):
        found[name or f"block_{i}.py"] = code
    return found


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of docs/add-a-model.md, from which they can be imported."""
    names = set()
    for name, code in files("add-a-model.md").items():
        (tmp_path / name).write_text(code)
        names.add(name.removesuffix(".py"))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in names:
        sys.modules.pop(name, None)


def cases(module: Any) -> list[Any]:
    return [value for name, value in vars(module).items() if name.startswith("test_")]


@pytest.mark.parametrize(("name", "count"), [("test_one_layer", 3), ("test_hinted", 1)])
def test_the_examples_of_models_hold(name: str, count: int, written: Path) -> None:
    own = cases(importlib.import_module(name))
    assert len(own) == count
    for case in own:
        case()


def test_the_example_of_a_view_runs(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = importlib.import_module("block_2")
    plain = view.lm.generate("def add(a, b):", "plain", max_new_tokens=24)
    assert capsys.readouterr().out.rstrip("\n") == plain.text.rstrip("\n")
    assert view.live.ctx.output == plain.tokens and view.live.ctx.stats.accepted > 0


def test_the_example_of_a_backend_is_found_and_computes(written: Path) -> None:
    runtime = importlib.import_module("eager")
    source = (written / "eager.py").read_text("utf-8")
    declared = registry.DECLARATION.search(source)
    assert declared and (declared[1], int(declared[2])) == (runtime.DEVICE, runtime.PRIORITY)
    model = Decoder(tiny("llama"), "llama")
    model.use(runtime.make_backend)
    texts = []
    for spec in ("plain", "token-recycling:nodes=6"):
        engine = Engine({"target": model})
        live = engine.add(
            Request([5, 6, 7, 5, 6], resolve_method(spec)[1], Sampling(max_new_tokens=12))
        )
        for _ in engine.run():
            pass
        assert live.error is None and model.computed_by == "eager"
        texts.append(live.ctx.output)
    assert texts[0] == texts[1]


# --- dev/LOG.md


def test_the_log_s_index_leads_to_every_entry() -> None:
    log = (ROOT / "dev" / "LOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.+)$", log, re.M)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"\]\(#([\w-]+)\)", log) == anchors
    dates = [heading[:10] for heading in headings]
    assert dates == sorted(dates, reverse=True), "the newest entry stands first"


@cache
def page_text(file: Path) -> str:
    return file.read_text("utf-8")


def test_every_anchor_of_a_link_exists() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text("utf-8")):
            file = page.parent / target if target else page
            titles = re.findall(r"^#+ (.+)$", page_text(file), re.M)
            known = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            if anchor not in known:
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []

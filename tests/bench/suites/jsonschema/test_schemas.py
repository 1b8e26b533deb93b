"""The schemas of the suite, from files of every layout and generated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.settings import Settings
from foretell.bench.suites.jsonschema import Item, prepare
from foretell.bench.suites.jsonschema.checking import Checker
from foretell.bench.suites.jsonschema.schemas import COUNT, DRAFTS, generate_schemas
from foretell.constraints.grammars import Grammars
from foretell.errors import BadConfig
from tests import tiny

NUMBER = {"type": "number"}
TEXT = {"type": "string"}


def write(path: Path, *documents: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(document) for document in documents) + "\n", "utf-8")
    return path


def test_rows_with_schemas_are_read_by_their_splits(tmp_path: Path) -> None:
    rows = [{"split": "easy", "name": "o1", "schema": NUMBER}, {"name": "o2", "schema": TEXT}]
    path = write(tmp_path / "sample.jsonl", *rows)
    assert prepare([path], Settings()) == [Item("easy", "o1", NUMBER), Item("sample", "o2", TEXT)]


def test_the_official_suite_is_read_by_drafts_each_schema_with_its_version(tmp_path: Path) -> None:
    group = {"description": "a type", "schema": NUMBER, "tests": []}
    dated = {"description": "b", "schema": {"$schema": "mine", **TEXT}, "tests": []}
    write(tmp_path / "tests/draft7/type.json", [group, dated, group])
    write(tmp_path / "tests/draft4/optional/x.json", [{"description": "never", "schema": False}])
    write(tmp_path / "remotes/integer.json", {"type": "integer"})
    first, second, third, fourth = prepare([tmp_path], Settings())
    assert first == Item("draft4", "x: never", False)
    assert second == Item("draft7", "type: a type", {"$schema": DRAFTS["draft7"], **NUMBER})
    assert third == Item("draft7", "type: b", {"$schema": "mine", **TEXT})
    assert fourth.schema == second.schema and fourth.name == "type: a type (3)"


def test_a_file_may_be_a_schema_or_a_row(tmp_path: Path) -> None:
    write(tmp_path / "mine/a.json", NUMBER)
    write(tmp_path / "mine/b.json", {"schema": TEXT, "tests": []})
    want = [Item("mine", "a", NUMBER), Item("mine", "b", TEXT)]
    assert prepare([tmp_path / "mine"], Settings()) == want
    assert prepare([tmp_path / "mine/b.json"], Settings()) == want[1:]


def test_a_limit_takes_so_many_of_each_set_by_the_seed(tmp_path: Path) -> None:
    rows = [{"split": f"s{i % 2}", "name": str(i), "schema": NUMBER} for i in range(40)]
    path = write(tmp_path / "all.jsonl", *rows)
    taken = prepare([path], Settings(), 3)
    assert [item.set for item in taken] == ["s0"] * 3 + ["s1"] * 3
    names = [int(item.name) for item in taken]
    assert names[:3] == sorted(names[:3]) and taken == prepare([path], Settings(), 3)
    assert taken != prepare([path], Settings(seed=1), 3)
    assert len(prepare([path], Settings())) == 40


def test_generated_schemas_are_valid_different_and_always_the_same() -> None:
    items = prepare([], Settings())
    assert len(items) == COUNT and items == generate_schemas(0, COUNT)
    assert items != generate_schemas(1, COUNT) and items[:5] == prepare([], Settings(), 5)
    texts = [json.dumps(item.schema) for item in items]
    assert len(set(texts)) == COUNT
    for word in ("$ref", "array", "anyOf", "const", "pattern", "format", "enum"):
        assert any(f'"{word}"' in text for text in texts), word
    grammars = Grammars(tiny.tokenizer(), len(tiny.tokenizer()), [0])
    checker = Checker()
    for item in items:
        grammars.compile_form({"json_schema": item.schema})
        assert checker.judge(item.schema, "{}")[0] == "invalid", "something is required"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.json", None, "does not exist"),
        ("a.json", "{", r"a\.json: cannot be read"),
        ("a.jsonl", '{"schema": {}}\n[1]', "line 2: has no `schema`"),
        ("b.json", "[{}]", "entry 1: has no `schema`"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(BadConfig, match=said) as caught:
        prepare([tmp_path / name], Settings())
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadConfig, match=r"has no \.json"):
        prepare([tmp_path / "empty"], Settings())

"""The suite on a tiny model: what becomes of each schema, and documents that go on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell import cli
from foretell.bench import suites
from foretell.bench.document import write_document
from foretell.bench.settings import Settings
from foretell.bench.suites import jsonschema as suite
from foretell.bench.suites.jsonschema import runner
from foretell.bench.suites.jsonschema.figures import reason_kind, schema_cells
from foretell.bench.suites.jsonschema.schemas import Item
from foretell.errors import BadConfig, BadFile
from tests import tiny

LENIENT = {"lenient": True, "whitespace_flexible": False}
ITEMS = [
    Item("good", "yes", {"enum": ["yes"]}),
    Item("good", "two", {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}),
    Item("bad", "not", {"not": {"pattern": "a"}}),
    Item("bad", "wrong", {"enum": [1], "not": {"type": "integer"}, "x-guidance": LENIENT}),
    Item("bad", "letters", {"type": "string", "pattern": "^\\p{Lu}$"}),
    Item("bad", "long", {"type": "string", "minLength": 600, "maxLength": 900}),
    Item("bad", "prompt", {"const": "x" * 300}),
]
WANT = ["valid", "valid", "refused", "invalid", "unchecked", "cut", "long"]
SETTINGS = Settings(
    models=("tiny",),
    dtypes=("float32",),
    methods=("ngram:n=2,k=3,nodes=3",),
    max_new_tokens=20,
    rounds=2,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model holds few tokens."""
    monkeypatch.setattr(runner, "ASKED", "{schema}")


def load(*_: str) -> foretell.LM:
    return tiny.lm()


def test_every_schema_counts_as_what_became_of_it() -> None:
    document = suite.begin(SETTINGS, ITEMS)
    steps: list[tuple[int, int]] = []
    suite.run(SETTINGS, ITEMS, load, document, lambda _, done, total: steps.append((done, total)))
    assert steps == [(i, len(ITEMS)) for i in range(1, len(ITEMS) + 1)]
    answers = document["answers"]
    for method in SETTINGS.specs:
        own = [answer for answer in answers if answer["method"] == method]
        assert [answer["status"] for answer in own] == WANT
        assert own[0]["text"] == '"yes"' and json.loads(own[1]["text"]) == [1, 1]
        assert all(len(answer["ttft_s"]) == len(answer["free_ttft_s"]) == 2 for answer in own[:2])
    by_set = {cell["set"]: cell for cell in document["cells"] if cell["method"] == "plain"}
    assert by_set["good"]["coverage"] == by_set["good"]["compliance"] == 1
    bad = by_set["bad"]
    assert (bad["schemas"], bad["accepted"], bad["ended"]) == (5, 4, 2)
    assert (bad["coverage"], bad["compliance"], bad["valid_share"]) == (2 / 5, 0, 0)
    assert bad["reasons"]["refused"] == {"pattern is not supported within a negation": 1}
    assert bad["reasons"]["invalid"] == {"not": 1}
    assert by_set["all"]["counts"]["valid"] == 2 and by_set["all"]["schemas"] == 7
    told = suite.failures(document)
    assert len(told) == 2 and all("bad wrong: invalid, not: " in line for line in told)
    json.dumps(document, allow_nan=False)


def test_an_interrupted_run_goes_on_and_failures_are_tried_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "o.json", []

    class Noting(runner.Asker):
        def answers(self, item: Item) -> Any:
            asked.append(item.name)
            return super().answers(item)

    settings, items = Settings(models=("t",), methods=("plain",), max_new_tokens=9), ITEMS[:4]
    document = suite.run(settings, items[:], load, suite.begin(settings, items, path))
    whole = copy.deepcopy(document)
    document["answers"] = document["answers"][:2]
    document["answers"][0]["status"] = "failed"
    write_document(document, path)
    again = suite.begin(settings, items, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Asker", Noting)
        suite.run(settings, items, load, again)
    assert asked == ["yes", "not", "wrong"]
    found = {answer["name"]: answer["status"] for answer in again["answers"]}
    assert found == {answer["name"]: answer["status"] for answer in whole["answers"]}
    with pytest.raises(BadFile, match=r"another settings\.sets"):
        suite.begin(settings, items[:3], path)
    with pytest.raises(BadConfig, match="--requests: --suite jsonschema has no use for it"):
        suite.begin(Settings(requests=(2,)), items)


def test_a_broken_method_is_a_failure_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.Method.run

    def broken(self: Any, *args: Any) -> Any:
        if self.name != "plain" and args[-1] is None:
            raise BadConfig("no free text")
        if self.name != "plain" and len(args[0][0]) < 20:
            raise BadConfig("gave up")
        return real(self, *args)

    monkeypatch.setattr(runner.Method, "run", broken)
    document = suite.run(SETTINGS, ITEMS[:2], load, suite.begin(SETTINGS, ITEMS[:2]))
    found = [(answer["method"], answer["status"]) for answer in document["answers"]]
    ngram = SETTINGS.methods[0]
    assert found == [("plain", "valid"), (ngram, "failed"), ("plain", "valid"), (ngram, "valid")]
    told = suite.failures(document)
    assert "failed, gave up" in told[0] and "without the form, two: no free text" in told[1]


def test_overheads_are_of_pairs() -> None:
    about = dict.fromkeys(("model", "dtype", "temperature", "method"), "x") | {"set": "s"}
    answers = [
        about | {"status": "valid", "reason": "", "tpot_s": [3.0, 4.0], "free_tpot_s": [2.0, 2.0]},
        about | {"status": "valid", "reason": "", "tpot_s": [None], "free_tpot_s": [9.0]},
        about | {"status": "long", "reason": "too long"},
    ]
    [cell] = schema_cells(answers)
    assert cell["overhead"] == {"median": 0.75, "low": 0.5, "high": 1.0}
    assert cell["overhead_s"]["median"] == 1.5 and cell["step_overhead"] is None
    assert cell["coverage"] == 2 / 3 and cell["compliance"] == 1


def test_reasons_of_one_kind_count_together() -> None:
    assert reason_kind("json_schema at #/a/b: oneOf is not supported; write anyOf") == (
        "oneOf is not supported"
    )
    assert reason_kind("no end within 300 tokens") == "no end within N tokens"
    assert reason_kind("format: 'a; b' is not a 'date'") == "format"


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.llama(), tmp_path / "model")
    rows = [{"split": item.set, "name": item.name, "schema": item.schema} for item in ITEMS[:4]]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    words = ["bench", "--suite", "jsonschema", "--model", f"{tmp_path}/model", "--methods", "plain"]
    words += ["--rounds", "1", "--max-new-tokens", "14", "--threads", "1"]
    given = ["--schemas", f"{tmp_path}/s.jsonl", "--json", f"{tmp_path}/o.json"]
    capsys.readouterr()
    assert cli.run([*words, *given]) == 1
    out, err = capsys.readouterr()
    assert "model, auto, greedy" in out and "compliance" in out and "66.7 %" in out
    assert "pattern is not supported" in out and err.startswith("failed: plain on")
    assert err.count("\n") == 1
    assert json.loads((tmp_path / "o.json").read_text("utf-8"))["schema"] == suite.SCHEMA
    for more, said in (
        (["--prompts", "chat"], "--prompts: --suite jsonschema"),
        (["--peers", "transformers"], "--peers: --suite"),
        (["--contexts", "16"], "--contexts: --suite"),
    ):
        assert cli.run([*words, *given[:2], *more]) == 2
        assert said in capsys.readouterr().err
    assert cli.run(["bench", "--limit", "3"]) == 2
    assert "add --suite jsonschema" in capsys.readouterr().err
    assert cli.run(["bench", "--suite", "nothing"]) == 2
    assert "one of jsonschema" in capsys.readouterr().err


def test_suites_are_found_by_their_folders() -> None:
    assert "jsonschema" in suites.suite_names() and suites.load_suite("jsonschema") is suite

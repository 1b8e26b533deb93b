"""Runs on a tiny model: documents, continuing, and what each unit says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.document import write_document
from foretell.errors import BadConfig, BadFile
from foretell.longbench import failure_lines, runner
from foretell.longbench.settings import Settings
from tests.longbench.models import CONTEXT, lm

SETTINGS = Settings(
    kv=("snapkv", "streaming-llm:every=8"),
    budgets=("20%",),
    tasks=("keys", "perplexity"),
    modes=("single", "requests", "turns"),
    lengths=(600,),
    limit=1,
)


def answers(document: dict[str, Any], *names: str) -> list[Any]:
    """Without what was timed."""
    return [[one[name] for name in names] for one in document["answers"]]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return runner.run_units(lm(), SETTINGS, runner.begin_document(SETTINGS))


def test_every_contender_is_measured_on_every_context(document: dict[str, Any]) -> None:
    kvs = ["none", "snapkv", "streaming-llm:every=8"]
    modes = [*(("keys", mode) for mode in SETTINGS.modes), ("perplexity", "text")]
    want = [[*mode, kv] for mode in modes for kv in kvs]
    assert answers(document, "task", "mode", "kv") == want
    for one in document["answers"]:
        if one["task"] == "keys":
            lists = ("scores", "texts", "wanted", "first_s", "token_s", "held")
            assert {len(one[name]) for name in lists} == {5}
        else:
            assert len(one["bits"]) == 4 and one["tokens"] == 600
    assert len(document["cells"]) == len(want)
    json.dumps(document, allow_nan=False)


def test_the_whole_cache_answers_the_same_in_one_reading_and_in_many(
    document: dict[str, Any],
) -> None:
    texts = {(one["mode"], one["kv"]): one["texts"] for one in document["answers"][:9]}
    assert texts["single", "none"] == texts["requests", "none"]
    assert texts["single", "snapkv"] != texts["requests", "snapkv"]
    assert texts["single", "snapkv"][0] == texts["turns", "snapkv"][0]


def test_an_interrupted_run_goes_on_where_it_was(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    half = {**document, "answers": document["answers"][:6]}
    half["answers"] = [*half["answers"][:5], {**half["answers"][5], "error": "it broke"}]
    write_document(half, path)
    made = []
    usual = runner.measure_unit
    monkeypatch.setattr(
        runner, "measure_unit", lambda lm, s, unit: made.append(unit.key) or usual(lm, s, unit)
    )
    told: list[tuple[int, int]] = []
    saved: list[int] = []
    done = runner.run_units(
        lm(),
        SETTINGS,
        runner.begin_document(SETTINGS, path),
        lambda what, number, total: told.append((number, total)),
        lambda one: saved.append(len(one["answers"])),
    )
    assert len(made) == 7 and saved[-1] == 12 and told[-1] == (12, 12)
    for name in ("scores", "texts", "bits", "held"):
        want = [one.get(name) for one in document["answers"]]
        assert [one.get(name) for one in done["answers"]] == want
    with pytest.raises(BadFile, match=r"another settings.seed \(0 there, 1 here\)"):
        runner.begin_document(replace(SETTINGS, seed=1), path)


def test_a_unit_that_fails_is_named_and_the_others_go_on() -> None:
    settings = replace(SETTINGS, kv=(), budgets=(), tasks=("keys",), limit=2, modes=("turns",))
    document = runner.begin_document(settings)
    usual = runner.make_item

    def short(task: str, seed: int, number: int, length: int, counted: Any) -> Any:
        made = usual(task, seed, number, length, counted)
        return replace(made, context=made.context * 4) if number else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "make_item", short)
        runner.run_units(lm(), settings, document)
    (line,) = failure_lines(document)
    assert line.startswith("keys, turns, 600 tokens, context 1, none: ")
    assert f"holds {CONTEXT}" in line and len(document["answers"]) == 2


def test_what_does_not_fit_the_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text. " * 30, "utf-8")
    for changed, said in (
        ({"lengths": (CONTEXT,)}, "holds 2048 tokens, and turns take 480 more; take fewer"),
        ({"lengths": (260,)}, "--lengths 260: keys does not fit; take at least"),
        ({"text": str(text)}, "1 pieces of 600 are scored; lower --limit or --lengths"),
        ({"text": str(tmp_path / "none")}, "cannot be read"),
    ):
        settings = replace(SETTINGS, **changed)
        with pytest.raises(BadConfig, match=said) as refused:
            runner.run_units(lm(), settings, runner.begin_document(settings))
        assert "\n" not in str(refused.value)


def test_a_text_is_scored_in_pieces_that_do_not_overlap(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} sheep. " for number in range(400)), "utf-8")
    settings = replace(SETTINGS, tasks=("perplexity",), text=str(text), limit=2)
    first, second = (runner.scored_text(lm(), settings, 600, number) for number in range(2))
    assert [*first, *second] == lm().encode(text.read_text("utf-8"))[:1200]

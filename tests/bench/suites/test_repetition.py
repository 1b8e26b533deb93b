"""The suite `repetition`: its measures against loops, its prompts, and runs on a tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell import cli
from foretell.bench.settings import Settings
from foretell.bench.suites import repetition
from foretell.bench.suites.repetition import (
    Item,
    is_python,
    measure_output,
    prepare,
    repeated_share,
)
from foretell.errors import BadConfig, UnknownMethod
from tests import tiny


def out(tokens: list[int], text: str, reason: str = "length", samples: Any = ()) -> Any:
    return SimpleNamespace(tokens=tokens, text=text, finish_reason=reason, samples=samples)


def looped(things: list[Any]) -> float:
    """The share that stood before, by a loop."""
    return sum(thing in things[:place] for place, thing in enumerate(things)) / len(things)


def test_measures_are_those_of_plain_loops() -> None:
    draw = random.Random(0)
    for _ in range(20):
        tokens = [draw.randrange(3) for _ in range(draw.randint(4, 40))]
        lines = [draw.choice(["a", "b", " a", "", "c"]) for _ in range(9)] + ["c"]
        found = measure_output(out(tokens, "\n".join(lines)), None)
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        assert found["repeated"] == pytest.approx(looped(grams))
        assert found["lines"] == pytest.approx(looped([line for line in lines if line]))
        assert found["distinct"] == pytest.approx(len(set(tokens)) / len(tokens))
        assert found["ended"] == 0 and "parses" not in found and "among" not in found
    assert repeated_share([]) == 0 and measure_output(out([1], ""), None)["repeated"] == 0


def test_several_texts_are_compared_with_each_other() -> None:
    same = [out([1, 2, 3, 4, 5], "")] * 2
    assert measure_output(out([1, 2, 3, 4, 5], "", samples=same), None)["among"] == 0.5
    other = [same[0], out([5, 4, 3, 2, 1], "")]
    assert measure_output(out([1, 2, 3, 4, 5], "", samples=other), None)["among"] == 1


def test_programs_parse_or_do_not() -> None:
    for text, want in (
        ("def f():\n    return 1\n", True),
        ("def f():\n    retur", True),  # a name
        ("def f(:\n", False),
        ("x = '\0'", False),
        ("'\\d' is 1", True),  # with warnings
        ("(" * 5000, False),
        ("-" * 100_000 + "1", False),
        ("for x in y\n    pass", False),
    ):
        assert is_python(text) == want, text[:20]
    head = "def f(x):\n"
    ended, cut = (measure_output(out([1], "    return x", why), head) for why in ("stop", "length"))
    assert ended["whole"] == 1 and cut["parses"] == 1 and cut["whole"] == 0
    assert measure_output(out([1], "return x", "stop"), head)["whole"] == 0


def test_prompts_are_those_of_files_or_those_that_ship(tmp_path: Path) -> None:
    shipped = prepare([], Settings())
    assert {item.set for item in shipped} == {"openings", "programs"}
    assert sum(repetition.is_code(item) for item in shipped if item.set == "programs") >= 15
    assert not any(repetition.is_code(item) for item in shipped if item.set == "openings")
    three = prepare([], Settings(), 3)
    assert len(three) == 6 and set(three) < set(shipped)
    assert three != prepare([], Settings(seed=1), 3)
    rows = [{"text": "a whole text"}, {"prompt": "a prompt", "text": "beside it"}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)), "utf-8")
    assert prepare([path], Settings()) == [
        Item("mine", "a whole text", True),
        Item("mine", "a prompt", False),
    ]
    with pytest.raises(BadConfig, match="already a set 'mine'"):
        prepare([path, path], Settings())
    with pytest.raises(BadConfig, match="cannot be read"):
        prepare(["nowhere.jsonl"], Settings())


def test_contenders_are_methods_times_warpers() -> None:
    usual = repetition.combine_processors(Settings())
    assert list(usual) == ["plain", *(f"plain {processor}" for processor in repetition.PROCESSORS)]
    settings = Settings(
        methods=("beam:width=3",), processors=("momentum+rpg", "presence_penalty:-1.5")
    )
    found = repetition.combine_processors(settings)
    assert list(found)[:2] == ["plain", "beam:width=3"] and len(found) == 6
    method, options = found["beam:width=3 momentum+rpg"]
    assert method == "beam:width=3" and len(options["processor"]) == 2
    assert found["plain presence_penalty:-1.5"] == ("plain", {"presence_penalty": -1.5})
    assert repetition.combine_processors(Settings(methods=("suffix",))) == {
        "plain": ("plain", {}),
        "suffix": ("suffix", {}),
    }
    for processor in ("nothing", "momentum:alpha=-1", "no_repeat_ngram_size:2.5"):
        with pytest.raises((BadConfig, UnknownMethod)):
            repetition.begin(Settings(processors=(processor,)), [])


def test_it_runs_on_a_model_and_tables_show_pairs() -> None:
    settings = Settings(
        models=("tiny",),
        methods=("beam:width=2",),
        processors=("no_repeat_ngram_size:1",),
        max_new_tokens=12,
    )
    items = [Item("texts", "The quick brown fox jumps over the lazy dog. " * 5, True)]
    items += [Item("code", "def add(a, b):\n"), Item("code", "import os\n"), Item("code", "x")]
    document = repetition.begin(settings, items)
    repetition.run(settings, items, lambda *_: tiny.lm(draft=False), document)
    assert not repetition.failures(document)
    for answer in document["answers"]:
        assert list(answer["texts"]) == list(repetition.combine_processors(settings))
        for name, one in answer["texts"].items():
            assert ("parses" in one) == (answer["set"] == "code")
            assert ("among" in one) == name.startswith("beam")
            if name.endswith(":1"):
                assert one["distinct"] == 1
    (cell,) = document["cells"]
    ways = cell["sets"]["code"]["ways"]
    own = [one["texts"] for one in document["answers"] if one["set"] == "code"]
    gaps = [
        one["plain no_repeat_ngram_size:1"]["distinct"] - one["plain"]["distinct"] for one in own
    ]
    more = ways["plain no_repeat_ngram_size:1"]["distinct"]["more"]
    assert more["mean"] == pytest.approx(sum(gaps) / 3) and more["low"] <= more["mean"]
    assert "more" not in ways["plain"]["distinct"]
    shown = repetition.tables(document)
    assert [title.partition(",")[0] for title, _ in shown] == ["texts", "texts", "code", "code"]
    assert all(len(row) == len(rows[0]) for _, rows in shown for row in rows)
    lm = tiny.lm(draft=False)
    assert len(repetition.encode_prompt(lm, items[0])) == repetition.PREFIX


def test_a_prompt_that_fails_is_left_out_and_named() -> None:
    settings = Settings(models=("tiny",), methods=("plain",), max_new_tokens=4)
    items = [Item("a", "a dog"), Item("a", "x" * 400)]
    document = repetition.begin(settings, items)
    repetition.run(settings, items, lambda *_: tiny.lm(draft=False), document)
    (line,) = repetition.failures(document)
    assert "task 1" in line and document["cells"][0]["sets"]["a"]["prompts"] == 1


def test_the_command_takes_warpers_and_refuses_what_has_no_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tiny.llama(), tmp_path / "model")
    words = ["bench", "--model", f"{tmp_path}/model", "--threads", "1", "--max-new-tokens", "6"]
    suite = [*words, "--suite", "repetition", "--methods", "plain"]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "the dog"}\n', "utf-8")
    capsys.readouterr()
    assert cli.run([*suite, "--processor", "momentum:k=3,alpha=0.5", "--prompts", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "plain momentum:k=3,alpha=0.5" in printed and "1 prompts" in printed
    for given, said in (
        ([*suite, "--schemas", "a"], "--schemas: --suite repetition has no use"),
        ([*suite, "--reward", "length"], "--reward: --suite repetition has no use"),
        ([*suite, "--peers", "transformers"], "--peers: --suite repetition has no use"),
        ([*words, "--processor", "momentum"], "add --suite repetition"),
        (
            [*words, "--suite", "search", "--processor", "rpg"],
            "--processor: --suite search has no use",
        ),
    ):
        assert cli.run(given) == 2
        assert said in capsys.readouterr().err

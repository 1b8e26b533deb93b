"""`foretell generate`: what is printed where."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import foretell
from foretell import cards, registry
from foretell.cli import generate
from foretell.errors import BadConfig
from foretell.guidance.cfg import Cfg
from tests import tiny
from tests.constraints import lsp_server
from tests.constraints.lsp_server import drawn

CODE = "def add(a, b):"
# By torch, since preparing a backend for a model would take most of the time of a test.
TORCH = ["--backend", "torch"]
FEW = ["--max-new-tokens", "12"]
SHORT = [*FEW, *TORCH]
FIVE = ["--max-new-tokens", "5", *TORCH]


def test_the_text_is_on_stdout_and_the_numbers_on_stderr(run: Any, folder: str, small: str) -> None:
    for method in ("plain", "ngram", "draft:length=3"):
        code, out, err = run(
            "generate", "--model", folder, "--draft", small, "--method", method, *FEW, CODE
        )
        assert code == 0 and out == tiny.lm().generate(CODE, "plain", max_new_tokens=12).text + "\n"
        assert (
            err.startswith(f"{method}: 12 tokens, ") and err.count("\n") == 1 and "\x1b" not in out
        )


def test_json_is_one_document(run: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(CODE))
    options = [
        "--temperature",
        "1",
        "--logprobs",
        "2",
        "--seed",
        "3",
        "--n",
        "2",
        "--logit-bias",
        "7=1.5",
    ]
    code, out, err = run(
        "generate", "--model", folder, "--method", "ngram", *options, *SHORT, "--json", "-"
    )
    document = json.loads(out)
    expected = tiny.lm().generate(
        CODE,
        "ngram",
        max_new_tokens=12,
        temperature=1.0,
        logprobs=2,
        seed=3,
        n=2,
        logit_bias={7: 1.5},
    )
    assert (
        code == 0
        and err == ""
        and document["schema"] == "foretell.generate/1"
        and document["prompt"] == CODE
    )
    assert document["text"] == expected.text and document["tokens"] == expected.tokens
    assert [s["text"] for s in document["samples"]] == [s.text for s in expected.samples]
    assert document["stats"]["MAT"] >= 1 and len(document["logprobs"]) == len(expected.tokens)
    assert document["dtype"] == "float32"


def test_samples_are_told_apart(run: Any, folder: str) -> None:
    code, out, err = run(
        "generate", "--model", folder, *SHORT, "--temperature", "1", "--n", "2", CODE
    )
    samples = tiny.lm().generate(CODE, "plain", max_new_tokens=12, temperature=1.0, n=2).samples
    assert (
        code == 0
        and out == "".join(s.text + "\n" for s in samples)
        and "sample 2 of 2, seed 1" in err
    )


def test_comparing_measures_both(run: Any, folder: str, small: str) -> None:
    args = [
        "generate",
        "--model",
        folder,
        "--draft",
        small,
        "--method",
        "draft",
        *SHORT,
        "--compare",
        CODE,
    ]
    code, out, _ = run(*args)
    assert code == 0 and out.startswith(tiny.lm().generate(CODE, "plain", max_new_tokens=12).text)
    assert all(word in out for word in ("tokens/s", "speed-up", "MAT", "identical", "yes"))
    _, out, _ = run(*args, "--json")
    compare = json.loads(out)["compare"]
    assert compare["identical"] is True and compare["first_difference"] is None
    assert compare["speed_up"]["min"] <= compare["speed_up"]["median"] <= compare["speed_up"]["max"]
    assert (
        len(compare["plain"]["tokens_per_s"])
        == len(compare["method"]["tokens_per_s"])
        == compare["rounds"]
        == 3
    )
    assert compare["plain"]["stats"]["MAT"] == 1.0


def test_drafted_tokens_are_coloured_on_a_terminal_only(
    run: Any, folder: str, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        generate,
        "Console",
        lambda **options: Console(force_terminal=True, color_system="standard", **options),
    )
    code, out, _ = run(
        "generate", "--model", folder, "--draft", small, "--method", "draft:nodes=4", *SHORT, CODE
    )
    draft = tiny.lm().generate(CODE, "draft:nodes=4", max_new_tokens=12).draft
    assert code == 0 and "draft" in draft and out.startswith("\x1b[2m" + CODE)
    assert 1 <= out.count("\x1b[32m") <= draft.count("draft")


def test_a_question_goes_through_the_chat_template(run: Any, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    options = ["--model", str(folder), "--method", "ngram", *SHORT, "--chat"]
    answer = tiny.lm().generate("user: def\n", "plain", max_new_tokens=12).text
    assert run("generate", *options, "def")[:2] == (0, answer + "\n")
    document = json.loads(run("generate", *options, "--json", "def")[1])
    assert (document["prompt"], document["chat"], document["text"]) == ("def", True, answer)
    compared = json.loads(run("generate", *options, "--json", "--compare", "def")[1])
    assert compared["text"] == answer and compared["compare"]["identical"]


def test_a_model_without_a_chat_template_says_so(run: Any, folder: str) -> None:
    code, out, err = run("generate", "--model", folder, *SHORT, "--chat", "x")
    assert code == 2 and out.strip() == "" and "chat template" in err


@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_chat_model_takes_a_prompt_as_a_turn(run: Any, tmp_path: Path, command: str) -> None:
    """After a bare text its first token is often its end, and the answer empty."""
    folder = tiny.save(tiny.llama(), tmp_path)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    options = [command, "--model", str(folder), "--method", "plain", *FIVE]
    code, turn, err = run(*options, "def")
    assert code == 0 and "the prompt is a turn" in err and "--raw continues it" in err
    code, asked, err = run(*options, "--chat", "def")
    assert code == 0 and untimed(asked) == untimed(turn) and "turn" not in err
    code, raw, err = run(*options, "--raw", "def")
    assert (
        code == 0 and untimed(raw) != untimed(turn) and "turn" not in err and "warning" not in err
    )
    told = (
        json.loads(run(*options, "--json", "def")[1]),
        json.loads(run(*options, "--raw", "--json", "def")[1]),
    )
    assert [document["chat"] for document in told] == [True, False]
    for spoken, text in (("user: def\n", turn), ("def", raw)):
        if command == "generate":
            assert tiny.lm().generate(spoken, "plain", max_new_tokens=5).text + "\n" == text


def untimed(shown: str) -> str:
    """What was shown, without the milliseconds of steps."""
    return re.sub(r"[\d.]+ ms", "", shown)


def test_a_long_prompt_is_not_shown_again_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(force_terminal=True, color_system=None, **options)

    monkeypatch.setattr(generate, "Console", terminal)
    for prompt in ("a" * 5000 + "the end", [{"role": "user", "content": "a" * 5000 + "the end"}]):
        generate._print_stream(prompt, iter(()))
        out = capsys.readouterr().out
        assert out.startswith("… aaa") and "the end" in out and len(out) < 500


def test_the_question_stands_before_the_answer_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(force_terminal=True, color_system=None, **options)

    monkeypatch.setattr(generate, "Console", terminal)
    pieces = tiny.lm().stream("user: def\n", "plain", max_new_tokens=12)
    generate._print_stream([{"role": "user", "content": "def"}], pieces)
    answer = tiny.lm().generate("user: def\n", "plain", max_new_tokens=12).text
    assert answer[:5].isprintable(), "rich leaves control characters out"
    assert capsys.readouterr().out.startswith(f"def\n\n{answer[:5]}")


def test_rows_and_warpers_have_a_flag_each(run: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("The dog", "utf-8")
    rows = f"cfg:g=2,negative=@{tmp_path / 'other.txt'}"
    negative = tuple(tiny.tokenizer()("The dog")["input_ids"])
    source = Cfg(2.0, negative)
    wanted = tiny.lm().generate(CODE, guidance=source, processor="momentum", max_new_tokens=12).text
    flags = ["--guidance", rows, "--processor", "momentum"]
    code, out, _ = run("generate", "--model", folder, "--method", "ngram", *flags, *SHORT, CODE)
    assert code == 0 and out == f"{wanted}\n"
    wrong = {
        "--guidance": "unknown guidance 'cgf'; did you mean cfg",
        "--processor": "unknown processor 'cgf'",
    }
    for flag, message in wrong.items():
        code, out, err = run("generate", "--model", "nowhere", flag, "cgf", CODE)
        assert code == 2 and not out and message in err and err.count("\n") == 1
    code, _, err = run("generate", "--model", folder, "--guidance", "cfg:model=draft", *SHORT, CODE)
    assert code == 2 and "it needs a 'draft' model; load one" in err


def test_methods_ask_other_models_by_the_names_they_are_given(
    run: Any, folder: str, small: str
) -> None:
    asked = ["generate", "--model", folder, "--guidance", "cfg:g=2,model=other", *SHORT, CODE]
    with_other = foretell.load(folder, models={"other": small})
    wanted = with_other.generate(CODE, guidance="cfg:g=2,model=other", max_new_tokens=12).text
    code, out, _ = run(*asked, "--models", f"other={small}")
    assert code == 0 and out == f"{wanted}\n"
    code, out, err = run(*asked)
    assert code == 2 and not out and "load one: load(..., models=" in err
    assert err.endswith("or --models other=... of a command\n") and err.count("\n") == 1
    for given, message in {
        "other": "write NAME=MODEL, as in judge=FOLDER",
        "=demo": "write NAME=MODEL",
        "target=demo": "the name 'target' must be",
        "a b=demo": "the name 'a b' must be",
        "other=./gone": "no such folder",
    }.items():
        code, out, err = run(*asked, "--models", given)
        assert code == 2 and not out and message in err.splitlines()[-1]
    code, _, err = run(*asked, "--models", "other=demo", "--models", "other=demo")
    assert code == 2 and "'other' is named twice" in err


def test_names_behind_dots_are_a_language_servers(run: Any, folder: str, tmp_path: Path) -> None:
    server = f"{sys.executable} -I {lsp_server.__file__}"
    spec = f"monitor:root={tmp_path},server={server}"
    prompt = next(f"x{i}." for i in range(9) if drawn(f"x{i}."))
    options = ["generate", "--model", folder, "--method", "suffix", *SHORT, prompt]
    code, out, _ = run(*options, "--constraint", spec)
    wanted = tiny.lm().generate(prompt, "plain", constraint=spec, max_new_tokens=12).text
    assert not code and out == f"{wanted}\n" and wanted.startswith(tuple(drawn(prompt)))
    code, out, err = run("generate", "--model", "nowhere", "--constraint", "monitr", CODE)
    assert code == 2 and "unknown constraint 'monitr'; did you mean monitor" in err
    code, _, err = run(*options, "--constraint", f"monitor:root={tmp_path / 'no'},server={server}")
    assert code == 2 and "must be a folder that exists" in err and err.count("\n") == 1


def test_an_answer_has_the_form_that_is_asked_for(run: Any, folder: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.lark"
    rules.write_text('start: "a" /[0-9]{2}/')
    options = ["generate", "--model", folder, "--method", "ngram", CODE]
    code, out, _ = run(*options, "--json-schema", '{"enum": [[1, "x"]]}')
    assert not code and json.loads(out) == [1, "x"]
    assert run(*options, "--regex", "(yes){2}")[1] == "yesyes\n"
    out = run(*options, "--grammar", str(rules))[1]
    assert out[0] == "a" and out[1:3].isdigit() and len(out) == 4
    code, out, err = run(*options, "--json-schema", '{"not": {"pattern": "a"}}')
    assert code == 2 and not out
    assert "json_schema at #/not/pattern: pattern is not supported within a negation" in err


def test_contexts_are_read_apart(run: Any, folder: str, tmp_path: Path) -> None:
    files = []
    for number, text in enumerate(("The lazy dog.", "def sub(a, b):\n")):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(text)
    named = [part for file in files for part in ("--context", str(file))]
    options = ["generate", "--model", folder, *SHORT, "--method", "plain", CODE]
    code, out, _ = run(*options, *named, "--prefix", "Read.")
    prompt = foretell.Contexts([file.read_text() for file in files], CODE, "Read.")
    want = tiny.lm().generate(prompt, "plain", max_new_tokens=12)
    assert code == 0 and out == want.text + "\n"
    assert out != run(*options, *named, "--prefix", "Read.", "--kv", "ape:temperature=0.2")[1]
    code, expanded, _ = run(*options, *named, "--expand", "2")
    texts = [file.read_text() for file in files]
    lm = tiny.lm()
    ids = [token for text in (texts[1], CODE) for token in lm.encode(text, special=False)]
    by_hand = lm.generate(foretell.Contexts(texts, ids), "plain", max_new_tokens=12)
    assert code == 0 and expanded == by_hand.text + "\n"
    for wrong, message in (
        (["--prefix", "Read."], "--prefix: it stands before contexts"),
        (["--expand", "1"], "--expand: it names contexts"),
        ([*named, "--expand", "3"], "expand=3: must be a context's number, from 1 to 2"),
        (["--context", str(tmp_path / "none")], "--context"),
        ([*named, "--kv", "tova"], "kv=tova: contexts"),
        (["--kv", "ape"], "kv=ape: it reads contexts"),
    ):
        code, _, err = run(*options, *wrong)
        assert code == 2 and message in err and err.count("\n") == 1


@cache
def pages() -> Any:
    """The script that writes the methods' pages."""
    path = Path(__file__).parents[2] / "scripts" / "method_pages.py"
    spec = importlib.util.spec_from_file_location("method_pages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, "method_pages", module)
        spec.loader.exec_module(module)
    return module


def command_of(kind: str, name: str) -> list[str]:
    """What the page of a method says to try."""
    return shlex.split(pages().command(cards.card(name, kind)).replace("$'", "'"))


@pytest.mark.parametrize(("kind", "name"), sorted(registry.method_files()))
def test_the_command_of_every_page_is_one(
    kind: str, name: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any) -> None:
        raise BadConfig("all that is checked before a model is loaded")

    monkeypatch.setattr(generate, "load_model", loaded)
    program, *args = command_of(kind, name)
    here = Path(__file__)
    code, _, err = run(*(str(here) if arg == "FILE" else arg for arg in args))
    assert program == "foretell" and code == 2, err
    assert err.splitlines()[-1].endswith("all that is checked before a model is loaded")
    # A method that draws is not tried where nothing is drawn, and says so.
    method = args[args.index("--method") + 1].partition(":")[0] if "--method" in args else "auto"
    strategy = method in registry.method_names("strategy")
    draws = cards.card(method, "strategy").temperature if strategy else 0.0
    assert ("chooses among what is drawn" in err) == bool(draws)


@pytest.mark.parametrize(
    "name", [n for n in registry.method_names("strategy") if cards.card(n, "strategy").temperature]
)
def test_a_method_that_draws_has_a_temperature(name: str, run: Any, folder: str) -> None:
    args = command_of("strategy", name)[1:]
    args = [arg for arg in args if arg != "--compare"]
    args += ["--model", folder, "--max-new-tokens", "8", *TORCH]
    code, out, err = run(*args)
    assert code == 0 and out and f"temperature {cards.card(name).temperature:g}, as none" in err
    code, _, err = run(*args, "--temperature", "0")
    assert code == 2 and err.count("\n") == 1
    assert f"temperature=0: {name} chooses among what is drawn, and at 0 all draws" in err
    code, _, err = run(*args, "--temperature", "0.5")
    assert code == 0 and "none is given" not in err


@pytest.mark.parametrize(
    ("spec", "texts"), [("best-of:n=3", 3), ("beam:width=2", 2), ("superposed:k=3", 3)]
)
def test_all_texts_that_a_method_found_are_shown(
    spec: str, texts: int, run: Any, folder: str
) -> None:
    short = ["--max-new-tokens", "6", *TORCH]
    args = ["generate", "def", "--model", folder, "--method", spec, *short]
    found = json.loads(run(*args, "--json")[1])["samples"]
    code, out, err = run(*args)
    assert code == 0 and len(found) == texts
    assert out == "".join(f"{one['text']}\n" for one in found)
    for number in range(2, texts + 1):
        assert f"--- text {number} of {texts}, score {found[number - 1]['score']:.4g}" in err


def test_several_answers_at_temperature_0_are_told_to_be_one(run: Any, folder: str) -> None:
    args = ["generate", "def", "--model", folder, "--max-new-tokens", "4", "--n", "2"]
    assert "at temperature 0 all answers are alike" in run(*args)[2]
    assert "alike" not in run(*args, "--temperature", "1")[2]

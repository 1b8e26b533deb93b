"""The command line: what is printed where, the exit codes, and one line for every mistake."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import foretell
from foretell import cli, registry
from foretell.errors import BadConfig
from foretell.measure.prompts import read_prompts
from foretell.ops import datastore
from tests import tiny

CODE = "def add(a, b):"
SHORT = ["--max-new-tokens", "12"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.llama(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.relative(tiny.llama()), tmp_path_factory.mktemp("draft")))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        code = cli.run(args)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_text_is_on_stdout_and_the_numbers_on_stderr(run: Any, folder: str, small: str) -> None:
    for method in ("plain", "ngram", "draft:length=3"):
        code, out, err = run(
            "generate", "--model", folder, "--draft", small, "--method", method, *SHORT, CODE
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
        cli,
        "Console",
        lambda **options: Console(force_terminal=True, color_system="standard", **options),
    )
    code, out, _ = run(
        "generate", "--model", folder, "--draft", small, "--method", "draft", *SHORT, CODE
    )
    draft = tiny.lm().generate(CODE, "draft", max_new_tokens=12).draft
    assert code == 0 and "draft" in draft and out.startswith("\x1b[2m" + CODE)
    assert 1 <= out.count("\x1b[32m") <= draft.count("draft")


def test_methods_are_listed(run: Any) -> None:
    code, out, _ = run("methods", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "foretell.methods/1"
    cards = {card["name"]: card for card in document["methods"]}
    assert set(cards) == {card.name for card in foretell.methods()}
    assert cards["ngram"]["defaults"]["k"] == 10 and Path(cards["ngram"]["file"]).is_file()
    code, out, _ = run("methods")
    assert code == 0 and all(name in out for name in cards)
    code, out, _ = run("methods", "ngram")
    assert code == 0 and "guarantee: exact" in out and "n=3, k=10" in out
    assert json.loads(run("methods", "ngram", "--json")[1])["methods"] == [cards["ngram"]]


def test_listing_methods_does_not_import_torch() -> None:
    code = (
        "import sys; from foretell.cli import run; run(['methods']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foretell", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"foretell {foretell.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "x", "--model", "./nowhere"], "no such folder"),
        (["generate", "x", "--method", "ngrm"], "did you mean ngram"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (
            ["generate", "x", "--min-new-tokens", "9", "--max-new-tokens", "8"],
            "above max_new_tokens",
        ),
        (["generate", "x", "--logit-bias", "7"], "ID=BIAS"),
        (["generate", "x", "--compare", "--n", "2"], "--n"),
        (["generate", "x", "--dtype", "int3", "--model", "{folder}"], "dtype='int3'"),
        (["generate", "x", "--device", "toaster", "--model", "{folder}"], "toaster"),
        (["generate", "x", "--method", "draft", "--model", "{folder}"], "draft"),
        (["generate", "x", "--logit-bias", "7=inf", "--model", "{folder}"], "logit_bias"),
        (["generate", "x" * 5000, "--model", "{folder}"], "shorten"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--nonsense"], "--nonsense"),
        (["audit"], "--method"),
        (["audit", "--method", ","], "--method is empty"),
        (["audit", "--method", "nothing"], "unknown method"),
        (["audit", "--method", "ngram", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["methods", "nothing"], "unknown method"),
        (
            ["train", "lm", "--out", "o", "--corpus", "c", "--text", "t", "--heads", "5"],
            "hidden=384",
        ),
        (
            ["train", "lm", "--out", "{tmp}/o", "--corpus", "{tmp}/c", "--text", "./none"],
            "--text ./none",
        ),
        (
            ["train", "lm", "--out", "o", "--corpus", "c", "--text", "t", "--teacher", "./none"],
            "--teacher ./none",
        ),
        (
            [
                "train",
                "lm",
                "--out",
                "{folder}/config.json/o",
                "--corpus",
                "{folder}/config.json",
                "--text",
                "t",
            ],
            "config.json",
        ),
        (["datastore", "stdlib", "--out", "{tmp}/x"], "--tokenizer"),
        (["datastore", "stdlib", "--tokenizer", "./none", "--out", "{tmp}/x"], "./none"),
        (
            ["datastore", "./none", "--tokenizer", "{folder}", "--out", "{tmp}/x"],
            "error: ./none: no such file",
        ),
        (
            [
                "datastore",
                "{folder}/model.safetensors",
                "--tokenizer",
                "{folder}",
                "--out",
                "{tmp}",
            ],
            "is a folder",
        ),
        (["datastore", "{tmp}", "--tokenizer", "{folder}", "--out", "{tmp}/x"], "no tokens"),
        (
            ["datastore", "t", "--tokenizer", "{folder}", "--out", "{folder}/config.json/x"],
            "config.json",
        ),
        (["generate", "x", "--model", "{folder}", "--method", "rest"], "foretell datastore"),
        (
            [
                "generate",
                "x",
                "--model",
                "{folder}",
                "--json",
                "--method",
                "rest:path={folder}/config.json",
            ],
            "json: dam",
        ),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    run: Any, folder: str, tmp_path: Path, args: list[str], said: str
) -> None:
    code, out, err = run(*[a.format(folder=folder, tmp=tmp_path) for a in args])
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_options_that_leave_no_token_are_a_mistake(run: Any, folder: str) -> None:
    banned = [x for t in range(len(tiny.tokenizer())) for x in ("--logit-bias", f"{t}=-inf")]
    code, _, err = run("generate", "x", "--model", folder, "--temperature", "1", *banned)
    assert code == 2 and "no token possible" in err and err.count("\n") == 1


def test_a_request_that_fails_is_exit_1(
    run: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ArithmeticError("overflow")

    monkeypatch.setattr(registry.load("ngram", "drafter"), "propose", broken)
    for more in ([], ["--json"]):
        code, _, err = run("generate", "x", "--model", folder, "--method", "ngram", *more)
        assert (code, err) == (1, "error: ngram: ArithmeticError: overflow\n")


def test_ctrl_c_is_130(run: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretell.core.engine.Engine.step", interrupted)
    for more in ([], ["--json"], ["--compare"]):
        assert run("generate", "x", "--model", folder, *SHORT, *more)[0] == 130


def test_a_model_without_tokenizer_is_a_warning_and_an_error(
    run: Any, folder: str, tmp_path: Path
) -> None:
    tiny.llama().save_pretrained(tmp_path)
    code, out, err = run("generate", "x", "--model", str(tmp_path))
    assert (
        code == 2
        and out == ""
        and err.splitlines()[0].startswith("warning: ")
        and "tokenizer" in err.splitlines()[-1]
    )


def test_training_is_a_command(run: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 400)
    (tmp_path / "held.jsonl").write_text(
        "".join(
            json.dumps({"path": f"f{i}", "text": f"The dog {i} sat on the mat. " * 30}) + "\n"
            for i in range(300)
        )
    )
    size = {
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate": 16,
        "vocab_size": 300,
        "context": 64,
        "short_context": 32,
        "batch": 128,
        "micro": 128,
        "tokens": 256,
        "warmup": 1,
    }
    options = [
        x for name, value in size.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = [
        "train",
        "lm",
        "--out",
        str(tmp_path / "run"),
        "--corpus",
        str(tmp_path / "corpus"),
        "--no-compiled",
    ]
    args += ["--text", str(tmp_path / "text.txt"), "--text", str(tmp_path / "held.jsonl"), *options]
    code, out, _ = run(*args)
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    code, out, _ = run(
        "generate",
        "The",
        "--model",
        str(tmp_path / "run" / "model"),
        "--max-new-tokens",
        "3",
        "--json",
    )
    assert code == 0 and len(json.loads(out)["tokens"]) <= 3
    assert run(*args, "--seed", "1")[0] == 2, "a run with other settings must not be continued"


def test_a_datastore_is_a_command(
    run: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = tmp_path / "texts", tmp_path / "new" / "x.safetensors"
    texts.mkdir()
    (texts / "a.md").write_text(tiny.TEXTS[0])
    (texts / "b.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (*tiny.TEXTS[1:], "", "half \ud83d")) * 50
    )
    args = ["--tokenizer", folder, "--out", str(out)]
    code, said, err = run("datastore", str(texts), str(texts / "a.md"), *args)
    store = datastore.load(out)
    ids = [
        tiny.tokenizer()(t, add_special_tokens=False)["input_ids"] for t in (*tiny.TEXTS, "half ?")
    ]
    tokens = [*ids[0], *(ids[1] + ids[2] + ids[3]) * 50, *ids[0]]
    assert code == 0 and err == "" and store.documents == 152 and said.count("\n") == 1
    assert (
        said.startswith(f"{out}: 152 documents, {len(store.tokens):,} tokens, ")
        and f"rest:path={out}" in said
    )
    assert store.tokens[store.tokens < store.vocab].tolist() == tokens and list(
        out.parent.iterdir()
    ) == [out]
    # What was built is what the model's own tokenizer is compared with.
    method = ["--method", f"rest:path={out},least=1,nodes=8", "--json", "--temperature", "1"]
    code, said, _ = run("generate", "--model", folder, *method, *SHORT, CODE)
    assert code == 0 and json.loads(said)["stats"]["drafted"] > 0
    monkeypatch.setattr(foretell.LM, "decode", lambda self, tokens: "?")
    code, _, err = run("generate", "--model", folder, *method, *SHORT, CODE)
    assert code == 2 and "another tokenizer" in err and err.count("\n") == 1


def test_texts_that_are_not_utf8_are_told(run: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}\n')
    code, _, err = run(
        "datastore", str(tmp_path), "--tokenizer", folder, "--out", str(tmp_path / "x")
    )
    assert (
        code == 2
        and "is not UTF-8" in err
        and err.count("\n") == 1
        and len(list(tmp_path.iterdir())) == 1
    )


def test_every_field_of_the_trainer_is_an_option() -> None:
    import dataclasses

    from foretell.train.lm import TrainLM

    assert dict(cli.TRAIN_FIELDS) == {f.name: f.default for f in dataclasses.fields(TrainLM)}


def test_specs_are_split_at_methods() -> None:
    assert cli.split_specs("ngram,draft:length=2,drafts=3, plain") == [
        "ngram",
        "draft:length=2,drafts=3",
        "plain",
    ]


# --- prompt files


def test_prompt_files_may_have_any_of_the_fields(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "a", "text": "x"},
        {"turns": ["b", "c"]},
        {"messages": messages},
        {"question": "d"},
        {"text": "e"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(path) == ["a", "b", messages, "d", "e"]
    path.write_text(json.dumps({"prompt": "two\u2028lines"}, ensure_ascii=False))
    assert read_prompts(path) == ["two\u2028lines"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: needs one of the fields prompt, turns"),
        ('{"answer": 1}', "'answer'"),
        ('{"prompt": 5}', "`prompt` must be a text"),
        ('{"prompt": ""}', "not empty"),
        ('{"turns": []}', "`turns` must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BadConfig, match="line 2") as raised:
        read_prompts(path)
    assert said in str(raised.value)


def test_an_unreadable_prompt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (
        ("empty", "no prompts"),
        ("binary", "UTF-8"),
        ("none", "No such file"),
        (".", "directory"),
    ):
        with pytest.raises(BadConfig, match=said):
            read_prompts(tmp_path / name)

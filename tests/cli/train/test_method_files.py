"""Commands that train what methods read: the file is made, used and told; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.drafters.model.exit_table import FIELD
from foretell.train import answers, attribute, judge
from foretell.train.answers import Text
from tests import tiny
from tests.train.test_amateur import answers as false_answers


@pytest.fixture
def model(folder: str) -> list[str]:
    return ["--model", folder, "--backend", "torch"]


@pytest.fixture
def pair(model: list[str], small: str) -> list[str]:
    return [*model, "--draft", small]


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "t.txt").write_text(" ".join(tiny.TEXTS) * 30)
    return str(tmp_path / "t.txt")


@pytest.fixture
def draft(tmp_path: Path) -> str:
    model = tiny.relative(tiny.llama())
    setattr(model.config, FIELD, {"layers": [1, 2]})
    return str(tiny.save(model, tmp_path / "draft"))


@pytest.fixture
def denoiser(tmp_path: Path) -> str:
    """A folder whose model fills canvases."""
    folder = tiny.save(tiny.llama(), tmp_path / "denoiser")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["canvas"] = {"mask_id": 321, "shift": 0, "block": 0}
    path.write_text(json.dumps(config))
    return str(folder)


def rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_acceptance_heads_of_answers_and_of_texts(
    run: Any, pair: list[str], text: str, tmp_path: Path
) -> None:
    prompts = [{"prompt": text} for text in "abcdefgh"]
    chat = {"messages": [{"role": "user", "content": "i"}]}  # of which it has no template
    file = rows(tmp_path / "p.jsonl", *prompts, chat)
    quick = ["--length", "30", "--examples", "200", "--epochs", "1"]
    for name, source in (("one", ["--prompts", file]), ("two", ["--text", text])):
        head = tmp_path / f"{name}.safetensors"
        given = ["train", "acceptance-head", *pair, *source, "--out", str(head), *quick]
        code, out, _ = run(*given, "--json")
        report = json.loads(out)
        assert code == 0 and report["file"] == str(head) and head.is_file()
        assert report["examples"] > 100 and 0 <= report["auc"] <= 1
        method = ["--method", f"specdec-pp:head={head},nodes=6", "--max-new-tokens", "20"]
        code, out, _ = run("generate", "def", *pair, *method, "--json")
        assert code == 0 and json.loads(out)["stats"]["drafted"]
    code, out, _ = run(*given)
    assert code == 0 and out.count("\n") == 1 and f"specdec-pp:head={head}" in out


def test_an_amateur(run: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = str(false_answers(tmp_path)), str(tmp_path / "amateur")
    given = ["train", "amateur", "--model", folder, "--answers", path, "--epochs", "1", "--out"]
    code, said, _ = run(*given, out, "--json")
    report = json.loads(said)
    assert code == 0 and report["folder"] == out and report["after"] < report["before"]
    code, said, _ = run(*given, out)
    assert code == 0 and said.count("\n") == 1 and f"--guidance lol:amateur={out}" in said
    options = ["--guidance", f"lol:amateur={out}", "--max-new-tokens", "4"]
    code, said, _ = run("generate", "--model", folder, *options, "Is 3 odd?")
    assert code == 0 and said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foretell.train.amateur.train_amateur", lambda *_: report)
    assert "--guidance lol:amateur=./here" in run(*given, "here")[1]


def test_a_classifier_of_beginnings(
    run: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"prompt": f"def f{i}(a, b):\n    return {i}"} for i in range(20)]
    monkeypatch.setattr(judge, "STRENGTHS", (0.01,))  # one try, for time
    out = tmp_path / "a.safetensors"
    given = ["--model", folder, "--prompts", rows(tmp_path / "p.jsonl", *prompts)]
    given += ["--out", str(out), "--grams", "1"]
    given += ["--answer-tokens", "8", "--beams", "2", "--samples", "2"]
    code, said, err = run("train", "attribute", *given, "--json")
    assert code == 0, err
    report = json.loads(said)
    assert report["prompts"] == 20 and 0 < report["good"] < 1
    with monkeypatch.context() as patched:
        patched.setattr(attribute, "train_attribute", lambda *_: report)
        code, said, _ = run("train", "attribute", *given)
    assert code == 0 and said.count("\n") == 1 and "--method conditional-beam:attribute=" in said
    method = f"conditional-beam:attribute={out},least=0,grams=0,width=2"
    options = ["--model", folder, "--method", method, "--max-new-tokens", "6", "--json"]
    code, said, err = run("generate", "def", *options)
    assert code == 0 and json.loads(said)["tokens"], err


def test_a_table_of_channels(run: Any, model: list[str], text: str, tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    given = ["train", "channels", *model, "--text", text, "--out", str(out)]
    code, said, _ = run(*given, "--json")
    assert code == 0 and json.loads(said)["pieces"] >= 1 and out.is_file()
    code, said, _ = run(*given)
    assert code == 0 and f"double-sparsity:calibration={out}" in said
    kv = f"double-sparsity:budget=4,channels=2,calibration={out}"
    assert run("generate", "def", *model, "--kv", kv, "--max-new-tokens", "8")[0] == 0


def test_thresholds_of_exits(run: Any, model: list[str], draft: str, tmp_path: Path) -> None:
    laws = np.zeros((8, 1), np.int32), np.zeros((8, 1), np.float16)
    (tmp_path / "answers").mkdir()
    written = Text(np.arange(1, 13, dtype=np.int32), 4, *laws)
    answers.save_texts(tmp_path / "answers" / "0.safetensors", [written] * 40)
    given = [*model, "--draft", draft]
    args = ["train", "exits", *given, "--answers", str(tmp_path / "answers")]
    code, out, _ = run(*args)
    assert code == 0 and "thresholds" in out and out.count("\n") == 1
    code, out, _ = run(*args, "--json", "--length", "2")
    found = json.loads(out)
    assert code == 0 and found["length"] == 2 and len(found["shares"]) == 2
    kept = json.loads((Path(draft) / "config.json").read_text())[FIELD]["targets"]
    assert [table["thresholds"] for table in kept] == [found["thresholds"]]
    options = ["--method", "s2d:nodes=4", "--max-new-tokens", "4", "--json"]
    code, out, _ = run("generate", "def", *given, *options)
    assert code == 0 and len(json.loads(out)["tokens"]) <= 4


def test_a_filter(run: Any, denoiser: str, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    prompts = rows(tmp_path / "p.jsonl", *({"prompt": text} for text in ("def", "The", "a b", "x")))
    model = ["--model", denoiser, "--backend", "torch"]
    given = ["train", "filter", *model, "--prompts", prompts, "--out", str(out)]
    given += ["--block", "4", "--length", "12", "--epochs", "20"]
    code, said, _ = run(*given, "--json")
    assert code == 0 and json.loads(said)["examples"] >= 10 and out.is_file()
    code, said, _ = run(*given)
    assert code == 0 and f"learn2pd:filter={out}" in said
    method = f"learn2pd:block=4,filter={out}"
    code, _, _ = run("generate", "def", *model, "--method", method, "--max-new-tokens", "8")
    assert code == 0
    code, _, said = run("generate", "def", *model, "--method", "suffix")
    assert code == 2 and "fills canvases" in said


def test_gates(run: Any, text: str, tmp_path: Path) -> None:
    out = tmp_path / "g.safetensors"
    folder = tiny.save(tiny.llama(max_position_embeddings=512), tmp_path / "model")
    model = ["--model", str(folder), "--backend", "torch"]
    sizes = "--steps 2 --texts 1 --keys 1 --words 2 --shortest 260 --longest 260 --sinks 4"
    given = ["train", "gates", *model, "--text", text, "--out", str(out), *sizes.split()]
    code, said, _ = run(*given, "--recent", "20", "--json")
    assert code == 0 and json.loads(said)["steps"] == 2 and out.is_file()
    code, said, _ = run(*given, "--recent", "20")
    assert code == 0 and f"duo-attention:gates={out}" in said
    for name in ("duo-attention", "lserve"):
        code, _, said = run("generate", "d", *model, "--kv", f"{name}:gates={out}")
        assert code == 0, said
    code, _, said = run(*given, "--recent", "300")
    assert code == 2 and "shortest=260" in said


def test_rounds_of_thoughts(run: Any, folder: str, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.jsonl", tmp_path / "rounds.jsonl"
    rows(texts, {"prompt": "Hi", "answer": "<think>\nOne.\n</think> Two."})
    args = ["train", "infty", "--model", folder, "--texts", str(texts), "--out", str(out)]
    code, said, _ = run(*args)
    assert code == 0 and f"{out}: 1 rounds of 1 texts, 0 left out" in said
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row == {"prompt": "Hi", "history": "", "target": "<think>\nOne.\n</think> Two."}
    assert json.loads(run(*args, "--json")[1])["rows"] == 1
    code, said, err = run(*args, "--tries", "0")
    assert code == 2 and not said and "tries=0" in err.splitlines()[-1]


def test_a_judge(
    run: Any, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model neither ends its answers nor says numbers: its walks are made here."""

    def made_walks(lm: Any, tasks: Any, *rest: Any) -> list[judge.Walk]:
        assert len(tasks) == 23
        walks = []
        for number in range(30):
            text = [3 + (number + i) % 9 for i in range(12)]
            judged = [(place, 3 + place, (place + number) % 3 > 0) for place in (4, 5, 8)]
            walks.append(judge.Walk(text, 2, "x", 12, judged))
        return walks

    tasks = rows(tmp_path / "t.jsonl", *[{"question": "1 + 1?"}] * 3)
    given = ["--tasks", tasks, "--own", "20", "--out", str(tmp_path / "o")]
    with monkeypatch.context() as patched:
        patched.setattr(judge, "collect_walks", made_walks)
        code, out, err = run("train", "judge", *pair, *given, "--json")
        assert code == 0 and "23 tasks" in err and "hours" in err
        report = json.loads(out)
        assert report["labels"] == 90 and report["unimportant"] == pytest.approx(2 / 3, abs=0.1)
        code, out, _ = run("train", "judge", *pair, *given)
        assert code == 0 and out.count("\n") == 1 and "rule=judge,weights=" in out
    for delta in ("0", "1"):
        method = f"draft:nodes=4,rule=judge,delta={delta},weights={report['file']}"
        options = ["--method", method, "--max-new-tokens", "12", "--json"]
        code, out, err = run("generate", "def", *pair, *options)
        assert code == 0, err
        if delta == "1":
            plain = run("generate", "def", *pair, "--method", "plain", "--json")[1]
            tokens = json.loads(out)["tokens"]
            assert tokens == json.loads(plain)["tokens"][: len(tokens)]
    code, _, err = run("generate", "def", *pair, "--method", "draft:rule=judge")
    assert code == 2 and "none ships for this model" in err and err.count("\n") == 1


def test_pairs_of_answers(run: Any, folder: str, tmp_path: Path) -> None:
    """Without depth no refinement is tried; the model holds 128 tokens, and no judgement fits."""
    out = tmp_path / "pairs.jsonl"
    prompts = rows(tmp_path / "p.jsonl", {"prompt": "Hi"}, {"prompt": "Ho"})
    given = ["train", "pairs", "--model", folder, "--prompts", prompts]
    args = [*given, "--max-new-tokens", "2", "--method", "spar:depth=0", "--out", str(out)]
    code, said, err = run(*args)
    assert code == 0 and f"{out}: 0 pairs of 2 prompts" in said and said.count("\n") == 1
    assert "2 prompts, each with an answer of at most 2 tokens" in err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [{"prompt": word, "chosen": None, "rejected": None} for word in ("Hi", "Ho")]
    code, said, _ = run(*args, "--json")
    assert json.loads(said) == {"file": str(out), "prompts": 2, "pairs": 0, "failed": 0}
    code, said, err = run(*given, "--max-new-tokens", "9", "--out", str(tmp_path / "failed.jsonl"))
    assert code == 0 and "0 pairs of 2 prompts" in said, err
    assert "warning: 2 prompts failed, the first with: spar" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("acceptance-head --out {}/h", "either --prompts FILE.jsonl or --text SOURCE"),
        ("acceptance-head --out {}/h --text t --prompts p", "either --prompts"),
        ("acceptance-head --out {} --text t", "a folder; name a file"),
        ("acceptance-head --out {}/no/h --text t", "--text t: no such file"),
        ("acceptance-head --out {}/h --prompts ./none", "none: cannot be read"),
        ("acceptance-head --out {}/h --text ./none", "--text ./none"),
        ("acceptance-head --out {}/h --text t --mixed 2", "mixed=2.0: must be between"),
        ("acceptance-head --out {}/h --text {}/short", "the texts give 0 pieces"),
        ("amateur --out {}/a --answers p --rank 0", "rank=0: must be between"),
        ("amateur --out {}/a --answers ./none", "none: cannot be read"),
        ("attribute --out {}/a --prompts p --grams 0 --least 0", "there is nothing to learn"),
        ("attribute --out {}/a --prompts p --pattern (", "pattern='(': must be a regular expr"),
        ("attribute --out {}/a --prompts ./none", "none: cannot be read"),
        ("channels --out {}/c --text ./none", "./none"),
        ("exits --answers {}/none --draft {}", "--draft FOLDER"),
        ("exits --answers {}/none", "there are none"),
        ("exits --answers {}/none --length 0", "--length=0"),
        ("filter --out {}/f --prompts ./none", "./none"),
        ("judge --out {}/o", "give --tasks, or --own tasks"),
        ("judge --out {}/o --own -1", "--own=-1: must be 0 or more"),
        ("judge --out {}/o --own 5 --labels 3", "labels=3: must be between"),
        ("judge --out {}/o --tasks ./none", "none: cannot be read"),
        ("judge --out {}/o --own 2 --answer-tokens 4", "0 tasks gave labels, too few"),
        ("pairs --prompts {}/p.jsonl --out {}/short/new/o.jsonl", "short is a file, not a folder"),
        ("pairs --prompts {}/p.jsonl --out {}/q --method plain", "method='plain': must be spar"),
        ("pairs --prompts {}/p.jsonl --out {}/o.jsonl", "o.jsonl: holds pairs of other prompts"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    run: Any, pair: list[str], tmp_path: Path, args: str, words: str
) -> None:
    (tmp_path / "short").write_text("one two")
    rows(tmp_path / "p.jsonl", {"prompt": "Hi"})
    rows(tmp_path / "o.jsonl", {"prompt": "He", "chosen": None, "rejected": None})
    name, *options = args.replace("{}", str(tmp_path)).split()
    code, out, err = run("train", name, *pair, *options)
    assert code == 2 and not out and words in err.splitlines()[-1]
    assert name == "judge" or err.count("\n") == 1  # it says first how long it will take


@pytest.mark.parametrize("args", ["acceptance-head --text {}", "judge --own 3"])
def test_a_pair_without_a_draft_model_is_told(
    run: Any, folder: str, text: str, tmp_path: Path, args: str
) -> None:
    given = [*args.format(text).split(), "--out", str(tmp_path / "o")]
    code, _, err = run("train", given[0], "--model", folder, *given[1:])
    assert code == 2 and "name one with --draft" in err and err.count("\n") == 1

"""Commands that learn from a target's own answers: each makes what `generate` then drafts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BATCH = ["--tokens", "256", "--batch", "128", "--window", "128"]
SIZE = [*BATCH, "--micro", "128", "--common", "64"]
SHAPE = "--hidden 16 --heads 2 --kv-heads 1 --intermediate 16 --context 128".split()
FLOATS = ["--dtype", "float32"]


def places(folder: Path, *names: str) -> list[str]:
    return [part for name in names for part in (f"--{name}", str(folder / name))]


def generate(run: Any, *args: str) -> tuple[int, dict[str, Any], str]:
    code, out, err = run("generate", "def", *args, "--max-new-tokens", "6", "--json")
    return code, json.loads(out) if code == 0 else {}, err


@pytest.mark.parametrize("exits", [False, True])
def test_a_draft_model(run: Any, prompts: Path, tmp_path: Path, exits: bool) -> None:
    """One with exits gets thresholds for its target; the other reads plain texts first."""
    args = ["train", "draft", "--target", "demo", "--prompts", str(prompts), *SIZE, *SHAPE]
    args += ["--answer-tokens", "12", "--sampled", "32", "--warmup", "1"]
    args += places(tmp_path, "out", "answers")
    if exits:
        assert run(*args, "--layers", "2", "--exits", "1")[0] == 0
        config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
        (table,) = config["foretell_exits"]["targets"]
        assert table["name"] == "demo" and table["format"] == "int8"
        return
    (tmp_path / "plain.txt").write_text("The quick brown fox jumps over the lazy dog. " * 600)
    plain = ["--text", str(tmp_path / "plain.txt"), "--text-tokens", "512"]
    code, out, _ = run(*args, *plain, "--layers", "1")
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    report = json.loads((tmp_path / "out" / "text" / "report.json").read_text())
    assert report["tokens_seen"] == 512
    code, written, _ = generate(
        run, "--draft", str(tmp_path / "out" / "model"), "--method", "draft"
    )
    assert code == 0 and len(written["tokens"]) <= 6


def test_a_head(run: Any, folder: str, prompts: Path, tmp_path: Path) -> None:
    args = ["train", "head", "--target", folder, *places(tmp_path, "out", "answers", "states")]
    args += ["--prompts", str(prompts), "--answer-tokens", "16", "--depths", "2", *SIZE]
    code, out, err = run(*args, *FLOATS, "--states-dtype", "float32")
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    assert "48 tokens of answers" in err and "GB for their states" in err
    head = tmp_path / "out" / "head"
    config = json.loads((head / "config.json").read_text())
    assert config["kind"] == "eagle3" and len(config["hits"]) == 5
    method = f"eagle3:head={head},nodes=4"
    _, written, _ = generate(run, "--model", folder, *FLOATS, "--method", method)
    assert written["stats"]["calls"]["head"] > 0


def test_rows_through_the_target_need_no_states(
    run: Any, folder: str, prompts: Path, tmp_path: Path
) -> None:
    args = ["train", "head", "--target", folder, "--kind", "ppd", "--prompts", str(prompts)]
    args += [*places(tmp_path, "out", "answers"), "--answer-tokens", "16", "--anchors", "4", *SIZE]
    code, out, err = run(*args, *FLOATS, "--states-dtype", "float32")
    assert code == 0 and "ppd" in out and "256 tokens seen" in out
    assert "4 anchors each, about" in err
    assert 'kind = "ppd"' in (tmp_path / "out" / "recipe.toml").read_text()
    method = f"ppd:head={tmp_path / 'out' / 'head'},nodes=4"
    _, written, _ = generate(run, "--model", folder, *FLOATS, "--method", method)
    assert written["stats"]["drafted"] > 0


@pytest.mark.parametrize(
    ("command", "sizes", "method"),
    [
        ("k-forcing", [*BATCH, "--warmup", "1", "--k", "2", "--rate", "0.01"], "k-forcing:head={}"),
        ("lud", [*BATCH, "--warmup", "1", "--rate", "0.01"], "lud:head={},beta=0"),
        ("medusa-2", SIZE, "medusa:head={},nodes=4"),
    ],
)
def test_a_tuned_target(
    run: Any,
    folder: str,
    prompts: Path,
    tmp_path: Path,
    command: str,
    sizes: list[str],
    method: str,
) -> None:
    pytest.importorskip("peft", reason="needs foretell[lora]")
    args = ["train", command, "--target", folder, *places(tmp_path, "out", "answers")]
    args += ["--prompts", str(prompts), "--answer-tokens", "16", *FLOATS, *sizes]
    code, out, err = run(*args)
    assert code == 0 and "256 tokens seen; perplexity" in out and out.count("\n") == 1, err
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made >= ({"lora", "head", "model"} if command == "medusa-2" else {"head", "model"})
    assert "tokens = 256" in (tmp_path / "out" / "recipe.toml").read_text()
    tail = ["--method", method.format(tmp_path / "out" / "head")]
    code, written, _ = generate(run, "--model", str(tmp_path / "out" / "model"), *tail)
    calls = written["stats"]["calls"]
    if command == "medusa-2":
        assert calls["head"] > 0
        return
    assert calls["target"] < 6
    code, _, err = generate(run, "--model", folder, *tail)
    assert code == 2 and "weights other than those of" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        *((name, "", "nothing to answer") for name in ("draft", "head", "k-forcing", "lud")),
        ("draft", "--own 1 --exits 9", "exits="),
        ("draft", "--own 1 --answer-tokens 0", "'--answer-tokens': Input should be greater"),
        ("draft", "--prompts missing.jsonl", "missing.jsonl"),
        ("draft", "--own 1 --hidden 100", "hidden=100"),
        ("draft", "--own 1 --text-tokens 0", "'--text-tokens': Input should be greater"),
        ("draft", "--own 2", "chat template"),
        ("head", "--own 1 --answer-tokens 0", "'--answer-tokens': Input should be greater"),
        ("head", "--prompts missing.jsonl", "missing.jsonl"),
        ("head", "--own 1 --kind eagle9", "kind='eagle9': must be one of"),
        ("head", "--own 1", "learns from hidden states: give a folder, --states"),
        ("head", "--own 1 --states {}/s --reference gone", "gone/config.json"),
        ("head", "--own 1 --states {}/s --init gone", "gone/config.json"),
        ("head", "--own 1 --states {}/s --objective mse", "objective='mse'"),
        ("head", "--own 2 --states {}/s", "chat template"),
        ("head", "--own 1 --kind ppd --reference gone", "ppd takes no --reference"),
        ("head", "--own 1 --kind ppd --states-dtype int8", "ppd takes no --states-dtype int8"),
        ("head", "--own 1 --kind ppd --entry 2", "ppd: has no option 'entry'"),
        ("head", "--own 1 --kind hidden-transfer --entry 99", "hidden-transfer:entry=99"),
        ("head", "--own 1 --kind ppd --anchors 0", "anchors=0"),
        ("k-forcing", "--own 1 --merged int8", "merged='int8': must be one of"),
        ("k-forcing", "--own 1 --k 3", "k=3: must be 1, 2, 4, 8 or 16"),
        ("k-forcing", "--own 1 --batch 64", "batch=64: must be at least window=640"),
        ("lud", "--own 1 --merged int8", "merged='int8': must be one of"),
        ("lud", "--own 1 --sure 0.5", "sure=0.5: must be above 0.5"),
        ("lud", "--own 1 --batch 64", "batch=64: must be at least window=640"),
        ("medusa-2", "", "nothing to answer"),
        ("medusa-2", "--own 1 --merged int8", "merged='int8': must be one of"),
        ("medusa-2", "--own 1 --schedule never", "schedule='never': must be one of sine"),
        ("medusa-2", "--own 1 --init gone", "gone/config.json"),
        ("medusa-2", "--prompts missing.jsonl", "missing.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    command: str, args: str, words: str, run: Any, tmp_path: Path
) -> None:
    if command not in ("draft", "head"):
        pytest.importorskip("peft", reason="needs foretell[lora]")
    given = ["--target", "demo", *places(tmp_path, "out", "answers")]
    code, out, err = run("train", command, *given, *args.format(tmp_path).split())
    assert code == 2 and not out
    assert words in err.splitlines()[-1]
    assert command != "draft" or err.count("\n") == 1


def test_without_its_package_the_cure_is_told(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.train.heads.medusa_2.find_spec", lambda name: None)
    given = ["--target", "demo", *places(tmp_path, "out", "answers"), "--own", "1"]
    code, out, err = run("train", "medusa-2", *given)
    assert code == 2 and not out and "pip install 'foretell[lora]'" in err

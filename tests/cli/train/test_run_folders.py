"""Commands with a folder for the run: the model is made and used, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.train.preferences.test_mango import code as commented
from tests.train.preferences.test_preferences import written as written_pairs
from tests.train.preferences.test_rollouts import written as written_rows

PAIRS = "--rank 2 --length 120 --batch 4 --micro 4 --epochs 1".split()
ROUNDS = "--rounds 1 --per-round 2 --group 2 --answer-tokens 4 --dtype float32".split()
ROUNDS += "--backend torch --merged float32".split()
CORPUS = "--layers 1 --vocab-size 300 --tokens 128 --warmup 1 --micro 64 --batch 64".split()
CANVASES = "--examples 16 --batch 8 --micro 512 --masks count".split()


@pytest.fixture
def text(tmp_path: Path) -> str:
    rows = [{"path": f"f{i}", "text": f"The dog {i} sat on the mat. " * 30} for i in range(300)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "t.jsonl")


def generate(run: Any, model: Path, *options: str) -> int:
    code: int = run("generate", "The", "--model", str(model), *options, "--max-new-tokens", "3")[0]
    return code


def asked(folder: Path, **fields: Any) -> list[str]:
    rows = [{"prompt": f"Is {n} odd?", **fields} for n in range(6)]
    return ["--prompts", str(written_rows(folder / "prompts.jsonl", *rows))]


def test_a_model_of_blocks(run: Any, text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["train", "blockffn", "--out", str(out), "--text", text, *CORPUS]
    args += ["--corpus", str(tmp_path / "corpus"), "--context", "32", "--windows", "2"]
    args += "--hidden 16 --heads 2 --kv-heads 1 --blocks 4 --width 4 --chunk 16".split()
    code, said, _ = run(*args)
    assert code == 0 and "128 tokens seen" in said and "successive tokens" in said
    code, said, _ = run(*args, "--json")
    assert code == 0 and json.loads(said)["heldout"]["perplexity"] > 1
    assert generate(run, out / "model") == 0
    code, _, said = run(*args, "--chunk-weight", "-1")
    assert code == 2 and "chunk_weight=-1" in said and said.count("\n") == 1


def test_a_pldr_llm(run: Any, text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["train", "pldr", "--out", str(out), "--text", text, *CORPUS]
    args += ["--corpus", str(tmp_path / "corpus"), "--context", "32", "--windows", "2"]
    args += "--heads 2 --width 8 --units 1 --inner 8".split()
    code, said, _ = run(*args)
    assert code == 0 and "128 tokens seen" in said and "frozen" in said and said.count("\n") == 2
    code, said, _ = run(*args, "--json")
    assert code == 0 and json.loads(said)["metric"]["loss"]["cached"] > 0
    for model in ("model", "frozen"):
        assert generate(run, out / model, "--backend", "torch") == 0
    code, _, said = run(*args, "--metric", "other")
    assert code == 2 and "metric='other'" in said and said.count("\n") == 1


def test_a_language_model(run: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 400)
    out = tmp_path / "run"
    args = ["train", "lm", "--out", str(out), "--text", text, "--text", str(tmp_path / "text.txt")]
    args += ["--corpus", str(tmp_path / "corpus"), *CORPUS, "--no-compiled", "--context", "64"]
    args += "--hidden 16 --heads 2 --kv-heads 1 --intermediate 16 --short-context 32".split()
    code, said, _ = run(*args)
    assert code == 0 and "128 tokens seen" in said and said.count("\n") == 1
    assert generate(run, out / "model") == 0
    assert run(*args, "--seed", "1")[0] == 2, "a run with other settings must not be continued"


@pytest.mark.parametrize("kind", ["arc-encoder", "lclm"])
def test_an_encoder_of_contexts(run: Any, folder: str, tmp_path: Path, kind: str) -> None:
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": f"{text} {number} {text}" * 3} for number in range(8) for text in tiny.TEXTS]
    texts.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "doc.txt").write_text(tiny.TEXTS[1])
    out = tmp_path / "run"
    sizes = "--layers 1 --length 16 --following 16 --texts 8 --batch 4 --held 2"
    given = ["train", "compressor", "--target", folder, "--kind", kind, *sizes.split()]
    given += ["--text", str(texts), "--out", str(out)]
    code, said, err = run(*given, "--json")
    assert code == 0, err
    assert {*json.loads(said)["bits_per_byte"]} == {"full", "none", "raw", "compressed", "another"}
    code, said, _ = run(*given)
    assert code == 0 and f"--kv {kind}:folder={out / 'compressor'}" in said
    options = ["--context", str(tmp_path / "doc.txt"), "--kv", f"{kind}:folder={out}/compressor"]
    assert generate(run, Path(folder), "--backend", "torch", *options) == 0
    code, _, err = run(*given, "--kind", "zip")
    assert code == 2 and "kind='zip'" in err


def test_fewer_key_heads(run: Any, folder: str, tmp_path: Path) -> None:
    text, out = tmp_path / "t.jsonl", tmp_path / "out"
    rows = [{"text": f"{number} {' '.join(tiny.TEXTS)}"} for number in range(20)]
    text.write_text("\n".join(map(json.dumps, rows)))
    given = ["train", "kv-heads", "--target", folder, "--text", str(text), "--out", str(out)]
    given += "--length 32 --window 32 --micro 32 --batch 32 --tokens 64 --held 200".split()
    code, said, _ = run(*given)
    assert code == 0 and "1 key heads in place of 2" in said and "tuned" in said
    code, said, _ = run(*given, "--json")
    assert code == 0 and json.loads(said)["heads"] == {"before": 2, "after": 1}
    assert generate(run, out / "model", "--backend", "torch") == 0
    code, _, said = run(*given, "--merge", "3")
    assert code == 2 and "merge=3" in said and said.count("\n") == 1


def test_a_model_that_fills_canvases(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    size = "--hidden 16 --layers 1 --heads 2 --intermediate 24".split()
    code, said, err = run("train", "dlm", "--out", str(out), *size, *CANVASES)
    assert code == 0 and "16 examples seen" in said and said.count("\n") == 1, err
    assert "examples = 16" in (out / "recipe.toml").read_text()
    assert generate(run, out / "model", "--backend", "torch") == 0
    certain = "--objective certainty --own 40 --longest 6 --certain 4 --matrix-rate 0".split()
    given = ["train", "dlm", "--init", str(out / "model"), "--out", str(tmp_path / "sure")]
    code, said, err = run(*given, *CANVASES, *certain)
    assert code == 0 and str(tmp_path / "sure" / "model") in said, err


def test_pairs_make_another_model(run: Any, folder: str, tmp_path: Path) -> None:
    path, out = str(written_pairs(tmp_path)), tmp_path / "run"
    args = ["train", "dpo", "--target", folder, "--pairs", path, "--out", str(out), *PAIRS]
    code, said, err = run(*args)
    assert code == 0 and said.count("\n") == 1, err
    assert f"{out}: learnt from 10 pairs; of 2 others the better answer" in said
    assert "10 pairs, 3 steps over" in err
    assert {path.name for path in out.iterdir()} >= {"lora", "model", "report.json"}
    assert "beta = 0.1" in (out / "recipe.toml").read_text()
    assert generate(run, out / "model") == 0
    assert generate(run, Path(folder), "--guidance", f"lol:amateur={out}/lora") == 0


def test_commented_code_makes_another_model(run: Any, folder: str, tmp_path: Path) -> None:
    path, out = commented(tmp_path), str(tmp_path / "run")
    args = ["train", "mango", "--target", folder, "--code", path, "--out", out, *PAIRS]
    code, said, err = run(*args, "--merged", "")
    assert code == 0 and said.count("\n") == 1, err
    assert "learnt from 8 answers; a token of 2 others" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["recipe"]["code"] == [path] and report["steps"] == 2
    # The run's own recipe repeats it.
    again = ["--recipe", f"{out}/recipe.toml", "--out", str(tmp_path / "again")]
    assert run("train", "mango", *again)[0] == 0
    weights = "lora/adapter_model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == Path(out, weights).read_bytes()


def test_a_reward_makes_another_model(run: Any, folder: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["train", "grpo", "--target", folder, *asked(tmp_path, references="yes it is"), *ROUNDS]
    args += ["--out", str(out), "--drafter", "ngram", "--hardest", "0.5"]
    code, said, err = run(*args)
    assert code == 0 and said.count("\n") == 1 and "1 rounds; answers to 1 prompts" in said, err
    assert "5 prompts to learn from and 1 to measure by; at most 36 tokens" in err
    assert {path.name for path in out.iterdir()} >= {"lora", "model", "rounds.jsonl", "report.json"}
    assert json.loads((out / "report.json").read_text())["prompts"] == 2
    code, again, _ = run("train", "grpo", "--recipe", str(out / "recipe.toml"))
    assert code == 0 and again == said
    assert generate(run, out / "model") == 0
    assert generate(run, Path(folder), "--guidance", f"lol:amateur={out / 'lora'}") == 0


def test_a_corrector_and_its_drafter_of_blocks(run: Any, tmp_path: Path) -> None:
    names = ("cat", "dog", "bird", "fish", "horse", "mouse", "snake", "goat", "wolf", "bear")
    rows = [{"path": name, "text": f"The {name} sat on the mat."} for name in names]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    args = ["train", "gad", "--out", str(out), "--device", "cpu"]
    args += ["--text", str(tmp_path / "t.jsonl")]
    args += "--hidden 16 --encoder-layers 1 --decoder-layers 1 --heads 2 --intermediate 16".split()
    args += "--vocab-size 290 --k 4 --steps 2 --draft-steps 2 --batch 4".split()
    args += "--measured 2 --share 0.3".split()
    code, said, _ = run(*args)
    assert code == 0 and "tokens a step" in said and "measured on 2 sentences" in said
    given = ["--model", str(out / "model"), "--draft", str(out / "drafter"), "--json"]
    texts = []
    for method in ("plain", "gad:nodes=4", "gad:nodes=4,rule=relaxed"):
        options = [*given, "--method", method, "--max-new-tokens", "5"]
        code, said, _ = run("generate", "The cat.", *options)
        assert code == 0
        texts.append(json.loads(said)["tokens"])
    assert texts[0] == texts[1] and texts[2]
    code, _, err = run(*args, "--seed", "1")
    assert code == 2 and "holds a run with other settings" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("dlm --objective certainty", "give --init"),
        ("dlm --masks some", "one of rate, count"),
        ("dlm --answers ./none", "none: has no answers"),
        ("dlm --init ./none", "./none"),
        ("dlm --text stdlib", "give --init"),
        ("dpo --pairs gone.jsonl", "gone.jsonl: cannot be read"),
        ("dpo --pairs {}/bad.jsonl", "bad.jsonl, row 1: `chosen` must be a text"),
        ("dpo --pairs {}/pairs.jsonl --merged int8", "merged='int8': must be one"),
        ("dpo --pairs {}/pairs.jsonl --beta -1", "beta=-1.0: must be between"),
        ("mango --code {}/gone", "gone: no such file or folder"),
        ("mango --code {}", "0 pairs of answers of at most 128 tokens"),
        ("mango --code {} --layers=", "layers=''"),
        ("grpo --answer-tokens 512", "answer_tokens=512: must be less than the 128 tokens"),
        ("grpo --group 1", "group=1: must be between 2"),
        ("grpo --reward keywords", "row 1: keywords"),
        ("grpo --hardest 0.5", "some prompts have none"),
        ("grpo --t 10", "give calibrate"),
        ("grpo --merged int8", "merged='int8': must be one of"),
        ("grpo --drafter sufix", "sufix"),
        ("grpo --prompts missing.jsonl", "missing.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: str, words: str, run: Any, folder: str, tmp_path: Path
) -> None:
    written_pairs(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n')
    name, *options = args.replace("{}", str(tmp_path)).split()
    given = [] if name == "dlm" else ["--target", folder]
    if name == "grpo":
        given += [*asked(tmp_path), "--answer-tokens", "4"]
    code, said, err = run("train", name, *given, "--out", str(tmp_path / "run"), *options)
    assert code == 2 and not said and words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()

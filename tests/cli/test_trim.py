"""`foretell trim`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.drafters.model import vocabulary as trimming
from tests import tiny

CODE = "def add(a, b):"


def test_a_file_of_kept_tokens_is_a_command(
    run: Any, folder: str, small: str, tmp_path: Path
) -> None:
    texts, out = tmp_path / "a.md", tmp_path / "kept.json"
    texts.write_text(tiny.TEXTS[0])
    models = ["--model", folder, "--draft", small, "--device", "cpu"]
    code, said, err = run("trim", str(texts), *models, "--out", str(out), "--alpha", "0.7")
    kept = trimming.load_kept_tokens(out)
    ids = tiny.tokenizer()(tiny.TEXTS[0], add_special_tokens=False)["input_ids"]
    assert (
        code == 0 and "these are few texts: about" in err and f"{len(ids):,} tokens counted" in said
    )
    assert f"{out}: {len(kept.ids)} of {len(tiny.tokenizer())} tokens" in said and "chosen" in said
    assert {*kept.ids} <= {0, *ids} and 0 in kept.ids and len(kept.ids) > 5
    document = json.loads(out.read_text())
    assert document["table"][-1]["coverage"] == 1.0 and document["table"][-1]["saved"] == 0.0

    method = ["--method", "draft:nodes=4", "--json", "--max-new-tokens", "12"]
    plain = run("generate", *models, "--method", "plain", *method[2:], CODE)
    code, said, _ = run("generate", *models, *method, "--draft-vocab", str(out), CODE)
    assert code == 0 and json.loads(said)["tokens"] == json.loads(plain[1])["tokens"]
    assert json.loads(said)["stats"]["drafted"] > 0

    code, said, _ = run("trim", str(texts), *models, "--out", str(out), "--answers", "8")
    assert code == 0 and "8 tokens counted" in said
    texts.write_text(tiny.TEXTS[0] * 20)  # in which no token stands once
    code, said, err = run("trim", str(texts), *models, "--out", str(out), "--size", "20")
    assert err == ""
    assert code == 0 and len(trimming.load_kept_tokens(out).ids) == 20


def test_what_cannot_be_trimmed_is_one_line(
    run: Any, folder: str, small: str, tmp_path: Path
) -> None:
    text, out = tmp_path / "a.md", str(tmp_path / "kept.json")
    text.write_text("some text")
    models = ["--model", folder, "--draft", small]
    refused = [
        (["trim", str(text), "--model", folder, "--out", out], "a draft model"),
        (["trim", str(text), *models, "--out", out, "--alpha", "0"], "--alpha=0.0"),
        (["trim", str(text), *models, "--out", out, "--size", "99999"], "--size=99999"),
        (["trim", str(tmp_path / "none.md"), *models, "--out", out], "no such file"),
        (["trim", str(text), *models, "--out", out, "--draft-vocab", out], "cut down already"),
        (["trim", str(text), *models, "--out", str(tmp_path)], "a folder"),
        (["generate", "x", *models, "--draft-vocab", out], "no such file of kept tokens"),
    ]
    for arguments, said in refused:
        code, _, err = run(*arguments)
        assert code == 2 and said in err and err.count("\n") == 1, arguments

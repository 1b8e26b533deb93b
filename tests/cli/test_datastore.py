"""`foretell datastore`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.drafters.lookup import datastore
from tests import tiny

CODE = "def add(a, b):"
SHORT = ["--max-new-tokens", "12"]


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
    store = datastore.load_datastore(out)
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

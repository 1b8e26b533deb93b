"""Where training text comes from and how it is kept."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from foretell.errors import BadConfig
from foretell.train.corpus import (
    held_out,
    prepare_corpus,
    read_documents,
    train_tokenizer,
    without_boilerplate,
)

TEXTS = [f"def f{i}(x):\n    return x + {i}\n\n\nclass C{i}:\n    pass\n" for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXTS), 320)


@given(text=st.text())
def test_every_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_stay_single_and_indentation_is_one_piece(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert len(tokenizer.encode("\n    return").ids) < len("\n    ")


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.bin").write_bytes(b"\x00")
    rows = [{"text": "one", "source": "s", "path": "p"}, {"text": "two"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dict(read_documents(str(tmp_path / "a.py"))) == {"a.py": "a = 1\n"}
    assert dict(read_documents(str(tmp_path / "c.jsonl"))) == {"s/p": "one", "c/1": "two"}
    assert len(dict(read_documents(str(tmp_path)))) == 3
    names = [name for name, _ in read_documents("stdlib")]
    assert "stdlib/json/decoder.py" in names
    assert not any("/test/" in name for name in names)
    assert any("/test/" in name for name, _ in read_documents("stdlib-tests"))


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "line 2 is no JSON"), ("[]", "line 2 has no field"), ('{"text": 1}', "line 2")],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + content + "\n")
    with pytest.raises(BadConfig, match=says):
        list(read_documents(str(tmp_path / "x.jsonl")))
    with pytest.raises(BadConfig, match="no such file"):
        list(read_documents(str(tmp_path / "nothing")))


def test_held_out_by_name_alone() -> None:
    kept = [held_out(f"file{i}", 0.1) for i in range(2000)]
    assert 140 < sum(kept) < 260
    assert kept == [held_out(f"file{i}", 0.1) for i in range(2000)]
    assert not held_out("any", 0.0)
    assert held_out("any", 1.0)


def test_boilerplate_goes_after_two_documents() -> None:
    long, seen = "licence " * 20, Counter[int]()
    texts = [without_boilerplate(f"own {i}\n\n{long}", seen) for i in range(4)]
    assert [long in text for text in texts] == [True, True, False, False]
    assert texts[3] == "own 3"


def test_prepare_writes_once_and_guards_its_folder(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text, "path": str(i)}) for i, text in enumerate(TEXTS)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows) + "\n")
    source = [f"{tmp_path / 't.jsonl'}*2"]
    info = prepare_corpus(tmp_path / "c", source, 320, share=0.2)
    train, held = (
        np.fromfile(tmp_path / "c" / f"{part}.bin", dtype=np.uint16)
        for part in ("train", "heldout")
    )
    documents_kept = (tmp_path / "c" / "heldout.jsonl").read_text().splitlines()
    assert info["train_tokens"] == len(train)
    assert info["heldout_documents"] == len(documents_kept) == (held == 0).sum()
    assert (train == 0).sum() == 2 * (len(TEXTS) - len(documents_kept))
    assert 0 < len(documents_kept) < len(TEXTS)
    assert prepare_corpus(tmp_path / "c", source, 320) == json.loads(json.dumps(info))
    with pytest.raises(BadConfig, match="another --out"):
        prepare_corpus(tmp_path / "c", source, 321)

"""A .gguf file to a folder: the same weights, tokens and template."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretell
from foretell.loading.gguf_export import main
from tests import tiny
from tests.files import full_disk

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEXTS = (*tiny.TEXTS, "a   12 b", "x = 345", "\n\n\t7")


def unpacked(tmp_path: Path, words: str = "gpt-2") -> Path:
    file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf", TEMPLATE, words)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main([str(file), str(folder)]) == 0
    return folder


def test_the_folder_holds_the_model(tmp_path: Path) -> None:
    folder = unpacked(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    wanted = tiny.llama().to(torch.bfloat16).state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    coder = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert coder(text)["input_ids"] == tiny.tokenizer()(text)["input_ids"]
    assert coder.chat_template == TEMPLATE and coder.eos_token == tiny.EOS
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert len(modes) == 1, "all files can be read by whoever can read one"
    lm = foretell.load(folder, backend="torch")
    out = lm.generate([{"role": "user", "content": "def"}], "plain", max_new_tokens=4)
    twin = tiny.lm(torch.bfloat16)
    assert out.tokens == twin.generate("user: def\n", "plain", max_new_tokens=4).tokens


def test_digits_are_words_where_the_file_says_so(tmp_path: Path) -> None:
    coder = AutoTokenizer.from_pretrained(unpacked(tmp_path, "smollm"))
    core = coder.backend_tokenizer
    pieces = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str("a   12 b")]
    assert pieces == ["a", "ĠĠĠ", "1", "2", "Ġb"]
    assert all(coder.decode(coder(text)["input_ids"]) == text for text in TEXTS)


def test_what_cannot_be_unpacked_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf", words="a-new-rule")
    assert main([str(file), str(tmp_path)]) == 2
    assert (
        "tokenizer.ggml.pre is 'a-new-rule': its tokenizer splits words by that rule"
        in capsys.readouterr().err
    )
    file.write_bytes(b"GGUF and nothing more")
    assert main([str(file), str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{file}: cannot be read (")


def test_a_full_disk_is_told_from_a_wrong_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    with full_disk(1000):
        assert main([str(file), str(folder)]) == 1
    assert "File too large" in capsys.readouterr().err

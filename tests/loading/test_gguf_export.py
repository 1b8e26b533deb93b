"""A .gguf file to a folder: the same weights, tokens and template."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretell
from foretell.loading.gguf_export import main, read_tokenizer
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


def sentences(folder: Path, **keys: Any) -> Any:
    """The tokenizer of a file with a vocabulary of sentencepiece."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    named = {
        "model": "llama",
        "pre": "default",
        "tokens": texts + words,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "scores": [0.0] * len(texts) + [-1.0 - i for i in range(len(words))],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }
    given = {f"tokenizer.ggml.{key}": value for key, value in named.items()}
    return read_tokenizer(tiny.gguf(tiny.llama(), folder / "model.gguf", keys=given))


@pytest.mark.parametrize("space", [True, False, None])
def test_a_space_stands_before_a_text_where_the_file_says_so(
    space: bool | None, tmp_path: Path
) -> None:
    coder = sentences(tmp_path, add_space_prefix=space, add_bos_token=False)
    ids = coder("ab a")["input_ids"]
    first = "ab" if space is False else "\u2581ab"
    assert coder.convert_ids_to_tokens(ids) == [first, "\u2581a"]
    assert coder.decode(ids) == "ab a"
    spaced = coder(" ab")["input_ids"]
    assert coder.convert_ids_to_tokens(spaced) == (
        ["\u2581", "\u2581ab"] if space is not False else ["\u2581ab"]
    )
    assert coder.decode(spaced) == " ab"
    assert coder.decode(ids[1:]) == ("a" if space is not False else " a")


@pytest.mark.parametrize("first", [True, False, None])
def test_the_first_token_of_a_text_is_what_the_file_says(
    first: bool | None, tmp_path: Path
) -> None:
    coder = sentences(tmp_path, add_bos_token=first)
    assert (coder("ab")["input_ids"][0] == 1) == (first is not False)
    keys = {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.bos_token_id": 0}
    for rule, usual in (("gpt-2", False), ("llama-bpe", True)):
        file = tiny.gguf(tiny.llama(), tmp_path / "bytes.gguf", words=rule, keys=keys)
        wanted = usual if first is None else first
        assert (read_tokenizer(file)("ab")["input_ids"][0] == 0) == wanted, rule


def test_words_of_the_vocabulary_are_taken_whole_by_llama_3_s_rule(tmp_path: Path) -> None:
    ids = tiny.tokenizer().get_vocab()
    texts = [*sorted(ids, key=lambda text: ids[text]), "zebra"]  # no merges lead to it
    keys = {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3] + [1] * len(ids),
        "tokenizer.ggml.add_bos_token": False,
    }
    for rule, whole in (("gpt-2", False), ("llama-bpe", True)):
        file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf", words=rule, keys=keys)
        assert (read_tokenizer(file)("zebra")["input_ids"] == [len(ids)]) == whole, rule


def test_what_cannot_be_unpacked_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf", words="a-new-rule")
    assert main([str(file), str(tmp_path)]) == 2
    assert "words by the rule 'a-new-rule', unknown here" in capsys.readouterr().err
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

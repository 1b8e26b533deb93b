"""The tokenizer of a GGUF file against transformers' own of the same vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="needs foretell[gguf]")
pytest.importorskip("gguf", reason="needs the package gguf, to write files")

import foretell
from foretell.errors import BadConfig
from foretell.models.gguf.llama_library import load_library, open_model
from foretell.models.gguf.vocabulary import Vocabulary
from tests import tiny

CODE = "def add(a, b):\n    return a"
TEMPLATE = "{% for m in messages %}<|end|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gguf(tiny.llama(), tmp_path_factory.mktemp("gguf") / "tiny.gguf", TEMPLATE)


@pytest.fixture
def words(file: Path) -> Iterator[Vocabulary]:
    lib = load_library()
    handle = open_model(lib, file)
    yield Vocabulary(lib, handle)
    lib.llama_model_free(handle)


@pytest.mark.parametrize(
    "text", [*tiny.TEXTS, CODE, "", " ", "<|end|>x", "a\0b", "\n\n  \t", "\ud800"]
)
def test_texts_are_coded_as_by_transformers(words: Vocabulary, text: str) -> None:
    theirs = tiny.tokenizer()
    ids = words(text)["input_ids"]
    text = text.replace("\ud800", "?")  # half a pair stands for nothing
    assert ids == theirs(text)["input_ids"]
    assert words.decode(ids, skip_special_tokens=True) == theirs.decode(
        ids, skip_special_tokens=True
    )
    assert words.decode(ids) == theirs.decode(ids)


def test_half_a_character_is_a_replacement_character(words: Vocabulary) -> None:
    ids = words("🙂")["input_ids"]
    assert len(ids) > 1 and words.decode(ids[:1]) == "\ufffd"


def test_a_vocabulary_has_what_is_used_of_it(words: Vocabulary) -> None:
    theirs = tiny.tokenizer()
    assert words.get_vocab() == theirs.get_vocab() and len(words) == len(theirs)
    assert (words.bos_token_id, words.eos_token_id, words.ends) == (0, 0, [0])


def test_chat(file: Path, tmp_path: Path) -> None:
    lm, chat = foretell.load(file), [{"role": "user", "content": "add"}]
    assert lm.prompt_ids(chat) == lm.encode("<|end|>user: add\nassistant:")
    assert lm.generate(chat, "plain", max_new_tokens=3).tokens
    with pytest.raises(BadConfig, match="chat template"):
        foretell.load(tiny.gguf(tiny.llama(), tmp_path / "bare.gguf")).generate(chat)
    lm.tokenizer.chat_template = "{{ raise_exception('only one turn') }}"  # type: ignore[union-attr]
    with pytest.raises(BadConfig, match="only one turn"):
        lm.generate(chat)

"""A real chat model: it loads by its name, answers in English, and drafts do not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import foretell
from foretell.loading.fetch import resolve
from foretell.loading.load import load_tokenizer
from tests import tiny

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "List the days of the week, one on each line.",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
)
DRAFTERS = ("ngram", "suffix", "token-recycling", "auto")
TOKENS = 40


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def plain(lm: foretell.LM) -> list[list[int]]:
    """What plain decoding answers."""
    prompts = [chat(question) for question in QUESTIONS]
    return [out.tokens for out in lm.generate(prompts, "plain", max_new_tokens=TOKENS)]


def test_the_name_is_the_folder(folder: Path, lm: foretell.LM) -> None:
    assert Path(resolve("smollm2")).resolve() == folder.resolve()
    model = lm.models["target"]
    assert (model.vocab, len(model.layout), model.context) == (49152, 30, 8192)


def test_it_answers_in_english(lm: foretell.LM) -> None:
    out = lm.generate(chat(QUESTIONS[0]), "auto", max_new_tokens=TOKENS)
    assert "The capital of France is Paris" in out.text


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_change_no_token(lm: foretell.LM, plain: list[list[int]], method: str) -> None:
    for question, wanted in zip(QUESTIONS, plain, strict=True):
        out = lm.generate(chat(question), method, max_new_tokens=TOKENS)
        assert out.tokens == wanted, f"{method}: {question}"


def test_transformers_writes_the_same(folder: Path, plain: list[list[int]]) -> None:
    """transformers' own classes open the folder too."""
    coder = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encoded = coder.apply_chat_template(
        chat(QUESTIONS[0]), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**encoded, do_sample=False, max_new_tokens=TOKENS)
    assert out[0, encoded["input_ids"].shape[1] :].tolist() == plain[0]


def test_the_folder_has_the_weights_of_the_file(folder: Path) -> None:
    files = list(folder.glob("*.gguf"))
    if not files:
        pytest.skip("the hub's folder has no .gguf file beside it")
    options = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=files[0].name, **options)
    wanted = packed.state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_file_itself_writes_the_same(folder: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs foretell[gguf] for the file's own tokenizer")
    files = list(folder.glob("*.gguf"))
    if not files:
        pytest.skip("the hub's folder has no .gguf file beside it")
    answers = []
    for source in (folder, files[0]):
        lm = foretell.load(source, backend="torch")
        answers.append(lm.generate(chat(QUESTIONS[0]), "plain", max_new_tokens=TOKENS).tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("text", [*tiny.TEXTS, "a   12 b", "1,234.5\n\n\t7", "<p>x</p>"])
def test_texts_come_back_from_the_tokenizer(folder: Path, text: str) -> None:
    coder = load_tokenizer("smollm2")
    ids = coder(text)["input_ids"]
    assert coder.decode(ids) == text


def test_spaces_before_a_number_are_one_token(folder: Path) -> None:
    coder = load_tokenizer("smollm2")
    pieces = [coder.decode([token]) for token in coder("a   12 b")["input_ids"]]
    assert pieces == ["a", "   ", "1", "2", " b"]

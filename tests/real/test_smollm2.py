"""A real chat model: it answers in English, and is the same model to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import foretell
from foretell.loading.load import load_tokenizer

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"
TOKENS = 40


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_it_answers_in_english(lm: foretell.LM) -> None:
    out = lm.generate(chat(QUESTION), "auto", max_new_tokens=TOKENS)
    assert "The capital of France is Paris" in out.text


def test_transformers_writes_the_same(folder: Path, lm: foretell.LM) -> None:
    """transformers' own classes open the folder too."""
    coder = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encoded = coder.apply_chat_template(
        chat(QUESTION), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**encoded, do_sample=False, max_new_tokens=TOKENS)
    assert (
        out[0, encoded["input_ids"].shape[1] :].tolist()
        == lm.generate(chat(QUESTION), "plain", max_new_tokens=TOKENS).tokens
    )


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
        answers.append(lm.generate(chat(QUESTION), "plain", max_new_tokens=TOKENS).tokens)
    assert answers[0] == answers[1]


def test_spaces_before_a_number_are_one_token(folder: Path) -> None:
    coder = load_tokenizer("smollm2")
    pieces = [coder.decode([token]) for token in coder("a   12 b")["input_ids"]]
    assert pieces == ["a", "   ", "1", "2", " b"]

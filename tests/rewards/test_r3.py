"""R3 with a small random encoder, against its formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from foretell.errors import BadConfig, BadModel
from foretell.rewards.r3 import CLOSED, R3, trigram_variety

WORDS = ["[PAD]", "[UNK]", *"the a rain dog sun falls barks shines . ,".split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Bert of two layers and a tokenizer of some words, as save_pretrained writes them."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(path)
    return str(path)


def mean(folder: str, text: str) -> torch.Tensor:
    """The mean of the last states of one text alone."""
    model = BertModel.from_pretrained(folder)
    ids = [WORDS.index(word) if word in WORDS else 1 for word in text.split()]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().mean(0)


def test_it_is_a_product(folder: str) -> None:
    prompt, texts = "the rain falls", ["a dog barks , the sun shines .", "rain rain rain rain rain"]
    reward = R3(folder)
    for text, score in zip(texts, reward.scores(prompt, texts), strict=True):
        tokens = text.split()
        near = float(mean(folder, text) @ mean(folder, prompt))
        assert score == pytest.approx(near * len(tokens) / 100 * trigram_variety(tokens), rel=1e-4)
    only = R3(folder, length=False, variety=False).scores(prompt, texts)
    assert only[0] == pytest.approx(float(mean(folder, texts[0]) @ mean(folder, prompt)), rel=1e-4)


def test_with_a_reference_length_counts_for_nothing(folder: str) -> None:
    reward = R3(folder, reference="the sun shines")
    (score,) = reward.scores("the rain falls", ["a dog barks"])
    near = float(mean(folder, "a dog barks") @ mean(folder, "the sun shines"))
    assert score == pytest.approx(CLOSED * near, rel=1e-4)


def test_length_counts_up_to_a_limit_and_repetition_never_pays(folder: str) -> None:
    long = "the dog barks . " * 200
    near = float(R3(folder, length=False, variety=False).scores("the rain falls", [long])[0])
    assert R3(folder, variety=False).scores("the rain falls", [long])[0] == pytest.approx(3 * near)
    assert trigram_variety(long.split()) < 0.02 and trigram_variety(["a"]) == 1
    behind = long + "\n\n\n\nthe rain"
    shorter = R3(folder, most=1e9).scores("the rain falls", ["dog\n\n\n\nthe rain falls", "dog"])
    assert trigram_variety(behind.split()) and abs(shorter[0]) < 0.02 * abs(near), (
        "cut after the answer"
    )


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="needs an encoder"):
        R3()
    with pytest.raises(BadModel, match="is no folder"):
        R3("nowhere").scores("", ["a"])
    with pytest.raises(BadModel, match="holds no encoder"):
        R3(str(tmp_path)).scores("", ["a"])

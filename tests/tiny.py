"""Small real things for tests: a byte-level BPE tokenizer, random transformers models on it, and the LM around them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import foretell

EOS = "<|end|>"
CONTEXT = 128  # tokens, of every model here
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. ",
    "Größe, naïve café, 漢字かな, emoji 🙂🙃 and more 🙂. ",
)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """About 330 tokens: the end (id 0), all bytes, and a few merges. Characters can be split over tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, bos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Random, float32; its laws are spread but not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.35,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def relative(model: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """A draft model that agrees with `model` about half of the time: its weights with noise on them."""
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in twin.parameters():
            p += noise * p.std().nan_to_num(0.0) * torch.randn_like(p)
    return twin


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Random, float32, with learned positions."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer()), n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.35,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def lm(dtype: torch.dtype = torch.float32, draft: bool = True) -> foretell.LM:
    """A fresh LM: new stores, the same weights each time."""
    second = relative(llama()).to(dtype) if draft else None
    return foretell.wrap(llama().to(dtype), tokenizer(), second, "tiny")


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A folder that foretell.load opens."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder

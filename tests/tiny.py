"""Small real things for tests: a byte-level BPE tokenizer, random transformers models on it, and
the LM around them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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
    """About 330 tokens: the end (id 0), all bytes, and a few merges. Characters can be split over
    tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    """Random, float32; its laws are spread but not flat."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.35,
    }
    config = LlamaConfig(**{**sizes, **more})
    return LlamaForCausalLM(config).eval()


def relative(model: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """A draft model that agrees with `model` about half of the time: its weights with noise on
    them.
    """
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
        vocab_size=len(tokenizer()),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.35,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
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


def key_types(value: Any) -> tuple[Any, ...]:
    """The type of a value in a header; of a list that of its parts besides."""
    import gguf as lib

    found = lib.GGUFValueType.get_type(value)
    return (found, key_types(value[0])[0]) if isinstance(value, list) else (found,)


def write_tokenizer(writer: Any, words: str = "gpt-2") -> None:
    """This tokenizer in the fields of a .gguf file; `words`: see `gguf`."""
    import gguf as lib

    coder = tokenizer()
    texts = {i: t for t, i in coder.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list([texts[i] for i in range(len(texts))])
    writer.add_token_types(
        [lib.TokenType.CONTROL if i == 0 else lib.TokenType.NORMAL for i in range(len(texts))]
    )
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(coder.backend_tokenizer.to_str())["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def gguf(
    model: PreTrainedModel,
    path: Path,
    template: str | None = None,
    words: str = "gpt-2",
    kind: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """The same weights and this tokenizer in a .gguf file. Llama, Qwen2 or Qwen3.

    `words`: the rule by which the file says that texts are split before the merges. `kind`: the
    format of its matrices. `keys`: of its header, in place of the usual ones or beside them, None:
    it lacks that one. `tensors`: more of them. `without`: ends of the names of those it lacks.
    """
    import gguf as lib

    config = model.config
    writer = lib.GGUFWriter(path, config.model_type)
    writer.add_file_type(lib.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    write_tokenizer(writer, words)
    if template:
        writer.add_chat_template(template)
    names = lib.get_tensor_name_map(
        getattr(lib.MODEL_ARCH, config.model_type.upper()), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            # Its rotation takes neighbours for a pair, transformers' takes halves.
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            data = (
                data.reshape(heads, 2, len(data) // heads // 2, -1)
                .swapaxes(1, 2)
                .reshape(data.shape)
            )
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        if found.endswith(tuple(without)):
            continue
        data = np.ascontiguousarray(data)
        if data.ndim > 1 and kind != "F32":
            form = lib.GGMLQuantizationType[kind]
            writer.add_tensor(found, lib.quantize(data, form), raw_dtype=form)
        else:
            writer.add_tensor(found, data)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, *key_types(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Tiny random encoder-decoders of transformers, large enough in their weights that greedy texts
vary and depend on their source.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from tests import tiny

VOCAB = len(tiny.tokenizer())  # so that the same tokenizer goes with them
CONTEXT = 64
WINDOW = 6
HALVES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
MODULE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 11,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 3,  # as many as the decoder has: transformers' own cache needs that
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 1,
        "pad_token_id": 1,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
    "bart": {**HALVES, "scale_embedding": True},
    "marian": {**HALVES, "scale_embedding": True, "decoder_vocab_size": VOCAB, "d_model": 48},
    "pegasus": {**HALVES, "scale_embedding": True},
    "t5gemma": {
        "encoder": MODULE,
        "decoder": {**MODULE, "num_hidden_layers": 3},
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    },
    # of the same builds as these
    "mt5": {},
    "mbart": {**HALVES, "scale_embedding": False},
    "blenderbot": {**HALVES},
}
FAMILIES["mt5"] = {**FAMILIES["t5"], "feed_forward_proj": "relu"}


def seq2seq(
    family: str, noise: float = 0.0, dtype: torch.dtype = torch.float32, **more: Any
) -> PreTrainedModel:
    """The same model every time; with `noise`, a relative that agrees with it in part."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, HALVES), **more})
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    weights, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:  # fixed positions
                continue
            drawn = torch.randn(p.shape, generator=weights)
            drawn += noise * torch.randn(p.shape, generator=other)
            scale = 1.0 if "relative_attention_bias" in name else 0.3
            if "self_attn" in name or "SelfAttention" in name:
                scale *= 2  # or texts would hardly vary
            if family in ("bart", "marian") and ("fc2" in name or "encoder_attn.out" in name):
                scale *= 0.4  # which are normed after they were added
            p.copy_(scale * drawn if p.ndim > 1 else p.nan_to_num(0.0) + 0.1 * drawn)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(0.2 * torch.randn(1, VOCAB, generator=weights))
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    if settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = 2
    return model.to(dtype)

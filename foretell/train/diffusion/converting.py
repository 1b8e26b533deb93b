"""Models that wrote from left to right, made to fill canvases: a mask, and fewer layers if wanted.

Sources: Ye et al., Dream 7B (arXiv 2508.15487), section 3; Gong et al., Scaling Diffusion Language
Models via Adaptation from Autoregressive Models (arXiv 2410.17891), section 3.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.errors import BadConfig
from foretell.models.decoder.learning import copy_modules
from foretell.train.diffusion.masking import Reader

if TYPE_CHECKING:
    from foretell.api.lm import LM

MASK_TOKEN = "<|mask|>"


def convert_model(lm: LM, block: int) -> tuple[Reader, Any]:
    """A copy of a model that writes from left to right as one that fills canvases, and of its
    tokenizer, which gets a mask. Its row is the mean of the others. One that fills canvases stays
    as it is.
    """
    target: Any = lm.models["target"]
    if "canvas" in target.caps:
        reader_options = target.mask_id, target.shift, target.block, target.longest_canvas
        return Reader(copy_modules(target), *reader_options), lm.tokenizer
    if lm.tokenizer is None:
        raise BadConfig(f"{target.name}: has no tokenizer, which is to get a mask; use another")
    hf, tokenizer = copy_modules(target), copy.deepcopy(lm.tokenizer)
    if tokenizer.mask_token_id is None and MASK_TOKEN in tokenizer.get_vocab():
        tokenizer.mask_token = MASK_TOKEN
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        mask_id = max(hf.config.vocab_size, len(tokenizer))
        missing = mask_id - len(tokenizer)
        tokenizer.add_tokens([f"<|unused {i}|>" for i in range(missing)])
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
        assert tokenizer.mask_token_id == mask_id, "it follows all others"
    vocab_rows = len(hf.get_input_embeddings().weight)
    with torch.no_grad():
        means = [table.weight.mean(0) for table in tables_of(hf)]
        if mask_id >= vocab_rows:
            hf.resize_token_embeddings(mask_id + 1, mean_resizing=False)
        for table, mean in zip(tables_of(hf), means, strict=True):
            table.weight[vocab_rows:] = mean
            table.weight[mask_id] = mean
    return Reader(hf, mask_id, 1, block), tokenizer


def shorten_model(hf: Any, count: int) -> None:
    """Takes layers out of a model until `count` are left, at even distances, the first and the last
    among them. Raises BadConfig.
    """
    layers = hf.get_decoder().layers
    if count > len(layers):
        raise BadConfig.field("cut", count, f"at most {len(layers)}, the model's layers")
    places = np.linspace(0, len(layers) - 1, count).round().astype(int).tolist()
    hf.get_decoder().layers = torch.nn.ModuleList(layers[place] for place in places)
    for number, place in enumerate(places):
        layers[place].self_attn.layer_idx = number
    hf.config.num_hidden_layers = count
    kinds = getattr(hf.config, "layer_types", None)
    if kinds is not None:
        hf.config.layer_types = [kinds[place] for place in places]


def tables_of(hf: Any) -> tuple[Any, Any]:
    """The embeddings and the output matrix, which may be the same."""
    return hf.get_input_embeddings(), hf.get_output_embeddings()

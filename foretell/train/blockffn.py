"""Trains a small language model whose feed-forward layers are blocks: `foretell train blockffn`.

Two losses beside that of the text let neighbouring tokens activate the same few blocks
(ops/expert_blocks.py): locality, between adjacent tokens, and chunk sparsity, over chunks of
tokens, whose weight follows the loss. With both weights 0 the same model is trained without them,
to compare with. The report has the loss of texts held out, and the share of blocks that a token,
and that groups of successive tokens, leave alone.

Source: Song et al., "BlockFFN: Towards End-Side Acceleration-Friendly Mixture-of-Experts with
Chunk-Level Activation Sparsity" (arXiv 2507.08771), and its published code.
Differs: the model is a small one of the llama family's build, trained with the optimisers and the
schedule of `foretell train lm`; the window by which the weight adapts is chosen for short runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from foretell.errors import BadConfig
from foretell.models.decoder.blockffn import BlockFFNConfig, BlockFFNForCausalLM, watch_routers
from foretell.ops.expert_blocks import AdaptiveWeight, block_sparsity, chunk_loss, locality_loss
from foretell.ops.files import write_text
from foretell.train.corpus import prepare_corpus
from foretell.train.lm import Run, check_heads, export_model, text_loss

GROUPS = (1, 2, 4, 8, 16, 32, 64)  # successive tokens whose union is reported


@dataclass(frozen=True)
class TrainBlockFFN:
    """Shape of the model and of the run. Lengths are in tokens."""

    hidden: int = 192  # width of the hidden state
    layers: int = 4  # layers of the model
    heads: int = 6  # attention heads
    kv_heads: int = 2  # heads of keys and values
    blocks: int = 32  # of a feed-forward layer
    width: int = 24  # inside of a block
    locality_weight: float = 0.002  # of the loss between adjacent tokens; 0: without it
    steepness: float = 100.0  # by which routers' logits are multiplied in it
    chunk_weight: float = 0.05  # of the loss over chunks at first; 0: without it
    chunk: int = 64  # tokens of one
    adapt: int = 50  # steps of a window by which that weight follows its loss
    vocab_size: int = 4096  # tokens of the tokenizer that is trained
    context: int = 256  # tokens of a text
    tokens: int = 4_000_000  # training tokens in all
    batch: int = 8_192  # tokens a step
    micro: int = 2_048  # tokens a forward
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of embeddings, norms and the rest (AdamW)
    warmup: int = 20  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    windows: int = 64  # held-out texts by which the model is measured
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        check_heads(self.hidden, self.heads, self.kv_heads)
        for name in ("layers", "blocks", "width", "adapt", "windows", "warmup", "chunk"):
            if getattr(self, name) < 1:
                raise BadConfig.field(name, getattr(self, name), "1 or more")
        for name in ("locality_weight", "chunk_weight", "steepness"):
            if getattr(self, name) < 0:
                raise BadConfig.field(name, getattr(self, name), "0 or more")
        sizes = (self.batch, self.micro, self.context, self.chunk)
        if any(size % part for size, part in pairwise(sizes)):
            raise BadConfig(
                "batch must be a multiple of micro, micro of context, and context of chunk"
            )

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    # What Run.advance reads: all texts are of one length.
    long_share = 0.0

    @property
    def short_context(self) -> int:
        return self.context


def build_blockffn(config: TrainBlockFFN, end: int) -> BlockFFNForCausalLM:
    """A random model with tied embeddings, float32."""
    torch.manual_seed(config.seed)
    return BlockFFNForCausalLM(
        BlockFFNConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.blocks * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            num_blocks=config.blocks,
            block_width=config.width,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end + 1,
        )
    )


class BlocksRun(Run):
    """A run folder of such a model. The weight of the chunk loss is a part of its state."""

    def __init__(self, folder: Path, config: TrainBlockFFN, model: Any, layers: Any):
        self.weight = AdaptiveWeight(config.chunk_weight, config.adapt)
        self.chunks: list[float] = []  # losses of the running step
        super().__init__(folder, config, model, layers)

    def loss(self, model: Any, teacher: Any, ids: torch.Tensor) -> torch.Tensor:
        """Loss of ids (B, context + 1): the text's, and the means over layers of the others."""
        c = self.config
        with watch_routers() as router_logits:
            total = text_loss(model, teacher, ids)
        if c.locality_weight:
            parts = [locality_loss(logits, c.steepness) for logits in router_logits]
            total = total + c.locality_weight * torch.stack(parts).mean()
        if c.chunk_weight:
            chunk = torch.stack([chunk_loss(logits, c.chunk) for logits in router_logits]).mean()
            total = total + self.weight.value * chunk
            self.chunks.append(float(chunk.detach()))
        return total

    def update(self) -> None:
        super().update()
        if self.chunks:
            self.weight.note_loss(float(np.mean(self.chunks)))
            self.chunks = []

    def extra_state(self) -> dict[str, torch.Tensor]:
        return {"chunk_weight": self.weight.state}

    def take_extra(self, extra: dict[str, torch.Tensor]) -> None:
        self.weight.state = extra["chunk_weight"]


@torch.no_grad()
def measure_texts(model: Any, texts: torch.Tensor) -> dict[str, Any]:
    """Measures texts (n, length + 1): nats a token, perplexity, and the shares of blocks that a
    token, or a group of successive ones, does not activate, on the mean of all layers.
    """
    text_nats: list[float] = []
    shares: dict[int, list[float]] = {size: [] for size in GROUPS if size < texts.shape[1]}
    for text in texts:
        with watch_routers() as router_logits:
            rows = model(input_ids=text[None, :-1]).logits[0]
        text_nats.append(float(F.cross_entropy(rows.float(), text[1:])))
        for size, size_shares in shares.items():
            size_shares.append(
                float(np.mean([block_sparsity(logits[0] > 0, size) for logits in router_logits]))
            )
    mean = float(np.mean(text_nats))
    return {
        "loss": round(mean, 5),
        "perplexity": round(math.exp(mean), 4),
        "sparsity": {
            str(size): round(float(np.mean(size_shares)), 4) for size, size_shares in shares.items()
        },
    }


def train_blockffn(
    corpus: Path,
    out: Path,
    config: TrainBlockFFN,
    sources: list[str],
    save_every: float = 300.0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen, saving every `save_every` seconds; writes OUT/model
    and OUT/report.json, and returns the report. Raises BadConfig.
    """
    corpus_record = prepare_corpus(corpus, sources, config.vocab_size)
    heldout_tokens = np.fromfile(corpus / "heldout.bin", dtype=np.uint16).astype(np.int64)
    window_size = config.context + 1
    if len(heldout_tokens) < window_size:
        raise BadConfig(
            f"the texts are too few: {len(heldout_tokens)} tokens are held out, and context="
            f"{config.context} needs one more than that; give more"
        )
    out.mkdir(parents=True, exist_ok=True)
    train_tokens = np.memmap(corpus / "train.bin", dtype=np.uint16, mode="r")
    model = build_blockffn(config, end=0)
    run = BlocksRun(out, config, model, model.model.layers)
    run.run_steps(lambda: run.advance(train_tokens, None, run.loss), save_every, quiet)
    model.eval()
    export_model(model, corpus, out / "model")
    texts = torch.from_numpy(
        heldout_tokens[: len(heldout_tokens) // window_size * window_size]
    ).view(-1, window_size)
    window_numbers = np.linspace(0, len(texts) - 1, min(config.windows, len(texts))).astype(int)
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "heldout": measure_texts(model, texts[window_numbers]),
        "chunk_weight": round(run.weight.value, 6),
        "corpus": corpus_record,
        "settings": asdict(config),
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

"""Trains a small PLDR-LLM on text, and freezes the metric of its attention: `foretell train pldr`.

In training the metric of every layer and head is inferred of each window as a whole, so that a row
knows something of later tokens. What that is worth, and what is left of it after a cached metric,
is measured on windows held out, over their second halves:

    whole    the metric is the window's own: later tokens are seen through it
    cached   it is that of the window's first half, as of a prompt
    frozen   it is that of one text held out, for all windows: OUT/frozen, an ordinary decoder

Settings of the optimiser are the paper's: AdamW, a warm-up and a cosine to a tenth of the rate.
With `metric` identity or random there is no net, and the model learns around that metric.

Source: Gokden, "PLDR-LLMs Learn A Generalizable Tensor Operator That Can Replace Its Own Deep
Neural Net At Inference" (arXiv 2502.13502), sections on training and ablations.
Differs: the sizes are small ones; texts are windows of one length, drawn at random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from foretell.errors import BadConfig
from foretell.models.decoder.pldr_model import (
    PldrConfig,
    PldrForCausalLM,
    fixed_metrics,
    freeze_metrics,
    infer_metrics,
    metrics_from,
)
from foretell.ops.files import write_text
from foretell.ops.power_law import metric_spread
from foretell.train.corpus import prepare_corpus
from foretell.train.lm import Run, bits_per_byte, export_model

KINDS = {"net": None, "identity": "identity", "random": "random"}  # to custom_G_type
LEAST = 0.1  # of the learning rate that the cosine ends at


@dataclass(frozen=True)
class TrainPLDR:
    """Shape of the model and of the run. Lengths are in tokens."""

    layers: int = 4  # layers of the model
    heads: int = 4  # attention heads
    width: int = 32  # of a head; the hidden state is as wide as all heads
    units: int = 8  # residual units of a layer's net
    inner: int = 85  # width inside of their gated linear layers
    metric: str = "net"  # where it comes from: net, or without one identity or random
    vocab_size: int = 4096  # tokens of the tokenizer that is trained
    context: int = 256  # tokens of a text
    tokens: int = 4_000_000  # training tokens in all
    batch: int = 8_192  # tokens a step
    micro: int = 2_048  # tokens a forward
    rate: float = 0.001  # learning rate (AdamW)
    warmup: int = 50  # steps over which it rises
    windows: int = 64  # held-out texts by which the metric is measured
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        if self.metric not in KINDS:
            raise BadConfig.field("metric", self.metric, f"one of {', '.join(KINDS)}")
        for name in ("layers", "heads", "units", "inner", "windows", "warmup"):
            if getattr(self, name) < 1:
                raise BadConfig.field(name, getattr(self, name), "1 or more")
        if self.width < 2 or self.width % 2:
            raise BadConfig.field("width", self.width, "an even number")
        if self.batch % self.micro or self.micro % self.context or self.context < 4:
            raise BadConfig("batch must be a multiple of micro, micro of context, of 4 or more")

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    # What Run.advance reads: all texts are of one length.
    long_share = 0.0

    @property
    def short_context(self) -> int:
        return self.context


def build_pldr(config: TrainPLDR, end: int) -> PldrForCausalLM:
    """A random model, float32."""
    torch.manual_seed(config.seed)
    hidden = config.heads * config.width
    return PldrForCausalLM(
        PldrConfig(
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            head_dim=config.width,
            max_position_embeddings=config.context,
            num_reslayerA=config.units,
            A_dff=config.inner,
            custom_G_type=KINDS[config.metric],
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end + 1,
        )
    )


class PldrRun(Run):
    """A run folder of such a model: all of it is trained with AdamW."""

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        rate = self.config.rate
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
        return [(torch.optim.AdamW(self.model.parameters(), lr=rate, **settings), rate)]

    def share(self) -> float:
        """Share of the learning rate: a rise over the warm-up, then a cosine from 1 to LEAST."""
        c = self.config
        if self.step < c.warmup:
            return float((self.step + 1) / c.warmup)
        progress = (self.step - c.warmup) / max(1, c.steps - c.warmup)
        return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@torch.no_grad()
def second_half_loss(model: Any, ids: torch.Tensor, metrics: torch.Tensor | None = None) -> float:
    """Nats a token of the second half of a text `ids` (n,), under its own metric or these."""
    half = len(ids) // 2
    if metrics is None:
        rows = model(input_ids=ids[None, :-1]).logits[0]
    else:
        with metrics_from(fixed_metrics(metrics)):
            rows = model(input_ids=ids[None, :-1]).logits[0]
    return float(F.cross_entropy(rows[half - 1 :], ids[half:]))


def measure_metrics(
    model: Any, texts: Sequence[torch.Tensor], frozen_metric: torch.Tensor
) -> dict[str, Any]:
    """Losses of these texts under metrics that are their own, of their first halves, and
    `frozen_metric`; how far the metrics of the texts, and of a text and its first half, are from
    each other.
    """
    text_metrics = [infer_metrics(model, text) for text in texts]
    half_metrics = [infer_metrics(model, text[: len(text) // 2]) for text in texts]
    losses = {
        "whole": [second_half_loss(model, text) for text in texts],
        "cached": [
            second_half_loss(model, text, half_metric)
            for text, half_metric in zip(texts, half_metrics, strict=True)
        ],
        "frozen": [second_half_loss(model, text, frozen_metric) for text in texts],
    }
    return {
        "loss": {name: round(float(np.mean(values)), 5) for name, values in losses.items()},
        "between_texts": metric_spread(text_metrics),
        "of_halves": max(
            metric_spread(pair)["rmse"]
            for pair in map(list, zip(text_metrics, half_metrics, strict=True))
        ),
    }


def train_pldr(
    corpus: Path,
    out: Path,
    config: TrainPLDR,
    sources: list[str],
    save_every: float = 300.0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen, saving every `save_every` seconds; writes OUT/model,
    with nets also OUT/frozen, and OUT/report.json, and returns the report. Raises BadConfig.
    """
    corpus_record = prepare_corpus(corpus, sources, config.vocab_size)
    heldout_tokens = np.fromfile(corpus / "heldout.bin", dtype=np.uint16).astype(np.int64)
    if len(heldout_tokens) < 2 * config.context:
        raise BadConfig(
            f"the texts are too few: {len(heldout_tokens)} tokens are held out, and context="
            f"{config.context} needs twice as many; give more"
        )
    out.mkdir(parents=True, exist_ok=True)
    train_tokens = np.memmap(corpus / "train.bin", dtype=np.uint16, mode="r")
    model = build_pldr(config, end=0)
    run = PldrRun(out, config, model, model.decoder.dec_layers)
    run.run_steps(lambda: run.advance(train_tokens, None), save_every, quiet)
    model.eval()
    export_model(model, corpus, out / "model", torch.float32)
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "corpus": corpus_record,
        "settings": asdict(config),
    }
    measured_model: Any = model
    if config.metric == "net":
        heldout_windows = torch.from_numpy(
            heldout_tokens[: len(heldout_tokens) // config.context * config.context]
        )
        first_text, *texts = heldout_windows.view(-1, config.context)
        frozen_metric = infer_metrics(model, first_text)
        report["metric"] = measure_metrics(model, texts[: config.windows], frozen_metric)
        measured_model = freeze_metrics(model, frozen_metric)
        export_model(measured_model, corpus, out / "frozen", torch.float32)
    # Only a metric that no text changes gives rows that know nothing of later tokens.
    report["heldout_bits_per_byte"] = bits_per_byte(measured_model, corpus, config.context)
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

"""Trains an encoder that makes a few rows of a context: `foretell train compressor`.

The encoder begins as a copy of the layers of the decoder, the target. Of a text the first part is
the context; the decoder reads its rows, and what the encoder learns by is the surprise at the rest
of the text. Kind `arc-encoder` reads some contexts to repeat them, and its decoder stays as it is.
Kind `lclm` has three stages: its adapter learns alone, then the encoder with it, and in the end,
where `whole` says so, the decoder too, which is then another model.

Sources: Pilchen et al., ARC-Encoder (arXiv 2510.20535), section 3; LCLM, github.com/LeonLixyz/LCLM.
Differs: few steps at higher rates, so that a CPU does it in at most two hours, where the papers
read billions of tokens. The projection of kind `arc-encoder` begins as the one that best gives the
mean embedding of the tokens that a row stands for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from foretell.drafters.heads.networks.folder import target_shape
from foretell.errors import BadConfig
from foretell.kv.encoded.encoders import (
    KINDS,
    ArcEncoder,
    Compressor,
    CompressorShape,
    average_groups,
    body_from,
    compressor_of,
    save_compressor,
)
from foretell.loading.wrap import wrap
from foretell.models.decoder.learning import copy_modules
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.lm import Run

if TYPE_CHECKING:
    from foretell.api.lm import LM

HELD_OUT = 16  # every so many documents one is kept from training
EACH = 32  # texts of one document at most
DECAYS = {"arc-encoder": 0.1, "lclm": 0.01}  # of weights
UNREAD = {"arc-encoder": 2, "lclm": 0}  # last layers of the target that the encoder lacks
BEGIN = 64  # texts by which the projection begins


@dataclass(frozen=True)
class TrainCompressor:
    """Shape of the encoder and of the run. Lengths are in tokens."""

    kind: str = "arc-encoder"  # arc-encoder or lclm
    ratio: int = 4  # tokens that one row stands for
    layers: int = 0  # of the target, a copy of which the encoder begins as; 0: all, or all but two
    width: int = 0  # between the matrices of arc-encoder's projection; 0: 2/3 of the target's
    window: int = 1024  # tokens that lclm encodes together, a multiple of ratio
    length: int = 256  # tokens of a context
    following: int = 128  # of the text after it
    repeat: float = 0.2  # share of the contexts that arc-encoder is to repeat
    alone: float = 0.25  # share of the steps in which lclm's adapter alone learns
    whole: float = 0.0  # share of the steps, the last ones, in which lclm's decoder learns too
    texts: int = 8_000  # that are learnt from in all
    batch: int = 8  # texts a step
    micro: int = 2  # texts a forward
    rate: float = 0.0001  # learning rate of the encoder (AdamW)
    outer_rate: float = 0.0005  # of what follows it
    target_rate: float = 0.00001  # of the decoder, where it learns
    warmup: int = 20  # steps over which it rises
    decay: float = 0.5  # share of the run over which it falls to 0
    held: int = 64  # texts that are held out, by which bits are measured
    seed: int = 0  # of the choice of texts

    def __post_init__(self) -> None:
        size = recipes.SIZE
        names = ("ratio", "window", "texts", "batch", "micro", "warmup", "held")
        ranges = {**dict.fromkeys(names, size), "layers": (0, 1 << 20), "width": (0, 1 << 20)}
        ranges |= {"length": (2, 1 << 20), "following": (2, 1 << 20)}
        ranges |= dict.fromkeys(("repeat", "alone", "whole", "decay"), (0, 1))
        ranges |= dict.fromkeys(("rate", "outer_rate", "target_rate"), recipes.RATE)
        recipes.check_ranges(self, {**ranges, "seed": recipes.OF_RUNS["seed"]})
        if self.kind not in KINDS:
            raise BadConfig.field("kind", self.kind, f"one of {', '.join(sorted(KINDS))}")
        if self.whole and self.kind != "lclm":
            raise BadConfig.field("whole", self.whole, "0: the decoder of arc-encoder never learns")
        if self.window % self.ratio:
            raise BadConfig.field("window", self.window, f"a multiple of ratio={self.ratio}")
        if self.batch % self.micro:
            raise BadConfig.field("batch", self.batch, f"a multiple of micro={self.micro}")

    @property
    def steps(self) -> int:
        return max(1, self.texts // self.batch)

    @property
    def adapter_steps(self) -> int:
        """Steps in which the encoder does not learn."""
        return round(self.alone * self.steps) if self.kind == "lclm" else 0

    @property
    def fixed_steps(self) -> int:
        """Steps before the decoder learns too."""
        return self.steps - round(self.whole * self.steps)


def shape_of(target: Any, config: TrainCompressor) -> tuple[CompressorShape, Any]:
    """The shape of a new compressor, and its body. Raises BadConfig, Unsupported."""
    target_shape_of = target_shape(target, "train compressor")
    usual_layers = max(1, target_shape_of.layers - UNREAD[config.kind])
    if config.layers > target_shape_of.layers:
        raise BadConfig.field(
            "layers", config.layers, f"at most {target_shape_of.layers}, the target's"
        )
    if config.length + config.following > target.context:
        allowed_values = (
            f"at most {target.context - config.following:,}, for the target's positions"
        )
        raise BadConfig.field("length", config.length, allowed_values)
    body, body_shape = body_from(target, config.layers or usual_layers)
    arc = config.kind == "arc-encoder"
    return CompressorShape(
        config.kind,
        config.ratio,
        target_shape_of.hidden,
        (config.width or max(1, 2 * target_shape_of.hidden // 3))
        if arc
        else target_shape_of.hidden,
        window=0 if arc else min(config.window, target.context // config.ratio * config.ratio),
        scale=target.loop.scale,
        body=body_shape,
    ), body


@dataclass
class Texts:
    """Token ids (texts, length + following), of those learnt from and of those held out."""

    learnt: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of(cls, lm: LM, documents: Iterable[str], config: TrainCompressor) -> Texts:
        """Cuts texts from documents. Raises BadConfig where there are too few."""
        all_texts = [text for text in documents if text.strip()]
        order = np.random.default_rng(config.seed).permutation(len(all_texts))
        size = config.length + config.following
        tensors = []
        for is_held_out, wanted_count in ((False, config.texts), (True, config.held)):
            pieces: list[list[int]] = []
            for place, index in enumerate(order):
                if (place % HELD_OUT == 0) != is_held_out or len(pieces) >= wanted_count:
                    continue
                # No more of it is coded than is read.
                text = all_texts[index][: EACH * size * 8]
                tokens = lm.encode(text, special=False)
                text_share = min(EACH, len(tokens) // size, wanted_count - len(pieces))
                pieces += [tokens[i * size : (i + 1) * size] for i in range(text_share)]
            if not pieces:
                purpose = "held out" if is_held_out else "to learn from"
                raise BadConfig(
                    f"the texts are too few: none {purpose} has length + following = {size} tokens "
                    f"(one of {HELD_OUT} documents is held out); give more or longer documents"
                )
            tensors.append(torch.tensor(pieces))
        return cls(*tensors)

    def batch(self, step: int, part: int, config: TrainCompressor) -> torch.Tensor:
        """Texts of a forward, each of which comes as often as the others do."""
        first_number = step * config.batch + part * config.micro
        text_numbers = []
        for number in range(first_number, first_number + config.micro):
            round_number, text_place = divmod(number, len(self.learnt))
            order = np.random.default_rng((config.seed, round_number)).permutation(len(self.learnt))
            text_numbers.append(int(order[text_place]))
        return self.learnt[text_numbers]


# --- what is learnt


def logits_behind(
    hf: Any, rows: torch.Tensor, goal_tokens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Logits (B, n, V) at each of the tokens (B, n) that a decoder reads after rows (B, m, E)."""
    embedded = hf.get_input_embeddings()(goal_tokens[:, :-1])
    all_inputs = torch.cat([(rows / scale).to(embedded), embedded], 1)
    out: torch.Tensor = hf(
        inputs_embeds=all_inputs, use_cache=False, logits_to_keep=goal_tokens.shape[1]
    ).logits
    return out


def compressor_loss(
    hf: Any, compressor: Compressor, ids: torch.Tensor, length: int, repeat: bool
) -> torch.Tensor:
    """The surprise (nats a token) at the text after contexts of this length, or at them."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        rows = compressor(ids[:, :length], repeat)
        goal = ids[:, :length] if repeat else ids[:, length:]
        logits = logits_behind(hf, rows, goal, compressor.shape.scale)
    return F.cross_entropy(logits.flatten(0, 1).float(), goal.flatten())


class Both(torch.nn.Module):
    """An encoder and the decoder that reads its rows."""

    def __init__(self, compressor: Compressor, hf: Any):
        super().__init__()
        self.compressor = compressor
        self.hf = hf


class CompressorRun(Run):
    """A run folder of a compressor, and of the decoder `hf` where it learns."""

    longer = "texts"
    unit = "texts"

    def __init__(self, folder: Path, config: TrainCompressor, compressor: Compressor, hf: Any):
        self.compressor, self.hf = compressor, hf
        hf.requires_grad_(config.whole > 0)
        super().__init__(folder, config, Both(compressor, hf), compressor.body)

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        c = self.config
        inner_ids = {id(p) for p in layers.parameters()}
        outer_weights = [p for p in self.compressor.parameters() if id(p) not in inner_ids]
        parts = [([*layers.parameters()], c.rate), (outer_weights, c.outer_rate)]
        if c.whole:
            parts.append(([*self.hf.parameters()], c.target_rate))
        decay = DECAYS[c.kind]
        return [
            (torch.optim.AdamW(part, lr=rate, betas=(0.9, 0.95), weight_decay=decay), rate)
            for part, rate in parts
        ]

    def learn(self, texts: Texts) -> float:
        """Takes an optimiser step; returns its mean loss."""
        c = self.config
        generator = np.random.default_rng((c.seed, self.step, 1))
        micro_count = c.batch // c.micro
        loss_sum = 0.0
        for micro_number in range(micro_count):
            repeat = c.kind == "arc-encoder" and generator.random() < c.repeat
            ids = texts.batch(self.step, micro_number, c).to(self.hf.device)
            self.compressor.body.requires_grad_(self.step >= c.adapter_steps)
            self.hf.requires_grad_(self.step >= c.fixed_steps)
            loss = compressor_loss(self.hf, self.compressor, ids, c.length, repeat) / micro_count
            loss.backward()  # type: ignore[no-untyped-call]
            # All that ever learns is saved, whether it does yet or not.
            self.compressor.body.requires_grad_(True)
            self.hf.requires_grad_(c.whole > 0)
            loss_sum += loss.item()
        self.update()
        return loss_sum


@torch.no_grad()
def begin_weights(compressor: Compressor, table: torch.Tensor, texts: torch.Tensor) -> None:
    """Sets the first weights of what follows the encoder, by the decoder's embeddings (V, E)
    and texts (n, length) of tokens. Marks begin as the texts' mean embedding.
    """
    texts = texts.to(table.device)
    mean_embedding = table[texts.flatten()].mean(0)
    for name, weight in compressor.named_parameters(recurse=False):
        assert weight.shape == mean_embedding.shape, f"{name} is no row"
        weight.copy_(mean_embedding)
    if not isinstance(compressor, ArcEncoder):
        return
    row_states, row_means = [], []
    for row in texts:
        with torch.autocast(row.device.type, dtype=torch.bfloat16):
            row_states.append(compressor.encode_ids(row[None])[0].float())
        row_places = compressor.row_places(len(row)).to(row.device)
        row_means.append(average_groups(table[row][None], row_places)[0])
    x, y = torch.cat(row_states).double(), torch.cat(row_means).double()
    products = x.T @ x
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(products)).to(x)
    full_projection = torch.linalg.solve(products, x.T @ y)
    # Of all projections over so few numbers the one that comes nearest to it.
    directions = torch.linalg.svd(x @ full_projection, full_matrices=False).Vh[
        : compressor.shape.width
    ]
    wide_weight = compressor.wide.weight.new_zeros(compressor.wide.weight.shape)
    wide_weight[:, : len(directions)] = directions.T.to(wide_weight)
    narrow_weight = compressor.narrow.weight.new_zeros(compressor.narrow.weight.shape)
    narrow_weight[: len(directions)] = (full_projection @ directions.T).T.to(narrow_weight)
    compressor.wide.weight.copy_(wide_weight)
    compressor.narrow.weight.copy_(narrow_weight)


# --- what it is worth


@torch.no_grad()
def context_bits(
    lm: LM, hf: Any, compressor: Compressor, texts: torch.Tensor, length: int
) -> dict[str, float]:
    """Bits a byte of what follows contexts of this length, all of it but its first token, if the
    decoder has read: all of the context (`full`), nothing (`none`), as many of its last tokens as
    it has rows (`raw`), its rows (`compressed`), and the rows of another text (`another`): what
    rows save without a word of the context, since they have learnt what such texts are like.
    """
    row_count = min(length, compressor.row_count(length))
    nats = dict.fromkeys(("full", "none", "raw", "compressed", "another"), 0.0)
    byte_count = 0
    for number, text in enumerate(texts):
        ids, other_ids = text[None].to(hf.device), texts[number - 1][None].to(hf.device)
        goal_tokens = ids[:, length:]
        byte_count += len(lm.decode(goal_tokens[0, 1:].tolist()).encode())
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            rows = compressor(ids[:, :length])
            read_lengths = {"full": length, "none": 0, "raw": row_count}
            logits_by_name = {
                name: hf(
                    input_ids=ids[:, length - prefix_length : -1],
                    use_cache=False,
                    logits_to_keep=goal_tokens.shape[1] - 1,
                ).logits
                for name, prefix_length in read_lengths.items()
            }
            for name, read_rows in (
                ("compressed", rows),
                ("another", compressor(other_ids[:, :length])),
            ):
                logits_by_name[name] = logits_behind(
                    hf, read_rows, goal_tokens, compressor.shape.scale
                )[:, 1:]
        for name, logits in logits_by_name.items():
            loss = F.cross_entropy(logits[0].float(), goal_tokens[0, 1:], reduction="sum")
            nats[name] += float(loss)
    return {
        name: round(value / math.log(2) / max(1, byte_count), 4) for name, value in nats.items()
    }


def share_won(bits_by_name: dict[str, float]) -> float:
    """The share of the bits that a full context saves which its rows save too."""
    saved_bits = bits_by_name["none"] - bits_by_name["full"]
    return (
        round((bits_by_name["none"] - bits_by_name["compressed"]) / saved_bits, 3)
        if saved_bits
        else 0.0
    )


def own_share(bits_by_name: dict[str, float]) -> float:
    """The part of that share which rows of another text do not save."""
    saved_bits = bits_by_name["none"] - bits_by_name["full"]
    return (
        round((bits_by_name["another"] - bits_by_name["compressed"]) / saved_bits, 3)
        if saved_bits
        else 0.0
    )


def measure_compressor(lm: LM, kind: str, folder: Path, texts: Sequence[str], length: int,
                       following: int, max_texts: int) -> dict[str, Any]:  # fmt: skip
    """Bits of a trained compressor over `max_texts` texts at most. Raises BadConfig, BadModel."""
    target: Any = lm.models["target"]
    compressor = compressor_of(target, "compressor", kind, str(folder)).float()
    size = length + following
    pieces: list[list[int]] = []
    for text in texts:
        tokens = lm.encode(text[: size * 16], special=False)[:size]
        pieces += [tokens] if len(tokens) == size and len(pieces) < max_texts else []
    if not pieces:
        raise BadConfig(f"no text has {size} tokens; give longer ones, or a shorter length")
    hf = copy_modules(target).requires_grad_(False)
    bits_by_name = context_bits(lm, hf, compressor, torch.tensor(pieces), length)
    shares = {"won": share_won(bits_by_name), "own": own_share(bits_by_name)}
    return {"texts": len(pieces), "rows": compressor.row_count(length), **bits_by_name, **shares}


def export_decoder(hf: Any, lm: LM, folder: Path) -> Any:
    """Writes a decoder that has learnt, in bfloat16, with the tokenizer of the one that it was; the
    model that the folder is.
    """
    hf.bfloat16().save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)
    return wrap(hf, lm.tokenizer, name=str(folder)).models["target"]


def train_compressor(
    lm: LM,
    documents: Iterable[str],
    out: Path,
    config: TrainCompressor,
    save_every: float = 300.0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains until `config.texts` are read; writes OUT/compressor and OUT/report.json, and
    OUT/model where the decoder has learnt: the encoder is for that one then. Returns the report.
    Raises BadConfig, Unsupported.
    """
    target: Any = lm.models["target"]
    shape, body = shape_of(target, config)
    texts = Texts.of(lm, documents, config)
    hf = copy_modules(target).requires_grad_(False)
    torch.manual_seed(config.seed)
    compressor = KINDS[config.kind](shape, body).to(hf.device).requires_grad_(True)
    out.mkdir(parents=True, exist_ok=True)
    run = CompressorRun(out, config, compressor, hf)
    if not run.step:
        table = hf.get_input_embeddings().weight * shape.scale
        begin_weights(compressor, table, texts.learnt[:BEGIN, : config.length])
    run.run_steps(lambda: run.learn(texts), save_every, quiet)
    bits_by_name = context_bits(lm, hf, compressor, texts.held_out, config.length)
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "texts": config.steps * config.batch,
        "rows": compressor.row_count(config.length),
        "bits_per_byte": bits_by_name,
        "won": share_won(bits_by_name),
        "own": own_share(bits_by_name),
        "settings": asdict(config),
    }
    if config.whole:
        target = export_decoder(hf, lm, out / "model")
    save_compressor(compressor, out / "compressor", target, {"texts": report["texts"]})
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

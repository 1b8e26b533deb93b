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
    body_from,
    compressor_of,
    means,
    save,
)
from foretell.loading.wrap import wrap
from foretell.models.decoder.learning import copied
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
    following: int = 128  # of the text behind it
    repeat: float = 0.2  # share of the contexts that arc-encoder is to repeat
    alone: float = 0.25  # share of the steps in which lclm's adapter alone learns
    whole: float = 0.0  # share of the steps, the last ones, in which lclm's decoder learns too
    texts: int = 8_000  # that are learnt from in all
    batch: int = 8  # texts a step
    micro: int = 2  # texts a forward
    rate: float = 0.0001  # learning rate of the encoder (AdamW)
    outer_rate: float = 0.0005  # of what stands behind it
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
        recipes.check(self, {**ranges, "seed": recipes.OF_RUNS["seed"]})
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
    def lone(self) -> int:
        """Steps in which the encoder does not learn."""
        return round(self.alone * self.steps) if self.kind == "lclm" else 0

    @property
    def together(self) -> int:
        """Steps before the decoder learns too."""
        return self.steps - round(self.whole * self.steps)


def shape_of(target: Any, config: TrainCompressor) -> tuple[CompressorShape, Any]:
    """The shape of a new compressor, and its body. Raises BadConfig, Unsupported."""
    told = target_shape(target, "train compressor")
    most = max(1, told.layers - UNREAD[config.kind])
    if config.layers > told.layers:
        raise BadConfig.field("layers", config.layers, f"at most {told.layers}, the target's")
    if config.length + config.following > target.context:
        allowed = f"at most {target.context - config.following:,}, for the target's positions"
        raise BadConfig.field("length", config.length, allowed)
    body, told_of_body = body_from(target, config.layers or most)
    arc = config.kind == "arc-encoder"
    return CompressorShape(
        config.kind,
        config.ratio,
        told.hidden,
        (config.width or max(1, 2 * told.hidden // 3)) if arc else told.hidden,
        window=0 if arc else min(config.window, target.context // config.ratio * config.ratio),
        scale=target.loop.scale,
        body=told_of_body,
    ), body


@dataclass
class Texts:
    """Token ids (texts, length + following), of those learnt from and of those held out."""

    learnt: torch.Tensor
    held: torch.Tensor

    @classmethod
    def of(cls, lm: LM, documents: Iterable[str], config: TrainCompressor) -> Texts:
        """Raises BadConfig where there are too few."""
        given = [text for text in documents if text.strip()]
        order = np.random.default_rng(config.seed).permutation(len(given))
        size = config.length + config.following
        found = []
        for held, enough in ((False, config.texts), (True, config.held)):
            pieces: list[list[int]] = []
            for place, index in enumerate(order):
                if (place % HELD_OUT == 0) != held or len(pieces) >= enough:
                    continue
                # No more of it is coded than is read.
                text = given[index][: EACH * size * 8]
                tokens = lm.encode(text, special=False)
                each = min(EACH, len(tokens) // size, enough - len(pieces))
                pieces += [tokens[i * size : (i + 1) * size] for i in range(each)]
            if not pieces:
                what = "held out" if held else "to learn from"
                raise BadConfig(
                    f"the texts are too few: none {what} has length + following = {size} tokens "
                    f"(one of {HELD_OUT} documents is held out); give more or longer documents"
                )
            found.append(torch.tensor(pieces))
        return cls(*found)

    def batch(self, step: int, part: int, config: TrainCompressor) -> torch.Tensor:
        """Those of a forward, each of which comes as often as the others do."""
        first = step * config.batch + part * config.micro
        places = []
        for number in range(first, first + config.micro):
            turn, place = divmod(number, len(self.learnt))
            order = np.random.default_rng((config.seed, turn)).permutation(len(self.learnt))
            places.append(int(order[place]))
        return self.learnt[places]


# --- what is learnt


def logits_behind(hf: Any, rows: torch.Tensor, goal: torch.Tensor, scale: float) -> torch.Tensor:
    """Of a decoder that reads rows (B, m, E) and then tokens (B, n): what it expects at each of
    these (B, n, V).
    """
    embedded = hf.get_input_embeddings()(goal[:, :-1])
    whole = torch.cat([(rows / scale).to(embedded), embedded], 1)
    out: torch.Tensor = hf(
        inputs_embeds=whole, use_cache=False, logits_to_keep=goal.shape[1]
    ).logits
    return out


def loss_of(
    hf: Any, compressor: Compressor, ids: torch.Tensor, length: int, repeat: bool
) -> torch.Tensor:
    """The surprise (nats a token) at the text behind contexts of this length, or at them."""
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

    def rated(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        c = self.config
        inner = {id(p) for p in layers.parameters()}
        outer = [p for p in self.compressor.parameters() if id(p) not in inner]
        parts = [([*layers.parameters()], c.rate), (outer, c.outer_rate)]
        if c.whole:
            parts.append(([*self.hf.parameters()], c.target_rate))
        decay = DECAYS[c.kind]
        return [
            (torch.optim.AdamW(part, lr=rate, betas=(0.9, 0.95), weight_decay=decay), rate)
            for part, rate in parts
        ]

    def learn(self, texts: Texts) -> float:
        """One step; returns its mean loss."""
        c = self.config
        random = np.random.default_rng((c.seed, self.step, 1))
        parts = c.batch // c.micro
        total = 0.0
        for part in range(parts):
            repeat = c.kind == "arc-encoder" and random.random() < c.repeat
            ids = texts.batch(self.step, part, c).to(self.hf.device)
            self.compressor.body.requires_grad_(self.step >= c.lone)
            self.hf.requires_grad_(self.step >= c.together)
            loss = loss_of(self.hf, self.compressor, ids, c.length, repeat) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            # All that ever learns is saved, whether it does yet or not.
            self.compressor.body.requires_grad_(True)
            self.hf.requires_grad_(c.whole > 0)
            total += loss.item()
        self.update()
        return total


@torch.no_grad()
def begin(compressor: Compressor, table: torch.Tensor, texts: torch.Tensor) -> None:
    """Gives what stands behind the encoder its first weights, by the decoder's embeddings (V, E)
    and texts (n, length) of tokens. Marks begin as the texts' mean embedding.
    """
    texts = texts.to(table.device)
    mean = table[texts.flatten()].mean(0)
    for name, weight in compressor.named_parameters(recurse=False):
        assert weight.shape == mean.shape, f"{name} is no row"
        weight.copy_(mean)
    if not isinstance(compressor, ArcEncoder):
        return
    states, goals = [], []
    for row in texts:
        with torch.autocast(row.device.type, dtype=torch.bfloat16):
            states.append(compressor.encoded(row[None])[0].float())
        places = compressor.places(len(row)).to(row.device)
        goals.append(means(table[row][None], places)[0])
    x, y = torch.cat(states).double(), torch.cat(goals).double()
    products = x.T @ x
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(products)).to(x)
    best = torch.linalg.solve(products, x.T @ y)
    # Of all projections over so few numbers the one that comes nearest to it.
    directions = torch.linalg.svd(x @ best, full_matrices=False).Vh[: compressor.shape.width]
    wide = compressor.wide.weight.new_zeros(compressor.wide.weight.shape)
    wide[:, : len(directions)] = directions.T.to(wide)
    narrow = compressor.narrow.weight.new_zeros(compressor.narrow.weight.shape)
    narrow[: len(directions)] = (best @ directions.T).T.to(narrow)
    compressor.wide.weight.copy_(wide)
    compressor.narrow.weight.copy_(narrow)


# --- what it is worth


@torch.no_grad()
def bits(
    lm: LM, hf: Any, compressor: Compressor, texts: torch.Tensor, length: int
) -> dict[str, float]:
    """Bits a byte of what follows contexts of this length, all of it but its first token, if the
    decoder has read: all of the context (`full`), nothing (`none`), as many of its last tokens as
    it has rows (`raw`), its rows (`compressed`), and the rows of another text (`another`): what
    rows save without a word of the context, since they have learnt what such texts are like.
    """
    count = min(length, compressor.count(length))
    nats = dict.fromkeys(("full", "none", "raw", "compressed", "another"), 0.0)
    size = 0
    for number, text in enumerate(texts):
        ids, other = text[None].to(hf.device), texts[number - 1][None].to(hf.device)
        goal = ids[:, length:]
        size += len(lm.decode(goal[0, 1:].tolist()).encode())
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            rows = compressor(ids[:, :length])
            kept = {"full": length, "none": 0, "raw": count}
            found = {
                name: hf(
                    input_ids=ids[:, length - before : -1],
                    use_cache=False,
                    logits_to_keep=goal.shape[1] - 1,
                ).logits
                for name, before in kept.items()
            }
            for name, read in (("compressed", rows), ("another", compressor(other[:, :length]))):
                found[name] = logits_behind(hf, read, goal, compressor.shape.scale)[:, 1:]
        for name, logits in found.items():
            loss = F.cross_entropy(logits[0].float(), goal[0, 1:], reduction="sum")
            nats[name] += float(loss)
    return {name: round(value / math.log(2) / max(1, size), 4) for name, value in nats.items()}


def won(told: dict[str, float]) -> float:
    """The share of the bits that a full context saves which its rows save too."""
    saved = told["none"] - told["full"]
    return round((told["none"] - told["compressed"]) / saved, 3) if saved else 0.0


def own(told: dict[str, float]) -> float:
    """The part of that share which rows of another text do not save."""
    saved = told["none"] - told["full"]
    return round((told["another"] - told["compressed"]) / saved, 3) if saved else 0.0


def measured(lm: LM, kind: str, folder: Path, texts: Sequence[str], length: int, following: int,
             most: int) -> dict[str, Any]:  # fmt: skip
    """`bits` of a trained compressor over so many texts at `most`. Raises BadConfig, BadModel."""
    target: Any = lm.models["target"]
    compressor = compressor_of(target, "compressor", kind, str(folder)).float()
    size = length + following
    pieces: list[list[int]] = []
    for text in texts:
        tokens = lm.encode(text[: size * 16], special=False)[:size]
        pieces += [tokens] if len(tokens) == size and len(pieces) < most else []
    if not pieces:
        raise BadConfig(f"no text has {size} tokens; give longer ones, or a shorter length")
    hf = copied(target).requires_grad_(False)
    told = bits(lm, hf, compressor, torch.tensor(pieces), length)
    shares = {"won": won(told), "own": own(told)}
    return {"texts": len(pieces), "rows": compressor.count(length), **told, **shares}


def exported(hf: Any, lm: LM, folder: Path) -> Any:
    """Writes a decoder that has learnt, in bfloat16, with the tokenizer of the one that it was; the
    model that the folder is.
    """
    hf.bfloat16().save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)
    return wrap(hf, lm.tokenizer, name=str(folder)).models["target"]


def train(
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
    hf = copied(target).requires_grad_(False)
    torch.manual_seed(config.seed)
    compressor = KINDS[config.kind](shape, body).to(hf.device).requires_grad_(True)
    out.mkdir(parents=True, exist_ok=True)
    run = CompressorRun(out, config, compressor, hf)
    if not run.step:
        table = hf.get_input_embeddings().weight * shape.scale
        begin(compressor, table, texts.learnt[:BEGIN, : config.length])
    run.through(lambda: run.learn(texts), save_every, quiet)
    told = bits(lm, hf, compressor, texts.held, config.length)
    report: dict[str, Any] = {
        "parameters": run.size,
        "texts": config.steps * config.batch,
        "rows": compressor.count(config.length),
        "bits_per_byte": told,
        "won": won(told),
        "own": own(told),
        "settings": asdict(config),
    }
    if config.whole:
        target = exported(hf, lm, out / "model")
    save(compressor, out / "compressor", target, {"texts": report["texts"]})
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

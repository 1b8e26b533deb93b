"""Trains a corrector and the drafter that fills in blocks of its text: `foretell train gad`.

The corrector is a small encoder-decoder that puts mistakes in sentences right (corrections.py). It
is a Marian model: the positions of source and text enter its first layers, so that cross-attention
finds the place to copy from by its number, too, and not by what stands there alone, as T5's does.

The drafter begins as a copy of it and learns to say what a block of masked tokens behind the text
hides: text and masks lie in one row, the text is read from left to right, the masks see all of it
and each other. Some of the masks are taken off first, the more the worse its guesses are (Qian et
al., Glancing Transformer, arXiv:2008.07905). At the end both are measured on sentences whose
documents were held back: what tokens a step do `input-guided` and `gad` bring, and are the answers
those of plain decoding?
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from foretell.errors import BadConfig
from foretell.ops.devices import check_device
from foretell.ops.files import write_text
from foretell.train.corpus import END, SPECIALS, train_tokenizer
from foretell.train.corrections import sentences, spoiled
from foretell.train.lm import Run

PAD, MASK = "<|pad|>", "<|mask|>"
IGNORED = -100  # a label without loss
HIDDEN = -1e9  # added to the score of what a token does not see
SPECS = (
    "plain",
    "input-guided:nodes={k}",
    "gad:k={k},nodes={k}",
    "gad:k={k},nodes={k},rule=relaxed",
)
Pair = tuple[list[int], list[int]]  # ids of a spoiled sentence and of the right one, ends included


@dataclass(frozen=True)
class TrainGad:
    """Shape of both models, and of the two runs. Lengths are in tokens."""

    hidden: int = 192  # width of the hidden state
    encoder_layers: int = 2  # layers of the encoder
    decoder_layers: int = 2  # layers of the decoder
    heads: int = 3  # attention heads
    intermediate: int = 512  # width inside a feed-forward block
    context: int = 512  # longest source and longest text; sentences have half as many letters
    vocab_size: int = 4096  # tokens of the tokenizer that is trained
    k: int = 25  # masked tokens of a block
    mistakes: float = 0.1  # share of the words with a mistake
    steps: int = 3000  # of training the corrector
    draft_steps: int = 2000  # of training the drafter
    batch: int = 32  # sentences a step
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of embeddings, norms and biases (AdamW)
    warmup: int = 50  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    glance: float = 0.5  # share of its wrong guesses that are shown first, at the start; 0: none
    share: float = 0.02  # of the documents that are held back
    measured: int = 200  # sentences of these that are measured
    seed: int = 0  # of weights, mistakes and order

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise BadConfig(f"hidden={self.hidden} must be a multiple of heads={self.heads}")
        if self.hidden % 2:
            raise BadConfig.field("hidden", self.hidden, "even, for its positions are sines")
        for name in ("k", "steps", "draft_steps", "batch", "warmup", "measured"):
            if getattr(self, name) < 1:
                raise BadConfig.field(name, getattr(self, name), "at least 1")
        if self.context < 2 * self.k:
            raise BadConfig(f"context={self.context} must be at least twice k={self.k}")
        for name in ("mistakes", "glance", "share", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadConfig.field(name, getattr(self, name), "between 0 and 1")


@dataclass
class Task:
    """Sentences to learn from and to measure on, and the tokenizer that was made for them."""

    learnt: list[str]
    held_back: list[str]
    tokenizer: PreTrainedTokenizerFast
    order: tuple[int, list[str]] = (-1, [])  # the last round, and the sentences in its order

    def pair(self, sentence: str, config: TrainGad, round: int = 0) -> Pair:
        wrong = spoiled(sentence, config.mistakes, config.seed, round)
        ids: Any = self.tokenizer([wrong, sentence])["input_ids"]
        end = self.tokenizer.eos_token_id
        return [*ids[0], end], [*ids[1], end]

    def batch(self, config: TrainGad, step: int) -> list[Pair]:
        """The pairs of a step: round after round in another order, with other mistakes."""
        pairs = []
        for number in range(step * config.batch, (step + 1) * config.batch):
            round, place = divmod(number, len(self.learnt))
            if self.order[0] != round:
                order = list(self.learnt)
                random.Random(config.seed * 1_000_003 + round).shuffle(order)
                self.order = round, order
            pairs.append(self.pair(self.order[1][place], config, round))
        return pairs


def task(sources: list[str], config: TrainGad) -> Task:
    """Raises BadConfig where the sources have too few sentences that fit in the context."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    # Mistakes make a sentence twice as long at most, and a token has at least one letter.
    longest = config.context // 2 - 2
    for sentence, back in sentences(sources, config.share):
        if len(sentence) <= longest:
            parts[back].append(sentence)
    if len(parts[False]) < config.batch or not parts[True]:
        raise BadConfig(
            f"--text: {len(parts[False])} sentences to learn from and {len(parts[True])} held back "
            f"are too few for a batch of {config.batch} (they have at most {longest} letters); "
            "give more texts, another --share or a larger --context"
        )
    random.Random(config.seed).shuffle(parts[True])
    texts = [text for s in parts[False] for text in (s, spoiled(s, config.mistakes, config.seed))]
    coder = train_tokenizer(iter(texts), config.vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=coder,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )
    return Task(parts[False], parts[True][: config.measured], tokenizer)


def build(config: TrainGad, vocab: int) -> MarianMTModel:
    """A random Marian model."""
    torch.manual_seed(config.seed)
    shape = MarianConfig(
        vocab_size=vocab,
        d_model=config.hidden,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.intermediate,
        decoder_ffn_dim=config.intermediate,
        max_position_embeddings=config.context,
        activation_function="gelu",
        scale_embedding=True,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=SPECIALS.index(PAD),
        eos_token_id=SPECIALS.index(END),
        forced_eos_token_id=None,
        decoder_start_token_id=SPECIALS.index(PAD),
    )
    return MarianMTModel(shape)


def layers_of(model: MarianMTModel) -> nn.Module:
    """The layers of both halves, whose matrices Muon trains."""
    halves: list[Any] = [model.get_encoder(), model.get_decoder()]
    return nn.ModuleList([half.layers for half in halves])


# --- the two objectives


def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """(B, the longest's length)."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def corrector_loss(model: MarianMTModel, pairs: list[Pair]) -> torch.Tensor:
    """Mean cross entropy of the right sentences' tokens."""
    source = padded([wrong for wrong, _ in pairs], model.config.pad_token_id)
    labels = padded([right for _, right in pairs], IGNORED)
    known = padded([[1] * len(wrong) for wrong, _ in pairs], 0)
    to = model.device
    with torch.autocast(to.type, dtype=torch.bfloat16):
        out = model(input_ids=source.to(to), attention_mask=known.to(to), labels=labels.to(to))
    return F.cross_entropy(
        out.logits.flatten(0, 1).float(), labels.flatten().to(to), ignore_index=IGNORED
    )


@dataclass
class Blocks:
    """Texts with a block behind each: ids (B, T), what they see (B, 1, T, T), labels (B, T)."""

    ids: torch.Tensor
    sees: torch.Tensor
    labels: torch.Tensor


def blocks(
    answers: Sequence[Sequence[int]], k: int, start: int, mask: int, draw: random.Random
) -> Blocks:
    """Of each answer a random beginning and the block of masks behind it, mostly of k.

    The last token of the beginning and the masks see each other, as in
    models.encoder_decoder.source.BlockCache.
    """
    rows, labels, ends = [], [], []
    for answer in answers:
        size = k if draw.random() < 0.5 else draw.randint(1, k)
        begin = draw.randrange(len(answer))
        text = [start, *answer[:begin]]
        hidden = answer[begin : begin + size]
        rows.append([*text, *[mask] * size])
        # Behind the end of the answer there is nothing to say.
        labels.append([*[IGNORED] * len(text), *hidden, *[IGNORED] * (size - len(hidden))])
        ends.append((begin, len(text) + size))
    ids = padded(rows, start)
    width = ids.shape[1]
    sees = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    for row, (root, end) in enumerate(ends):
        sees[row, root:end, root:end] = True
    added = torch.where(sees, 0.0, HIDDEN)[:, None]
    return Blocks(ids, added, padded(labels, IGNORED))


def glanced(made: Blocks, guesses: torch.Tensor, share: float, draw: random.Random) -> Blocks:
    """The same with some masks taken off: of each block `share` of as many as `guesses` (B, T) has
    wrong. What is seen has no loss.
    """
    ids, labels = made.ids.clone(), made.labels.clone()
    for row in range(len(ids)):
        places = (labels[row] != IGNORED).nonzero()[:, 0].tolist()
        wrong = sum(int(guesses[row, place]) != int(labels[row, place]) for place in places)
        for place in draw.sample(places, int(share * wrong)):
            ids[row, place] = labels[row, place]
            labels[row, place] = IGNORED
    return Blocks(ids, made.sees, labels)


def drafter_loss(
    model: MarianMTModel,
    pairs: list[Pair],
    k: int,
    share: float,
    draw: random.Random,
) -> torch.Tensor:
    """Mean cross entropy of what the masks hide."""
    config, to = model.config, model.device
    source = padded([wrong for wrong, _ in pairs], config.pad_token_id).to(to)
    known = padded([[1] * len(wrong) for wrong, _ in pairs], 0).to(to)
    encoder: Any = model.get_encoder()
    with torch.autocast(to.type, dtype=torch.bfloat16):
        states = encoder(input_ids=source, attention_mask=known)
    answers = [right for _, right in pairs]
    made = blocks(answers, k, config.decoder_start_token_id, config.mask_token_id, draw)

    def rows(given: Blocks) -> torch.Tensor:
        with torch.autocast(to.type, dtype=torch.bfloat16):
            out = model(
                encoder_outputs=states,
                attention_mask=known,
                decoder_input_ids=given.ids.to(to),
                decoder_attention_mask=given.sees.to(to),
                use_cache=False,
            )
        logits: torch.Tensor = out.logits
        return logits

    if share > 0:
        with torch.no_grad():
            guesses = rows(made).argmax(-1).cpu()
        made = glanced(made, guesses, share, draw)
    logits = rows(made).flatten(0, 1).float()
    labels = made.labels.flatten().to(to)
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / max(1, int((labels != IGNORED).sum()))  # every mask may have been taken off


# --- the runs


class GadRun(Run):
    """A run folder whose batches are pairs of sentences."""

    longer = "steps"
    unit = "sentences"

    def __init__(self, folder: Path, config: TrainGad, model: MarianMTModel):
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, config, model, layers_of(model))

    def advance_on(self, known: Task, loss_of: Callable[[list[Pair], int], torch.Tensor]) -> float:
        """One optimiser step with a loss of its pairs and its number; returns the loss."""
        loss = loss_of(known.batch(self.config, self.step), self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.item()

    def last_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        rows = map(json.loads, (self.folder / "log.jsonl").read_text("utf-8").splitlines())
        losses = {row["step"]: row["loss"] for row in rows}  # a step may have been done again
        steps = self.config.steps
        last = [losses[step] for step in range(steps - max(1, steps // 10) + 1, steps + 1)]
        return round(sum(last) / len(last), 4)


def measure(folder: Path, held_back: list[Pair], k: int) -> dict[str, dict[str, float]]:
    """Of each method on the held-back sentences: tokens a forward of the corrector, the share of
    answers that are plain decoding's, and the share that are right.
    """
    import foretell

    lm = foretell.load(folder / "model", draft=folder / "drafter", dtype="float32", device="cpu")
    found = {}
    plain: list[list[int]] = []
    longest = 2 * max(len(right) for _, right in held_back)
    for spec in SPECS:
        outs = lm.generate(
            [wrong for wrong, _ in held_back],
            spec.format(k=k),
            max_new_tokens=longest,
        )
        answers = [out.tokens for out in outs]
        plain = plain or answers
        right = [answer for _, answer in held_back]
        forwards = sum(out.stats.calls["target"] for out in outs)
        found[spec.format(k=k)] = {
            "tokens_per_step": round(sum(map(len, answers)) / forwards, 3),
            "same_as_plain": round(_same(answers, plain), 4),
            "right": round(_same(answers, right), 4),
        }
    return found


def _same(answers: list[list[int]], others: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(answers, others, strict=True)) / len(answers)


def train(
    out: Path,
    sources: list[str],
    config: TrainGad,
    device: str = "",
    quiet: bool = False,
    save_every: float = 300.0,
) -> dict[str, Any]:
    """Trains both, measures them, and writes OUT/model, OUT/drafter and OUT/report.json, whose
    content it returns. A run that was interrupted goes on where it was. Raises BadConfig.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    made_by = {"sources": sources, "settings": asdict(config)}
    record = out / "settings.json"
    if record.exists() and json.loads(record.read_text("utf-8")) != made_by:
        raise BadConfig(f"--out {out}: holds a run with other settings; choose another folder")
    known = task(sources, config)  # before the folder is taken: the sources may be refused
    out.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps(made_by, indent=1))

    model = build(config, len(known.tokenizer)).to(device)
    first = GadRun(out / "training" / "corrector", config, model)
    first.through(
        lambda: first.advance_on(known, lambda pairs, _: corrector_loss(model, pairs)),
        save_every,
        quiet,
    )
    _save(model, known, out / "model")

    drafter: MarianMTModel = copy.deepcopy(model)
    drafter.config.mask_token_id = SPECIALS.index(MASK)
    drafter.config.fills_blocks = True
    of_drafter = replace(config, steps=config.draft_steps)
    second = GadRun(out / "training" / "drafter", of_drafter, drafter)

    def glancing(pairs: list[Pair], step: int) -> torch.Tensor:
        share = config.glance * (1 - step / config.draft_steps)
        draw = random.Random(config.seed * 1_000_003 + step)
        return drafter_loss(drafter, pairs, config.k, share, draw)

    second.through(lambda: second.advance_on(known, glancing), save_every, quiet)
    _save(drafter, known, out / "drafter")

    held_back = [known.pair(sentence, config) for sentence in known.held_back]
    report = {
        "parameters": second.size,
        "sentences": {"learnt": len(known.learnt), "measured": len(held_back)},
        "loss": {"corrector": first.last_loss(), "drafter": second.last_loss()},
        "methods": measure(out, held_back, config.k),
        **made_by,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report


def _save(model: MarianMTModel, known: Task, folder: Path) -> None:
    model.save_pretrained(folder)
    known.tokenizer.save_pretrained(folder)

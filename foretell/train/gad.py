"""Trains a corrector and the drafter that fills in blocks of its text: `foretell train gad`.

The corrector is a small encoder-decoder that puts mistakes in sentences right (corrections.py). It
is a Marian model: the positions of source and text enter its first layers, so that cross-attention
finds the place to copy from by its number, too, and not by what stands there alone, as T5's does.

The drafter begins as a copy of it and learns to say what a block of masked tokens after the text
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
from foretell.train.corrections import read_sentences, spoil_sentence
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
        spoiled_text = spoil_sentence(sentence, config.mistakes, config.seed, round)
        ids: Any = self.tokenizer([spoiled_text, sentence])["input_ids"]
        end = self.tokenizer.eos_token_id
        return [*ids[0], end], [*ids[1], end]

    def batch(self, config: TrainGad, step: int) -> list[Pair]:
        """The pairs of a step: round after round in another order, with other mistakes."""
        pairs = []
        for number in range(step * config.batch, (step + 1) * config.batch):
            round_number, pair_place = divmod(number, len(self.learnt))
            if self.order[0] != round_number:
                order = list(self.learnt)
                random.Random(config.seed * 1_000_003 + round_number).shuffle(order)
                self.order = round_number, order
            pairs.append(self.pair(self.order[1][pair_place], config, round_number))
        return pairs


def make_task(sources: list[str], config: TrainGad) -> Task:
    """Makes the task. Raises BadConfig where too few of the sentences fit in the context."""
    parts: dict[bool, list[str]] = {False: [], True: []}
    # Mistakes make a sentence twice as long at most, and a token has at least one letter.
    max_letters = config.context // 2 - 2
    for sentence, is_held_back in read_sentences(sources, config.share):
        if len(sentence) <= max_letters:
            parts[is_held_back].append(sentence)
    if len(parts[False]) < config.batch or not parts[True]:
        raise BadConfig(
            f"--text: {len(parts[False])} sentences to learn from and {len(parts[True])} held back "
            f"are too few for a batch of {config.batch} (they have at most {max_letters} letters); "
            "give more texts, another --share or a larger --context"
        )
    random.Random(config.seed).shuffle(parts[True])
    texts = [
        text for s in parts[False] for text in (s, spoil_sentence(s, config.mistakes, config.seed))
    ]
    text_tokenizer = train_tokenizer(iter(texts), config.vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text_tokenizer,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )
    return Task(parts[False], parts[True][: config.measured], tokenizer)


def build_corrector(config: TrainGad, vocab: int) -> MarianMTModel:
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
    model_halves: list[Any] = [model.get_encoder(), model.get_decoder()]
    return nn.ModuleList([model_half.layers for model_half in model_halves])


# --- the two objectives


def pad_rows(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """Fills rows up to a tensor (B, the longest's length)."""
    max_length = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (max_length - len(row))] for row in rows])


def corrector_loss(model: MarianMTModel, pairs: list[Pair]) -> torch.Tensor:
    """Mean cross entropy of the right sentences' tokens."""
    source = pad_rows([wrong_ids for wrong_ids, _ in pairs], model.config.pad_token_id)
    labels = pad_rows([right_ids for _, right_ids in pairs], IGNORED)
    source_mask = pad_rows([[1] * len(wrong_ids) for wrong_ids, _ in pairs], 0)
    device = model.device
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = model(
            input_ids=source.to(device),
            attention_mask=source_mask.to(device),
            labels=labels.to(device),
        )
    return F.cross_entropy(
        out.logits.flatten(0, 1).float(), labels.flatten().to(device), ignore_index=IGNORED
    )


@dataclass
class Blocks:
    """Texts with a block after each: ids (B, T), what they see (B, 1, T, T), labels (B, T)."""

    ids: torch.Tensor
    sees: torch.Tensor
    labels: torch.Tensor


def mask_blocks(
    answers: Sequence[Sequence[int]], k: int, start: int, mask: int, generator: random.Random
) -> Blocks:
    """Cuts each answer to a random beginning with a block of masks after it, mostly of k.

    The last token of the beginning and the masks see each other, as in
    models.encoder_decoder.source.BlockCache.
    """
    rows, labels, ends = [], [], []
    for answer in answers:
        block_size = k if generator.random() < 0.5 else generator.randint(1, k)
        block_start = generator.randrange(len(answer))
        text = [start, *answer[:block_start]]
        hidden_tokens = answer[block_start : block_start + block_size]
        rows.append([*text, *[mask] * block_size])
        # After the end of the answer there is nothing to say.
        labels.append(
            [*[IGNORED] * len(text), *hidden_tokens, *[IGNORED] * (block_size - len(hidden_tokens))]
        )
        ends.append((block_start, len(text) + block_size))
    ids = pad_rows(rows, start)
    max_length = ids.shape[1]
    sees = torch.ones(max_length, max_length, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
    for row, (first_seen, end) in enumerate(ends):
        sees[row, first_seen:end, first_seen:end] = True
    added = torch.where(sees, 0.0, HIDDEN)[:, None]
    return Blocks(ids, added, pad_rows(labels, IGNORED))


def reveal_masks(
    masked_blocks: Blocks, guesses: torch.Tensor, share: float, generator: random.Random
) -> Blocks:
    """Takes some masks off: of each block `share` of as many as `guesses` (B, T) has wrong. What is
    seen has no loss.
    """
    ids, labels = masked_blocks.ids.clone(), masked_blocks.labels.clone()
    for row in range(len(ids)):
        mask_places = (labels[row] != IGNORED).nonzero()[:, 0].tolist()
        wrong_count = sum(
            int(guesses[row, mask_place]) != int(labels[row, mask_place])
            for mask_place in mask_places
        )
        for mask_place in generator.sample(mask_places, int(share * wrong_count)):
            ids[row, mask_place] = labels[row, mask_place]
            labels[row, mask_place] = IGNORED
    return Blocks(ids, masked_blocks.sees, labels)


def drafter_loss(
    model: MarianMTModel, pairs: list[Pair], k: int, share: float, generator: random.Random
) -> torch.Tensor:
    """Mean cross entropy of what the masks hide."""
    config, device = model.config, model.device
    source = pad_rows([wrong_ids for wrong_ids, _ in pairs], config.pad_token_id).to(device)
    source_mask = pad_rows([[1] * len(wrong_ids) for wrong_ids, _ in pairs], 0).to(device)
    encoder: Any = model.get_encoder()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        states = encoder(input_ids=source, attention_mask=source_mask)
    answers = [right_ids for _, right_ids in pairs]
    masked_blocks = mask_blocks(
        answers, k, config.decoder_start_token_id, config.mask_token_id, generator
    )

    def rows(shown_blocks: Blocks) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = model(
                encoder_outputs=states,
                attention_mask=source_mask,
                decoder_input_ids=shown_blocks.ids.to(device),
                decoder_attention_mask=shown_blocks.sees.to(device),
                use_cache=False,
            )
        logits: torch.Tensor = out.logits
        return logits

    if share > 0:
        with torch.no_grad():
            guesses = rows(masked_blocks).argmax(-1).cpu()
        masked_blocks = reveal_masks(masked_blocks, guesses, share, generator)
    logits = rows(masked_blocks).flatten(0, 1).float()
    labels = masked_blocks.labels.flatten().to(device)
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

    def advance_on(self, task: Task, loss_of: Callable[[list[Pair], int], torch.Tensor]) -> float:
        """Takes an optimiser step with a loss of its pairs and its number; returns the loss."""
        loss = loss_of(task.batch(self.config, self.step), self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.item()

    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        rows = map(json.loads, (self.folder / "log.jsonl").read_text("utf-8").splitlines())
        losses = {row["step"]: row["loss"] for row in rows}  # a step may have been done again
        steps = self.config.steps
        last_losses = [losses[step] for step in range(steps - max(1, steps // 10) + 1, steps + 1)]
        return round(sum(last_losses) / len(last_losses), 4)


def measure_methods(folder: Path, held_back: list[Pair], k: int) -> dict[str, dict[str, float]]:
    """Measures methods on the held-back sentences: tokens a forward of the corrector, the share of
    answers that are plain decoding's, and the share that are right.
    """
    import foretell

    lm = foretell.load(folder / "model", draft=folder / "drafter", dtype="float32", device="cpu")
    figures = {}
    plain_answers: list[list[int]] = []
    longest = 2 * max(len(right_answers) for _, right_answers in held_back)
    for spec in SPECS:
        outputs = lm.generate(
            [wrong_ids for wrong_ids, _ in held_back], spec.format(k=k), max_new_tokens=longest
        )
        answers = [out.tokens for out in outputs]
        plain_answers = plain_answers or answers
        right_answers = [answer for _, answer in held_back]
        forwards = sum(out.stats.calls["target"] for out in outputs)
        figures[spec.format(k=k)] = {
            "tokens_per_step": round(sum(map(len, answers)) / forwards, 3),
            "same_as_plain": round(_equal_share(answers, plain_answers), 4),
            "right": round(_equal_share(answers, right_answers), 4),
        }
    return figures


def _equal_share(answers: list[list[int]], other_answers: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(answers, other_answers, strict=True)) / len(answers)


def train_gad(
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
    settings_path = out / "settings.json"
    if settings_path.exists() and json.loads(settings_path.read_text("utf-8")) != made_by:
        raise BadConfig(f"--out {out}: holds a run with other settings; choose another folder")
    task = make_task(sources, config)  # before the folder is taken: the sources may be refused
    out.mkdir(parents=True, exist_ok=True)
    write_text(settings_path, json.dumps(made_by, indent=1))

    model = build_corrector(config, len(task.tokenizer)).to(device)
    corrector_run = GadRun(out / "training" / "corrector", config, model)
    corrector_run.run_steps(
        lambda: corrector_run.advance_on(task, lambda pairs, _: corrector_loss(model, pairs)),
        save_every,
        quiet,
    )
    _save_model(model, task, out / "model")

    drafter: MarianMTModel = copy.deepcopy(model)
    drafter.config.mask_token_id = SPECIALS.index(MASK)
    drafter.config.fills_blocks = True
    drafter_config = replace(config, steps=config.draft_steps)
    drafter_run = GadRun(out / "training" / "drafter", drafter_config, drafter)

    def glancing(pairs: list[Pair], step: int) -> torch.Tensor:
        share = config.glance * (1 - step / config.draft_steps)
        draw = random.Random(config.seed * 1_000_003 + step)
        return drafter_loss(drafter, pairs, config.k, share, draw)

    drafter_run.run_steps(lambda: drafter_run.advance_on(task, glancing), save_every, quiet)
    _save_model(drafter, task, out / "drafter")

    held_back = [task.pair(sentence, config) for sentence in task.held_back]
    report = {
        "parameters": drafter_run.parameter_count,
        "sentences": {"learnt": len(task.learnt), "measured": len(held_back)},
        "loss": {"corrector": corrector_run.final_loss(), "drafter": drafter_run.final_loss()},
        "methods": measure_methods(out, held_back, config.k),
        **made_by,
    }
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report


def _save_model(model: MarianMTModel, task: Task, folder: Path) -> None:
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)

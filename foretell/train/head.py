"""Trains a head on a target's own answers and its hidden states: `foretell train head`.

The head learns at every depth at once, each from the laws that the target has there, and no depth
sees more than it will when it drafts. Its output matrix is the target's, cut down to the commonest
tokens, and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from foretell.errors import BadConfig
from foretell.heads.base import Head, TargetShape, Texts
from foretell.heads.folder import build, load, save, target_shape
from foretell.heads.output import Output
from foretell.ops.files import write_text
from foretell.ops.ranks import smoothed
from foretell.policy.costs import Costs
from foretell.train.answers import AT_ONCE, Text, read
from foretell.train.draft import HELD_BACK, ROUND, blocks
from foretell.train.lm import Run
from foretell.train.objectives import OBJECTIVES, objective, row_loss
from foretell.train.states import load_states

if TYPE_CHECKING:
    from foretell.api import LM

LEAST = 8  # tokens of an answer that is of use
RANKS = 10  # candidates of a place that are counted apart
PIECE = 128  # tokens of a forward by which the time of reading texts is told


@dataclass(frozen=True)
class TrainHead:
    """Settings of the run. Lengths are in tokens."""

    kind: str = "eagle3"  # of the head
    depths: int = 0  # that it learns to draft; 0: as many as its paper trains
    objective: str = "kl"  # kl, ce, tv, tvd++ or certainty
    window: int = 640  # longest text it is trained on
    tokens: int = 2_400_000  # tokens of texts in all, prompts included
    batch: int = 1_024  # tokens a step
    micro: int = 1_024  # tokens a forward
    common: int = 8_192  # commonest tokens, which it may draft
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of norms and biases (AdamW)
    warmup: int = 20  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise BadConfig.field("objective", self.objective, f"one of {', '.join(OBJECTIVES)}")
        if not 0 <= self.depths <= 64:
            raise BadConfig.field("depths", self.depths, "between 0 (the paper's) and 64")
        if self.batch % self.micro or self.micro < self.window:
            raise BadConfig("batch must be a multiple of micro, and micro at least window")

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


@dataclass
class Known:
    """A text with its states (n, F), on disk until they are read."""

    tokens: np.ndarray
    prompt: int
    best: np.ndarray  # (n - prompt,) the target's best token at each place of the answer
    states: torch.Tensor


class Corpus:
    """All answers with their states, those for measuring aside."""

    def __init__(self, files: Sequence[Path], states: Sequence[Path], window: int):
        self.train: list[Known] = []
        self.held_back: list[Known] = []
        seen = 0
        for file, beside in zip(files, states, strict=True):
            rows = load_states(beside)
            start = 0
            for text in read(file):
                known = self._known(text, rows[start : start + len(text.tokens)], window)
                start += len(text.tokens)
                if known is None:
                    continue
                (self.held_back if seen % HELD_BACK == 0 else self.train).append(known)
                seen += 1
        if not self.train or not self.held_back:
            raise BadConfig("there are too few answers to train on; give more prompts")

    @staticmethod
    def _known(text: Text, states: torch.Tensor, window: int) -> Known | None:
        end = min(window, len(text.tokens))
        if end - text.prompt < LEAST:
            return None
        best = text.best[: end - text.prompt, 0]
        return Known(text.tokens[:end], text.prompt, best, states[:end])

    def commonest(self, count: int, vocab: int) -> torch.Tensor:
        """The tokens that answers have most often, ascending."""
        found = np.concatenate([text.tokens[text.prompt :] for text in self.train])
        counts = np.bincount(found, minlength=vocab)
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


class Teacher:
    """What the target has that the head's training reads: embeddings, last norm, output matrix."""

    def __init__(self, target: Any, taps: Sequence[int], head: Head, kept: torch.Tensor):
        self.target = target
        self.taps = list(taps)  # those that the states hold, side by side
        self.head = head
        self.vocab = target.vocab
        self.output = Output(target, kept)
        self.device = next(head.parameters()).device
        dtype = torch.bfloat16
        self.weight = self.output.weight().to(self.device, dtype)
        self.names = torch.full((target.vocab,), -1)
        self.names[kept] = torch.arange(len(kept))
        with torch.inference_mode():
            embeddings = target.embed(range(target.vocab))
        self.embeddings = embeddings.clone().to(dtype)

    @torch.no_grad()
    def texts(self, group: Sequence[Known], noise: float, seed: int) -> tuple[Texts, torch.Tensor]:
        """A batch, and which tokens of it are answers' (B, n) bool."""
        length = -(-max(len(text.tokens) for text in group) // ROUND) * ROUND
        size = (len(group), length)
        ids = torch.zeros(size, dtype=torch.long)
        answers = torch.zeros(size, dtype=torch.bool)
        states = torch.zeros(*size, group[0].states.shape[1], dtype=torch.bfloat16)
        for row, text in enumerate(group):
            end = len(text.tokens)
            ids[row, :end] = torch.from_numpy(text.tokens.astype(np.int64))
            answers[row, text.prompt : end] = True
            states[row, :end] = text.states
        by_tap = dict(zip(self.taps, states.chunk(len(self.taps), -1), strict=True))
        last = by_tap[self.head.config.target.layers]
        finals = self.normed(last)
        parts = [by_tap[tap] for tap in self.head.taps]
        if self.head.reads_normed:
            parts = [self.normed(part) for part in parts]
        features = torch.cat(parts, -1)
        if noise:
            draw = torch.Generator().manual_seed(seed)
            spread = noise * 512 / length
            added = torch.rand(features.shape, generator=draw) - 0.5
            features = features + (added * spread).to(features.dtype)
        features = F.pad(features, (0, 0, self.head.lag, 0))[:, :length]
        made = (ids, self.embeddings[ids], features, finals)
        return Texts(*(part.to(self.device) for part in made)), answers

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        norm: Any = self.output.norm
        out: torch.Tensor = norm(states.float())
        return out.to(torch.bfloat16)

    @torch.no_grad()
    def laws(self, finals: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> the target's laws (m, Vd) over the tokens that are kept."""
        return (finals.to(self.weight.dtype) @ self.weight.T).float().softmax(-1)


def taps_of(kind: str, target: TargetShape) -> tuple[int, ...]:
    """What states are kept for: the usual taps of all heads, and those of this kind."""
    usual = (2, target.layers // 2, target.layers - 3, target.layers)
    return tuple(sorted({*usual, *build(kind, target).taps}))


def plan(
    prompts: int,
    answer_tokens: int,
    target: TargetShape,
    taps: Sequence[int],
    config: TrainHead,
    costs: Costs,
) -> str:
    """What a run takes: bytes, and hours by the measured costs of the target's forwards."""
    tokens = prompts * answer_tokens
    answering = tokens * float(costs.curve(AT_ONCE)[-1]) / AT_ONCE
    reading = tokens * float(costs.curve(PIECE)[-1]) / PIECE
    size = tokens * len(taps) * target.hidden * 2
    return (
        f"at most {tokens:,} tokens of answers: {answering / 3600:.1f} hours to write them, "
        f"{reading / 3600:.1f} hours and {size / 1e9:.1f} GB for their states; then "
        f"{config.tokens:,} tokens of training, whose time shows when it begins"
    )


def places(answers: torch.Tensor, depth: int, anchors: torch.Tensor | None = None) -> torch.Tensor:
    """(m, 2) rows and places from which a token of an answer is drafted at this depth: that
    `depth + 1` tokens on. `anchors` (n,) bool: the only places that count.
    """
    drafted = answers[:, depth + 1 :]
    if anchors is not None:
        drafted = drafted & anchors[: drafted.shape[1]].to(drafted.device)
    return drafted.nonzero()


def loss_of(
    head: Head, texts: Texts, answers: torch.Tensor, teacher: Teacher, config: TrainHead
) -> torch.Tensor:
    """The mean over a batch's drafted tokens, depths weighed by `head.decay`."""
    depths = config.depths or head.depths
    loss_by = objective(config.objective)
    rows, columns = places(answers, 0).T  # the target's own law is wanted there
    laws = teacher.laws(texts.finals[rows, columns])
    number = torch.full(texts.ids.shape, -1)
    number[rows, columns] = torch.arange(len(rows))
    total = texts.finals.new_zeros((), dtype=torch.float32)
    with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
        for drafted in head.unroll(texts, depths):
            row, place = places(answers, drafted.depth, drafted.anchors).T
            if not len(row):
                break
            here = number[row, place + drafted.depth]
            labels = teacher.names[texts.ids[row, place + drafted.depth + 1].cpu()]
            states = drafted.states[row, place]
            part = head.agreement * row_loss(
                states, teacher.weight, laws[here], labels.to(teacher.device), loss_by
            )
            if head.regression and drafted.feature is not None:
                wanted = texts.finals[row, place + drafted.depth].float()
                distance = F.smooth_l1_loss(
                    drafted.feature[row, place].float(), wanted, reduction="none"
                )
                part = part + head.regression * distance.mean(-1).sum()
            total = total + head.decay**drafted.depth * part / len(row)
    return total


@torch.inference_mode()
def hits(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[float]:
    """At each depth the share of places where the head's best token is the target's best one and
    was at every depth before, in those of the texts that are greedy.
    """
    head.eval()
    right = np.zeros(depths)
    count = 0
    tokens = torch.tensor(teacher.output.tokens)
    texts = [text for text in texts if (text.tokens[text.prompt :] == text.best).all()]
    for group in blocks([len(text.tokens) for text in texts], size, 0):
        chosen = [texts[number] for number in group]
        batch, answers = teacher.texts(chosen, 0.0, 0)
        best = torch.full(batch.ids.shape, -1)
        for row, text in enumerate(chosen):
            best[row, text.prompt - 1 : len(text.tokens) - 1] = torch.from_numpy(
                text.best.astype(np.int64)
            )
        # Anchors of which all depths are known, so that depths have the same ones.
        row, place = places(answers, depths - 1).T
        kept = answers[row, place + 1]
        row, place = row[kept], place[kept]
        so_far = torch.ones(len(row), dtype=torch.bool)
        count += len(row)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll(batch, depths):
                states = drafted.states[row, place].to(teacher.weight.dtype)
                guess = tokens[(states @ teacher.weight.T).argmax(-1).cpu()]
                so_far &= guess == best[row, place + drafted.depth]
                right[drafted.depth] += float(so_far.sum())
    head.train()
    return [round(float(share), 4) for share in right / max(1, count)]


@torch.inference_mode()
def true_ranks(
    head: Head, texts: Sequence[Known], teacher: Teacher, depths: int, size: int
) -> list[np.ndarray]:
    """Of each greedy text, by place and depth, the rank that the head gives the text's own token,
    given the tokens before it: (m, depths) int, RANKS where it is not among the first.
    """
    head.eval()
    greedy = [text for text in texts if (text.tokens[text.prompt :] == text.best).all()]
    if not greedy:
        return []
    found: list[np.ndarray] = []
    for group in blocks([len(text.tokens) for text in greedy], size, 0):
        batch, answers = teacher.texts([greedy[number] for number in group], 0.0, 0)
        # Places of which all depths are known, so that depths have the same ones.
        row, place = places(answers, depths - 1).T
        kept = answers[row, place + 1]
        row, place = row[kept], place[kept]
        ranks = np.full((len(row), depths), RANKS)
        with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
            for drafted in head.unroll(batch, depths):
                names = teacher.names[batch.ids[row, place + drafted.depth + 1].cpu()]
                states = drafted.states[row, place].to(teacher.weight.dtype)
                logits = states @ teacher.weight.T
                best = logits.topk(min(RANKS, logits.shape[1]), -1).indices.cpu()
                rank, column = (best == names[:, None]).nonzero().T
                ranks[rank.numpy(), drafted.depth] = column.numpy()
        found += [ranks[(row == number).numpy()] for number in range(len(group))]
    head.train()
    return found


def rank_table(ranks: Sequence[np.ndarray]) -> list[list[float]]:
    """By depth and rank the share of places where that rank is the text's token; [] of no place.

    A worse rank is never said to be right more often than a better one.
    """
    if not sum(map(len, ranks)):
        return []
    joined = np.concatenate(list(ranks))
    shares = [np.bincount(column, minlength=RANKS + 1)[:RANKS] / len(joined) for column in joined.T]
    return smoothed([[round(float(share), 4) for share in row] for row in shares])


class HeadRun(Run):
    """A run folder whose batches are groups of answers with their states."""

    def __init__(self, folder: Path, config: TrainHead, head: Head):
        super().__init__(folder, config, head, head)
        self.groups: list[list[int]] = []
        self.rounds = 0

    def advance_on(self, corpus: Corpus, teacher: Teacher) -> float:
        """One optimiser step; returns its mean loss."""
        config: Any = self.config
        parts = config.batch // config.micro
        total = 0.0
        for part in range(parts):
            number = self.step * parts + part
            while len(self.groups) <= number:
                seed = config.seed * 1_000 + self.rounds
                lengths = [len(text.tokens) for text in corpus.train]
                self.groups += blocks(lengths, config.micro, seed)
                self.rounds += 1
            chosen = [corpus.train[index] for index in self.groups[number]]
            seed = config.seed * 1_000_003 + number
            batch, answers = teacher.texts(chosen, self.model.noise, seed)
            loss = loss_of(self.model, batch, answers, teacher, config) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return total


def train(
    lm: LM,
    files: Sequence[Path],
    states: Sequence[Path],
    taps: Sequence[int],
    out: Path,
    config: TrainHead,
    save_every: float = 300.0,
    quiet: bool = False,
    device: str = "cpu",
    init: Path | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/head and returns the report. `init`: folder
    of a head of the same kind to begin with, whose tokens it keeps.
    """
    target: Any = lm.models["target"]
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(files, states, config.window)
    torch.manual_seed(config.seed)
    head = build(config.kind, target_shape(target)).to(device)
    if config.depths > head.deepest:
        raise BadConfig.field("depths", config.depths, f"at most {head.deepest} for {config.kind}")
    head.begin(target)
    kept = corpus.commonest(min(config.common, target.vocab), target.vocab)
    if init is not None:
        known, old_kept = load(init, target, config.kind)
        head.load_state_dict(known.state_dict())
        kept = torch.arange(target.vocab) if old_kept is None else old_kept
    missing = {*head.taps, head.config.target.layers} - {*taps}
    if missing:
        raise BadConfig(f"the states have taps {list(taps)}, and {config.kind} needs {missing} too")
    teacher = Teacher(target, taps, head, kept)
    run = HeadRun(out, config, head)
    run.through(lambda: run.advance_on(corpus, teacher), save_every, quiet)
    trained = config.depths or head.depths
    depths = min(max(trained, 5), head.deepest)
    ranks = rank_table(true_ranks(head, corpus.held_back, teacher, trained, config.micro))
    report: dict[str, Any] = {
        "parameters": run.size,
        "tokens_seen": config.steps * config.batch,
        "answers": len(corpus.train),
        "hits": hits(head, corpus.held_back, teacher, depths, config.micro),
        "ranks": ranks,
        "settings": asdict(config),
    }
    about = {name: report[name] for name in ("hits", "ranks", "tokens_seen")}
    save(head, kept, out / "head", target, about)
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

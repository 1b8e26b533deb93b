"""Trains the head by which `specdec-pp` decides when to stop drafting: `foretell train
acceptance-head`.

As Huang et al. (arXiv:2405.19715) do it: at every token of a text the draft model draws one of its
own, y of its law q, which the target of law p would accept with probability min(1, p(y) / q(y)).
The draft model then reads the text with most tokens replaced by these draws, the others mixed in as
they are, and the head learns from the state at each draw what its chance was. A rejection weighs
more than an acceptance. Both models stay as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.api.lm import LM
from foretell.bench.prompts import Prompt
from foretell.bench.sets import prompt_ids
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.drafters.model.acceptance_head import AcceptanceHead, save
from foretell.errors import BadConfig, Unsupported
from foretell.ops.logits import resized
from foretell.train import recipes

LEAST = 8  # tokens that a text must have behind its beginning to be of use
HELD_OUT = 8  # every so many texts one is kept from training
ANSWERS = 8  # prompts answered at once
SECONDS = 0.1  # between two calls of `tell` while the head is trained
Text = tuple[
    list[int], int
]  # tokens, and how many of them are the beginning, from which none learn
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainHead:
    """Shape of the head and of the training. Lengths are in tokens."""

    blocks: int = 3  # residual blocks of the head
    rejected: float = 6.0  # times that a rejection weighs in the loss
    mixed: float = 0.15  # share of the tokens read that are the text's own
    temperature: float = 1.0  # of both models' laws; 0: their best tokens
    length: int = 256  # tokens of an answer, or of a piece of text
    examples: int = 50_000  # drafted tokens to learn from at most
    epochs: int = 3  # times that each is learnt from
    batch: int = 64  # drafted tokens a step
    rate: float = 0.001  # learning rate (AdamW), which falls to 0
    seed: int = 0  # of weights, draws and the order

    def __post_init__(self) -> None:
        ranges = {
            "blocks": (1, 64),
            "rejected": (0.01, 1000),
            "mixed": (0, 0.99),
            "temperature": (0, 100),
            "length": (LEAST + 1, 1 << 20),
            "examples": (100, 1 << 30),
            "epochs": (1, 10_000),
            "batch": (1, 1 << 20),
            "rate": (1e-8, 1),
        }
        recipes.check(self, ranges)


@dataclass
class Examples:
    """Drafted tokens: of each the draft model's state (n, E), the chance (n,) that the target
    accepts it, and the draft model's own best chance (n,), to compare with.
    """

    states: torch.Tensor
    chances: torch.Tensor
    confidence: torch.Tensor

    def __len__(self) -> int:
        return len(self.chances)


# --- texts


def answers(lm: LM, prompts: Sequence[Prompt], config: TrainHead, tell: Tell) -> Iterator[Text]:
    """What the target answers to prompts, behind the prompt of each."""
    for first in range(0, len(prompts), ANSWERS):
        tell("answering", first, len(prompts))
        group = [prompt_ids(lm, prompt) for prompt in prompts[first : first + ANSWERS]]
        outputs = lm.generate(
            group,
            "plain",
            max_new_tokens=config.length,
            temperature=config.temperature,
            seed=[config.seed + first + place for place in range(len(group))],
        )
        for beginning, output in zip(group, outputs, strict=True):
            if output.error is not None:
                raise output.error
            yield [*beginning, *output.tokens], len(beginning)


def pieces(lm: LM, documents: Iterable[str], config: TrainHead) -> Iterator[Text]:
    """Texts as they are, in pieces of the same length."""
    for document in documents:
        tokens = lm.encode(document, special=False)
        for first in range(0, len(tokens) - LEAST, config.length):
            yield tokens[first : first + config.length], 1


# --- what to learn from


def read(model: Model, tokens: Sequence[int], first: int, taps: tuple[int, ...] = ()) -> Reply:
    """The rows of logits after the tokens from `first` on, and hidden states of all tokens."""
    text = TokenTree(tokens[0]).chain(tokens[1:])
    return answered(model, Ask(text, rows=range(first, len(tokens)), taps=taps))


@torch.inference_mode()
def answered(model: Model, ask: Ask) -> Reply:
    """What a model answers to an ask whose tree is all of its text."""
    cache = model.cache()
    job, _ = cache.prepare(ask, ask.tree.tokens[:1], 1)
    reply = model.forward([job])[0]
    cache.drop()
    return reply


def laws(model: Model, text: Text, vocab: int, temperature: float) -> torch.Tensor:
    """(n, vocab): the model's laws of the n tokens behind a text's beginning."""
    tokens, beginning = text
    rows = read(model, tokens[:-1], beginning - 1).logits.cpu()
    rows = torch.stack([resized(row, vocab) for row in rows])
    if temperature:
        return (rows / temperature).softmax(-1)
    return torch.zeros_like(rows).scatter_(1, rows.argmax(-1, keepdim=True), 1)


def examples(
    target: Model, draft: Model, text: Text, config: TrainHead, generator: torch.Generator
) -> Examples:
    """One for every token behind the text's beginning that was replaced by a draw."""
    tokens, beginning = text
    q = laws(draft, text, target.vocab, config.temperature)
    p = laws(target, text, target.vocab, config.temperature)
    drawn = torch.multinomial(q, 1, generator=generator)
    chances = (p.gather(1, drawn) / q.gather(1, drawn))[:, 0].clamp(max=1)
    kept = torch.rand(len(drawn), generator=generator) < config.mixed
    own = torch.tensor(tokens[beginning:])
    mixed = torch.where(kept, own, drawn[:, 0]).tolist()
    last = len(draft.layout)
    states = read(draft, [*tokens[:beginning], *mixed], len(tokens) - 1, (last,)).hidden[last]
    # Copies: what is made in inference mode takes part in no training.
    return Examples(
        states[beginning:].cpu()[~kept].float().clone(),
        chances[~kept].float().clone(),
        q.amax(-1)[~kept].float().clone(),
    )


def collect(
    target: Model, draft: Model, texts: Iterable[Text], config: TrainHead, tell: Tell
) -> tuple[Examples, Examples]:
    """What to learn from, and what is held out: whole texts, so that neither knows the other's."""
    generator = torch.Generator().manual_seed(config.seed)
    parts: tuple[list[Examples], list[Examples]] = ([], [])
    total = 0
    longest = min(target.context, draft.context)
    for number, (tokens, beginning) in enumerate(_usable(texts, draft.vocab, longest)):
        found = examples(target, draft, (tokens, beginning), config, generator)
        parts[number % HELD_OUT == 1].append(found)
        total += len(found)
        tell("reading", min(total, config.examples), config.examples)
        if total >= config.examples:
            break
    if not all(any(map(len, part)) for part in parts):
        raise BadConfig(
            f"the texts give {sum(map(len, parts))} pieces that both models can read, and one to "
            f"learn from and one to hold out are needed: give more, of {LEAST} tokens or longer"
        )
    learnt, held_out = (_joined(part) for part in parts)
    return learnt, held_out


def _usable(texts: Iterable[Text], vocab: int, longest: int) -> Iterator[Text]:
    """Those that both models can read, cut to what they hold, and long enough."""
    for tokens, beginning in texts:
        short = tokens[:longest]
        if len(short) - beginning >= LEAST and max(short) < vocab:
            yield short, beginning


def _joined(parts: Sequence[Examples]) -> Examples:
    return Examples(
        torch.cat([part.states for part in parts]),
        torch.cat([part.chances for part in parts]),
        torch.cat([part.confidence for part in parts]),
    )


# --- learning


def loss_of(logits: torch.Tensor, chances: torch.Tensor, rejected: float) -> torch.Tensor:
    """The mean cross entropy of logits (n, 2) with the chances (n,) of acceptance, in which a
    rejection weighs `rejected` times as much.
    """
    logs = logits.log_softmax(-1)
    return -(rejected * (1 - chances) * logs[:, 0] + chances * logs[:, 1]).mean()


def fit(learnt: Examples, config: TrainHead, tell: Tell) -> AcceptanceHead:
    """A head trained on these examples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = AcceptanceHead(learnt.states.shape[1], config.blocks)
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=config.rate)
    steps = config.epochs * math.ceil(len(learnt) / config.batch)
    done = 0
    told = 0.0
    for _ in range(config.epochs):
        order = torch.randperm(len(learnt), generator=generator)
        for chosen in order.split(config.batch):
            for group in optimiser.param_groups:
                group["lr"] = config.rate * (1 - done / steps)
            logits = head(learnt.states[chosen])
            loss = loss_of(logits, learnt.chances[chosen], config.rejected)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            done += 1
            if time.monotonic() - told > SECONDS:
                told = time.monotonic()
                tell("training", done, steps)
    return head.requires_grad_(False).eval()


def auc(scores: torch.Tensor, chances: torch.Tensor) -> float:
    """The probability that an accepted token has a higher score than a rejected one; ties count
    half. 0.5: the scores tell nothing. NaN: all are accepted, or all rejected.

    scores, chances (n,): each token is accepted with its chance.
    """
    values, places = scores.double().unique(return_inverse=True)
    accepted = torch.zeros(len(values), dtype=torch.float64)
    rejected = accepted.clone()
    accepted.index_add_(0, places, chances.double())
    rejected.index_add_(0, places, 1 - chances.double())
    below = rejected.cumsum(0) - rejected / 2
    pairs = float(accepted.sum() * rejected.sum())
    return float((accepted * below).sum()) / pairs if pairs else math.nan


def train(
    lm: LM, texts: Iterable[Text], out: Path, config: TrainHead, tell: Tell
) -> dict[str, float]:
    """Trains a head for `lm`'s draft model and writes it to `out`; returns what came of it.

    Raises BadConfig where the texts are too few, and Unsupported where the draft model is missing
    or shows no hidden states.
    """
    target = lm.models["target"]
    draft = lm.models.get("draft")
    if draft is None:
        cure = "name one with --draft"
        raise Unsupported.missing("train acceptance-head", target.name, "a 'draft' model", cure)
    if "taps" not in draft.caps:
        cure = "take another draft model"
        raise Unsupported.missing("train acceptance-head", draft.name, "hidden states", cure)
    learnt, held_out = collect(target, draft, texts, config, tell)
    head = fit(learnt, config, tell)
    save(head, out)
    with torch.no_grad():
        logits = head(held_out.states)
    return {
        "examples": len(learnt),
        "held_out": len(held_out),
        "accepted": float(held_out.chances.mean()),
        "loss": float(loss_of(logits, held_out.chances, config.rejected)),
        "auc": auc(logits.softmax(-1)[:, 1], held_out.chances),
        "confidence_auc": auc(held_out.confidence, held_out.chances),
    }

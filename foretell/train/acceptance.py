"""Trains the head by which `specdec-pp` decides when to stop drafting: `foretell train
acceptance-head`.

As Huang et al. (arXiv:2405.19715) do it: at every token of a text the draft model draws one of its
own, y of its distribution q, which the target of distribution p would accept with probability
min(1, p(y) / q(y)). The draft model then reads the text with most tokens replaced by these draws,
the others mixed in as they are, and the head learns from the state at each draw what its
probability was. A rejection weighs more than an acceptance. Both models stay as they are.
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
from foretell.drafters.model.acceptance_head import AcceptanceHead, save_acceptance_head
from foretell.errors import BadConfig, Unsupported
from foretell.ops.logits import resize_row
from foretell.train import recipes

LEAST = 8  # tokens that a text must have after its beginning to be of use
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
    temperature: float = 1.0  # of both models' distributions; 0: their best tokens
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
        recipes.check_ranges(self, ranges)


@dataclass
class Examples:
    """Drafted tokens: of each the draft model's state (n, E), the probability (n,) that the target
    accepts it, and the draft model's own best probability (n,), to compare with.
    """

    states: torch.Tensor
    chances: torch.Tensor
    confidence: torch.Tensor

    def __len__(self) -> int:
        return len(self.chances)


# --- texts


def answer_prompts(
    lm: LM, prompts: Sequence[Prompt], config: TrainHead, tell: Tell
) -> Iterator[Text]:
    """Yields the target's answers to prompts, each after its prompt."""
    for first_number in range(0, len(prompts), ANSWERS):
        tell("answering", first_number, len(prompts))
        prompt_group = [
            prompt_ids(lm, prompt) for prompt in prompts[first_number : first_number + ANSWERS]
        ]
        outputs = lm.generate(
            prompt_group,
            "plain",
            max_new_tokens=config.length,
            temperature=config.temperature,
            seed=[
                config.seed + first_number + place_in_group
                for place_in_group in range(len(prompt_group))
            ],
        )
        for prompt_tokens, output in zip(prompt_group, outputs, strict=True):
            if output.error is not None:
                raise output.error
            yield [*prompt_tokens, *output.tokens], len(prompt_tokens)


def cut_documents(lm: LM, documents: Iterable[str], config: TrainHead) -> Iterator[Text]:
    """Texts as they are, in pieces of the same length."""
    for document in documents:
        tokens = lm.encode(document, special=False)
        for first_token in range(0, len(tokens) - LEAST, config.length):
            yield tokens[first_token : first_token + config.length], 1


# --- what to learn from


def read_tokens(
    model: Model, tokens: Sequence[int], first_token: int, taps: tuple[int, ...] = ()
) -> Reply:
    """Rows of logits after the tokens from `first_token` on, and hidden states of all tokens."""
    text = TokenTree(tokens[0]).chain(tokens[1:])
    return answer_ask(model, Ask(text, rows=range(first_token, len(tokens)), taps=taps))


@torch.inference_mode()
def answer_ask(model: Model, ask: Ask) -> Reply:
    """Returns a model's reply to an ask whose tree is all of its text."""
    cache = model.cache()
    job, _ = cache.prepare(ask, ask.tree.tokens[:1], 1)
    reply = model.forward([job])[0]
    cache.drop()
    return reply


def answer_laws(model: Model, text: Text, vocab: int, temperature: float) -> torch.Tensor:
    """(n, vocab): the model's distributions of the n tokens after a text's beginning."""
    tokens, prompt_length = text
    logit_rows = read_tokens(model, tokens[:-1], prompt_length - 1).logits.cpu()
    logit_rows = torch.stack([resize_row(row, vocab) for row in logit_rows])
    if temperature:
        return (logit_rows / temperature).softmax(-1)
    return torch.zeros_like(logit_rows).scatter_(1, logit_rows.argmax(-1, keepdim=True), 1)


def draw_examples(
    target: Model, draft: Model, text: Text, config: TrainHead, generator: torch.Generator
) -> Examples:
    """Examples of a text, one for every token after its beginning that a draw replaced."""
    tokens, prompt_length = text
    q = answer_laws(draft, text, target.vocab, config.temperature)
    p = answer_laws(target, text, target.vocab, config.temperature)
    drawn_tokens = torch.multinomial(q, 1, generator=generator)
    accept_chances = (p.gather(1, drawn_tokens) / q.gather(1, drawn_tokens))[:, 0].clamp(max=1)
    kept_tokens = torch.rand(len(drawn_tokens), generator=generator) < config.mixed
    text_tokens = torch.tensor(tokens[prompt_length:])
    mixed_tokens = torch.where(kept_tokens, text_tokens, drawn_tokens[:, 0]).tolist()
    last_layer = len(draft.layout)
    states = read_tokens(
        draft, [*tokens[:prompt_length], *mixed_tokens], len(tokens) - 1, (last_layer,)
    ).hidden[last_layer]
    # Copies: what is made in inference mode takes part in no training.
    return Examples(
        states[prompt_length:].cpu()[~kept_tokens].float().clone(),
        accept_chances[~kept_tokens].float().clone(),
        q.amax(-1)[~kept_tokens].float().clone(),
    )


def collect_examples(
    target: Model, draft: Model, texts: Iterable[Text], config: TrainHead, tell: Tell
) -> tuple[Examples, Examples]:
    """Examples to learn from and those held out, whose texts are not those of the others."""
    generator = torch.Generator().manual_seed(config.seed)
    divided_examples: tuple[list[Examples], list[Examples]] = ([], [])
    total = 0
    max_tokens = min(target.context, draft.context)
    for number, (tokens, beginning) in enumerate(_usable_texts(texts, draft.vocab, max_tokens)):
        text_examples = draw_examples(target, draft, (tokens, beginning), config, generator)
        divided_examples[number % HELD_OUT == 1].append(text_examples)
        total += len(text_examples)
        tell("reading", min(total, config.examples), config.examples)
        if total >= config.examples:
            break
    if not all(any(map(len, part)) for part in divided_examples):
        raise BadConfig(
            f"the texts give {sum(map(len, divided_examples))} pieces that both models can read, "
            "and one to learn from and one to hold out are needed: give more, of "
            f"{LEAST} tokens or longer"
        )
    learnt_examples, held_out = (_join_examples(part) for part in divided_examples)
    return learnt_examples, held_out


def _usable_texts(texts: Iterable[Text], vocab: int, max_tokens: int) -> Iterator[Text]:
    """Yields long enough texts that both models can read, cut to what these hold."""
    for tokens, prompt_length in texts:
        cut_tokens = tokens[:max_tokens]
        if len(cut_tokens) - prompt_length >= LEAST and max(cut_tokens) < vocab:
            yield cut_tokens, prompt_length


def _join_examples(parts: Sequence[Examples]) -> Examples:
    return Examples(
        torch.cat([part.states for part in parts]),
        torch.cat([part.chances for part in parts]),
        torch.cat([part.confidence for part in parts]),
    )


# --- learning


def acceptance_loss(logits: torch.Tensor, chances: torch.Tensor, rejected: float) -> torch.Tensor:
    """The mean cross entropy of logits (n, 2) with the probabilities (n,) of acceptance, in which a
    rejection weighs `rejected` times as much.
    """
    logs = logits.log_softmax(-1)
    return -(rejected * (1 - chances) * logs[:, 0] + chances * logs[:, 1]).mean()


def fit_head(learnt: Examples, config: TrainHead, tell: Tell) -> AcceptanceHead:
    """A head trained on these examples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = AcceptanceHead(learnt.states.shape[1], config.blocks)
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=config.rate)
    steps = config.epochs * math.ceil(len(learnt) / config.batch)
    steps_done = 0
    last_report = 0.0
    for _ in range(config.epochs):
        row_order = torch.randperm(len(learnt), generator=generator)
        for batch_rows in row_order.split(config.batch):
            for group in optimiser.param_groups:
                group["lr"] = config.rate * (1 - steps_done / steps)
            logits = head(learnt.states[batch_rows])
            loss = acceptance_loss(logits, learnt.chances[batch_rows], config.rejected)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps_done += 1
            if time.monotonic() - last_report > SECONDS:
                last_report = time.monotonic()
                tell("training", steps_done, steps)
    return head.requires_grad_(False).eval()


def auc(scores: torch.Tensor, chances: torch.Tensor) -> float:
    """The probability that an accepted token has a higher score than a rejected one; ties count
    half. 0.5: the scores tell nothing. NaN: all are accepted, or all rejected.

    scores, probabilities (n,): each token is accepted with its probability.
    """
    distinct_scores, score_numbers = scores.double().unique(return_inverse=True)
    accepted = torch.zeros(len(distinct_scores), dtype=torch.float64)
    rejected = accepted.clone()
    accepted.index_add_(0, score_numbers, chances.double())
    rejected.index_add_(0, score_numbers, 1 - chances.double())
    rejected_below = rejected.cumsum(0) - rejected / 2
    pair_count = float(accepted.sum() * rejected.sum())
    return float((accepted * rejected_below).sum()) / pair_count if pair_count else math.nan


def train_acceptance_head(
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
        raise Unsupported.missing_capability(
            "train acceptance-head", target.name, "a 'draft' model", cure
        )
    if "taps" not in draft.caps:
        cure = "take another draft model"
        raise Unsupported.missing_capability(
            "train acceptance-head", draft.name, "hidden states", cure
        )
    learnt, held_out = collect_examples(target, draft, texts, config, tell)
    head = fit_head(learnt, config, tell)
    save_acceptance_head(head, out)
    with torch.no_grad():
        logits = head(held_out.states)
    return {
        "examples": len(learnt),
        "held_out": len(held_out),
        "accepted": float(held_out.chances.mean()),
        "loss": float(acceptance_loss(logits, held_out.chances, config.rejected)),
        "auc": auc(logits.softmax(-1)[:, 1], held_out.chances),
        "confidence_auc": auc(held_out.confidence, held_out.chances),
    }

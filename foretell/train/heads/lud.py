"""Tunes a model by a LoRA to say lexical units at once: `foretell train lud`.

A unit is a longest run of an answer's tokens of which each behind the first had at least a chance
of `sure` under the target that wrote the answer. Behind the token before a unit stand PAD rows, one
for each of its tokens but the first, which learn these tokens; rows behind its end learn nothing.
The loss of the ordinary next token of all answers goes on beside it.

Source: Sun et al., "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units
for LLMs" (arXiv 2405.15208), as its abstract tells it; its code was never published.
Differs: a unit of more than k tokens is cut every k, where decoding begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.drafters.heads.networks.folder import build, target_shape
from foretell.errors import BadConfig
from foretell.train import recipes
from foretell.train.answers import Text
from foretell.train.heads.tuned import Tuned, TunedRun, answers_of, check, export

if TYPE_CHECKING:
    from foretell.api.lm import LM

KIND = "lud"


@dataclass(frozen=True)
class TrainLud:
    """Settings of the run. Lengths are in tokens."""

    k: int = 4  # tokens of a step at most
    sure: float = 0.9  # least chance of a unit's tokens behind its first
    units: int = 8  # of a text that are learnt from at once
    rank: int = 32  # of the adapters
    alpha: int = 32  # their output counts alpha / rank
    dropout: float = 0.0  # of their input
    window: int = 640  # tokens of the longest text
    tokens: int = 1_000_000  # tokens of texts in all, prompts included
    batch: int = 1_024  # tokens a step
    rate: float = 0.0001  # learning rate of the adapters
    row_rate: float = 0.01  # learning rate of the PAD row
    warmup: int = 20  # steps over which the rates rise
    decay: float = 0.6  # share of the run over which the rates fall to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        ranges = {
            **{name: bounds for name, bounds in recipes.OF_RUNS.items() if name != "micro"},
            "k": (2, 16),
            "units": recipes.SIZE,
            "rank": (1, 1024),
            "alpha": (1, 4096),
            "dropout": (0, 0.99),
            "rate": recipes.RATE,
            "row_rate": recipes.RATE,
        }
        recipes.check(self, ranges)
        if not 0.5 < self.sure < 1:  # then it is the likeliest token, and no other
            raise BadConfig.field("sure", self.sure, "above 0.5 and below 1")
        if self.batch < self.window:
            allowed = f"at least window={self.window}, which a lower --window allows"
            raise BadConfig.field("batch", self.batch, allowed)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


def units_of(text: Text, sure: float, k: int) -> list[tuple[int, int]]:
    """The units of an answer, each with its first place and how many tokens it has, k at most."""
    answer = text.tokens[text.prompt :]
    chances = np.exp(text.logprobs[:, 0].astype(np.float64))
    joins = (text.best[:, 0] == answer) & (chances >= sure)
    found: list[tuple[int, int]] = []
    for place, joined in enumerate(joins, text.prompt):
        if found and joined and found[-1][1] < k:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found


def rows_of(
    units: Sequence[tuple[int, int]], count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of at most `count` of the units with rows, the place (m,) that each row stands below, and its
    place (m,) in its chain.
    """
    longer = [unit for unit in units if unit[1] > 1]
    if len(longer) > count:
        chosen = np.random.default_rng(seed).choice(len(longer), count, replace=False)
        longer = [longer[number] for number in sorted(chosen)]
    pairs = [(first - 1, place) for first, size in longer for place in range(size - 1)]
    made = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return made[:, 0], made[:, 1]


def loss_of(model: Tuned, text: Text, config: TrainLud, seed: int) -> torch.Tensor:
    """Cross entropy of the answer's tokens, and of those that PAD rows say; means of each."""
    tokens = model.tokens(text)
    _, finals, seen = model.through.text(tokens)
    loss = model.answer_loss(finals, tokens, text.prompt)
    below, places = rows_of(units_of(text, config.sure, config.k), config.units, seed)
    if not len(below):
        return loss
    below, places = below.to(tokens.device), places.to(tokens.device)
    states = model.through.beside(seen, model.head.rows(places, None), below, places, 0)
    return loss + model.cross_entropy(states, tokens[below + places + 2])


@torch.no_grad()
def said(model: Tuned, texts: Sequence[Text], config: TrainLud) -> list[list[float]]:
    """By row, over units that have it: how often it says the unit's token, and of those that it
    says with a chance of `sure` how many are wrong, over all places of the answers.
    """
    rows = config.k - 1
    right, count, trusted, wrong = (np.zeros(rows) for _ in range(4))
    for text in texts:
        tokens = model.tokens(text)
        _, _, seen = model.through.text(tokens)
        ends = len(tokens) - rows - 1
        anchors = torch.arange(max(0, min(text.prompt - 1, ends)), max(0, ends))
        if not len(anchors):
            continue
        places = torch.arange(rows).repeat(len(anchors)).to(tokens.device)
        below = anchors.repeat_interleave(rows).to(tokens.device)
        states = model.through.beside(seen, model.head.rows(places, None), below, places, 0)
        best = model.logits(states).softmax(-1).max(-1)
        hit = (best.indices == tokens[below + places + 2]).cpu().numpy()
        sure = (best.values >= config.sure).cpu().numpy()
        inside = {
            (first - 1, place)
            for first, size in units_of(text, config.sure, config.k)
            for place in range(size - 1)
        }
        pairs = zip(below.tolist(), places.tolist(), hit, sure, strict=True)
        for anchor, place, found, certain in pairs:
            if (anchor, place) in inside:
                count[place] += 1
                right[place] += found
            trusted[place] += certain
            wrong[place] += certain and not found
    shares = right / np.maximum(count, 1), wrong / np.maximum(trusted, 1)
    return [[round(float(share), 4) for share in row] for row in shares]


def train(
    lm: LM,
    files: Sequence[Path],
    out: Path,
    config: TrainLud,
    save_every: float = 300.0,
    quiet: bool = False,
    merged: str = "bfloat16",
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/model and OUT/head, and returns the report.

    `lm`: a model in float32, which is changed. `merged`: number format of OUT/model. `recipe`: all
    that the run was started with, which is kept in its folder. Raises BadConfig, Unsupported.
    """
    target: Any = lm.models["target"]
    check(merged)
    shape = target_shape(target, "train lud")
    out.mkdir(parents=True, exist_ok=True)
    learnt, held_back = answers_of(files, config.window)
    head: Any = build(KIND, shape, {"rows": config.k - 1})
    head.begin(target)
    model = Tuned(target, head.to(target.device), config)
    run = TunedRun(out, config, model)
    run.keep(recipe)
    learned = run.learn(learnt, held_back, loss_of, save_every, quiet)
    hits, wrong = said(model, held_back, config)
    sizes = [size for text in held_back for _, size in units_of(text, config.sure, config.k)]
    report: dict[str, Any] = {
        **learned,
        "tokens_a_unit": round(sum(sizes) / len(sizes), 3),
        "hits": hits,
        "wrong": wrong,
        "recipe": recipe,
    }
    about = {name: report[name] for name in ("hits", "wrong", "tokens_seen")}
    export(lm, model, out, merged, about, report)
    return report

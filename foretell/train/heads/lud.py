"""Tunes a model by a LoRA to say lexical units at once: `foretell train lud`.

A unit is a longest run of an answer's tokens of which each after the first had at least a
probability of `sure` under the target that wrote the answer. After the token before a unit stand
PAD rows, one for each of its tokens but the first, which learn these tokens; rows after its end
learn nothing. The loss of the ordinary next token of all answers goes on beside it.

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

from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig
from foretell.train import recipes
from foretell.train.answers import Text
from foretell.train.heads.tuned import Tuned, TunedRun, check_tuning, export_tuned, split_answers

if TYPE_CHECKING:
    from foretell.api.lm import LM

KIND = "lud"


@dataclass(frozen=True)
class TrainLud:
    """Settings of the run. Lengths are in tokens."""

    k: int = 4  # tokens of a step at most
    sure: float = 0.9  # least probability of a unit's tokens after its first
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
        recipes.check_ranges(self, ranges)
        if not 0.5 < self.sure < 1:  # then it is the likeliest token, and no other
            raise BadConfig.field("sure", self.sure, "above 0.5 and below 1")
        if self.batch < self.window:
            allowed_values = f"at least window={self.window}, which a lower --window allows"
            raise BadConfig.field("batch", self.batch, allowed_values)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


def units_of(text: Text, min_probability: float, k: int) -> list[tuple[int, int]]:
    """The units of an answer, each with its first place and how many tokens it has, k at most."""
    answer = text.tokens[text.prompt :]
    chances = np.exp(text.logprobs[:, 0].astype(np.float64))
    token_joins = (text.top_tokens[:, 0] == answer) & (chances >= min_probability)
    units: list[tuple[int, int]] = []
    for place, joins_unit in enumerate(token_joins, text.prompt):
        if units and joins_unit and units[-1][1] < k:
            units[-1] = units[-1][0], units[-1][1] + 1
        else:
            units.append((place, 1))
    return units


def unit_rows(
    units: Sequence[tuple[int, int]], count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the rows of at most `count` units: the place (m,) that each row stands below, and
    its place (m,) in its chain.
    """
    longer_units = [unit for unit in units if unit[1] > 1]
    if len(longer_units) > count:
        unit_numbers = np.random.default_rng(seed).choice(len(longer_units), count, replace=False)
        longer_units = [longer_units[number] for number in sorted(unit_numbers)]
    pairs = [
        (unit_start - 1, place) for unit_start, size in longer_units for place in range(size - 1)
    ]
    row_places = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
    return row_places[:, 0], row_places[:, 1]


def unit_loss(model: Tuned, text: Text, config: TrainLud, seed: int) -> torch.Tensor:
    """Cross entropy of the answer's tokens, and of those that PAD rows say; means of each."""
    tokens = model.tokens(text)
    _, finals, text_pass = model.through.text(tokens)
    loss = model.answer_loss(finals, tokens, text.prompt)
    anchor_places, row_places = unit_rows(units_of(text, config.sure, config.k), config.units, seed)
    if not len(anchor_places):
        return loss
    anchor_places, row_places = anchor_places.to(tokens.device), row_places.to(tokens.device)
    states = model.through.run_beside(
        text_pass, model.head.rows(row_places, None), anchor_places, row_places, 0
    )
    return loss + model.cross_entropy(states, tokens[anchor_places + row_places + 2])


@torch.no_grad()
def measure_rows(model: Tuned, texts: Sequence[Text], config: TrainLud) -> list[list[float]]:
    """Shares by row, over units that have it: how often it says the unit's token, and of those that
    it says with a probability of `sure` how many are wrong, over all places of the answers.
    """
    rows = config.k - 1
    right_counts, unit_counts, sure_counts, wrong_counts = (np.zeros(rows) for _ in range(4))
    for text in texts:
        tokens = model.tokens(text)
        _, _, text_pass = model.through.text(tokens)
        last_anchor = len(tokens) - rows - 1
        anchors = torch.arange(max(0, min(text.prompt - 1, last_anchor)), max(0, last_anchor))
        if not len(anchors):
            continue
        row_places = torch.arange(rows).repeat(len(anchors)).to(tokens.device)
        anchor_places = anchors.repeat_interleave(rows).to(tokens.device)
        states = model.through.run_beside(
            text_pass, model.head.rows(row_places, None), anchor_places, row_places, 0
        )
        likeliest = model.logits(states).softmax(-1).max(-1)
        row_hits = (likeliest.indices == tokens[anchor_places + row_places + 2]).cpu().numpy()
        is_sure = (likeliest.values >= config.sure).cpu().numpy()
        unit_places = {
            (unit_start - 1, row_place)
            for unit_start, size in units_of(text, config.sure, config.k)
            for row_place in range(size - 1)
        }
        pairs = zip(anchor_places.tolist(), row_places.tolist(), row_hits, is_sure, strict=True)
        for anchor, row_place, is_right, is_certain in pairs:
            if (anchor, row_place) in unit_places:
                unit_counts[row_place] += 1
                right_counts[row_place] += is_right
            sure_counts[row_place] += is_certain
            wrong_counts[row_place] += is_certain and not is_right
    shares = right_counts / np.maximum(unit_counts, 1), wrong_counts / np.maximum(sure_counts, 1)
    return [[round(float(share), 4) for share in row] for row in shares]


def train_lud(
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
    check_tuning(merged)
    shape = target_shape(target, "train lud")
    out.mkdir(parents=True, exist_ok=True)
    learnt, held_back = split_answers(files, config.window)
    head: Any = build_head(KIND, shape, {"rows": config.k - 1})
    head.take_weights(target)
    model = Tuned(target, head.to(target.device), config)
    run = TunedRun(out, config, model)
    run.keep_recipe(recipe)
    learned = run.learn(learnt, held_back, unit_loss, save_every, quiet)
    hits, wrong_shares = measure_rows(model, held_back, config)
    unit_sizes = [size for text in held_back for _, size in units_of(text, config.sure, config.k)]
    report: dict[str, Any] = {
        **learned,
        "tokens_a_unit": round(sum(unit_sizes) / len(unit_sizes), 3),
        "hits": hits,
        "wrong": wrong_shares,
        "recipe": recipe,
    }
    report_extract = {name: report[name] for name in ("hits", "wrong", "tokens_seen")}
    export_tuned(lm, model, out, merged, report_extract, report)
    return report

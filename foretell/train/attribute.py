"""Trains the classifier of `conditional-beam`: `foretell train attribute`.

The model answers prompts in ways of its own: by beam search, which finds the likeliest texts, and
by samples. Every answer is labelled by whether it meets a condition, and so is each of its
beginnings. The classifier is a logistic regression of that label on the target's state at the
beginning's last token, in which both labels weigh alike. A tenth of the prompts chooses its
strength, another tenth says how well it ranks what it has not seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretell.bench.sets import prompt_ids
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.ops.fingerprint import norm_mark
from foretell.strategies.beam.conditions import Condition
from foretell.train import recipes
from foretell.train.acceptance import answered
from foretell.train.judge import PARTS, chosen
from foretell.verification.judge_model import LinearJudge, save

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.core.model import Model

PLACES = 16  # beginnings of an answer that are learnt from, spread evenly; the last is the whole
Labelled = tuple[torch.Tensor, torch.Tensor]  # states (n, E), and whether each is good (n,)
Tell = Callable[[str, int, int], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainAttribute:
    """What is asked of the texts, and which ones are written."""

    least: int = 1  # tokens of a text before its end at least
    grams: int = 4  # size of an n-gram that does not stand twice in it; 0: may
    pattern: str = ""  # regular expression that matches the whole text
    beams: int = 5  # answers of a beam search to each prompt; 0: none
    samples: int = 4  # drawn answers to each
    answer_tokens: int = 64  # of an answer at most
    seed: int = 0  # of the draws, and of the prompts that are held back

    def __post_init__(self) -> None:
        ranges = {"beams": (0, 64), "samples": (0, 256), "answer_tokens": (1, 1 << 16)}
        recipes.check(self, {**ranges, "seed": (0, 1 << 31)})
        self.condition.check("attribute")
        if not self.condition or not self.beams + self.samples:
            what = "a condition (least, grams or pattern), and beams or samples"
            raise BadConfig(f"there is nothing to learn: give {what}")

    @property
    def condition(self) -> Condition:
        return Condition(self.least, self.grams, self.pattern)


def answers_to(lm: LM, ids: Sequence[int], config: TrainAttribute) -> list[list[int]]:
    """The model's own texts behind a prompt, each once."""
    found: list[list[int]] = []
    if config.beams:
        method = f"beam:width={config.beams},penalty=0"
        output = lm.generate(list(ids), method, max_new_tokens=config.answer_tokens)
        found += [one.tokens for one in output.samples]
    if config.samples:
        options = {"n": config.samples, "temperature": 1.0, "seed": config.seed}
        output = lm.generate(list(ids), "plain", max_new_tokens=config.answer_tokens, **options)
        found += [one.tokens for one in output.samples]
    return [list(text) for text in dict.fromkeys(map(tuple, found)) if text]


def states_of(target: Model, ids: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """The target's states (n, E) at some tokens of an answer, in float32."""
    count = min(PLACES, len(text))
    places = [len(ids) - 1 + round((i + 1) * len(text) / count) for i in range(count)]
    last = len(target.layout)
    tree = TokenTree(ids[0]).chain([*ids[1:], *text])
    reply = answered(target, Ask(tree, rows=[0], taps=(last,)))
    return reply.hidden[last][places].cpu().float().clone()


def labelled(lm: LM, ids: Sequence[int], config: TrainAttribute) -> Labelled:
    """The states of beginnings of the model's answers to a prompt, with the answers' labels."""
    states, good = [], []
    for text in answers_to(lm, ids, config):
        label = config.condition.label(tuple(text), lm.engine.eos, lm.decode)
        found = lm.driver.run(partial(states_of, lm.models["target"], ids, text))
        states.append(found)
        good.append(torch.full((len(found),), float(label)))
    return torch.cat(states), torch.cat(good)


def train(
    lm: LM, prompts: Sequence[Any], out: Path, config: TrainAttribute, tell: Tell
) -> dict[str, Any]:
    """Writes the classifier to a file; returns what came of it.

    Raises BadConfig where the texts are too few or all alike, Unsupported without hidden states.
    """
    target = lm.models["target"]
    if "taps" not in target.caps:
        cure = "use another model"
        raise Unsupported.missing("train attribute", target.name, "hidden states", cure)
    found: list[Labelled] = []
    order = list(prompts)
    random.Random(config.seed).shuffle(order)
    for number, prompt in enumerate(order):
        tell("answering", number, len(order))
        try:
            found.append(labelled(lm, prompt_ids(lm, prompt), config))
        except PromptTooLong:
            continue
    held, choosing = found[::PARTS], found[1::PARTS]
    learnt = [one for number, one in enumerate(found) if number % PARTS > 1]
    parts = [joined(some) for some in (learnt, choosing, held) if some]
    if len(parts) < 3 or not all(0 < float(good.mean()) < 1 for _, good in parts):
        raise BadConfig(
            f"{len(found)} prompts gave texts, too few to learn from, to choose by and to hold "
            "back with both kinds in each: give more prompts, or another condition"
        )
    tell("fitting", 0, 1)
    best = chosen(parts[0], parts[1])
    mark = norm_mark(target)
    save(LinearJudge(best.weight.float(), best.bias.float(), frozenset(), mark), out)
    every = joined(found)[1]
    return {
        "prompts": len(found),
        "beginnings": len(every),
        "good": float(every.mean()),
        "strength": best.strength,
        "auc": best.rank(*parts[2]),
    }


def joined(some: Sequence[Labelled]) -> Labelled:
    return torch.cat([states for states, _ in some]), torch.cat([good for _, good in some])

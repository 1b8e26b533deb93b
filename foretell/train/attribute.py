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
from foretell.strategies.search.conditions import Condition
from foretell.train import recipes
from foretell.train.acceptance import answer_ask
from foretell.train.judge import PARTS, choose_judge
from foretell.verification.judge_model import LinearJudge, save_judge

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.core.model import Model

PLACES = 16  # beginnings of an answer that are learnt from, spread evenly; the last is the whole
Labelled = tuple[torch.Tensor, torch.Tensor]  # states (n, E), and whether each is good (n,)
Tell = Callable[[str, int, int], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainAttribute:
    """Condition that texts are to meet, and which texts are written."""

    least: int = 1  # tokens of a text before its end at least
    grams: int = 4  # size of an n-gram that does not stand twice in it; 0: may
    pattern: str = ""  # regular expression that matches the whole text
    beams: int = 5  # answers of a beam search to each prompt; 0: none
    samples: int = 4  # drawn answers to each
    answer_tokens: int = 64  # of an answer at most
    seed: int = 0  # of the draws, and of the prompts that are held back

    def __post_init__(self) -> None:
        ranges = {"beams": (0, 64), "samples": (0, 256), "answer_tokens": (1, 1 << 16)}
        recipes.check_ranges(self, {**ranges, "seed": (0, 1 << 31)})
        self.condition.check("attribute")
        if not self.condition or not self.beams + self.samples:
            requirement = "a condition (least, grams or pattern), and beams or samples"
            raise BadConfig(f"there is nothing to learn: give {requirement}")

    @property
    def condition(self) -> Condition:
        return Condition(self.least, self.grams, self.pattern)


def answers_to(lm: LM, ids: Sequence[int], config: TrainAttribute) -> list[list[int]]:
    """The model's own texts after a prompt, each once."""
    texts: list[list[int]] = []
    if config.beams:
        method = f"beam:width={config.beams},penalty=0"
        output = lm.generate(list(ids), method, max_new_tokens=config.answer_tokens)
        texts += [sample.tokens for sample in output.samples]
    if config.samples:
        options = {"n": config.samples, "temperature": 1.0, "seed": config.seed}
        output = lm.generate(list(ids), "plain", max_new_tokens=config.answer_tokens, **options)
        texts += [sample.tokens for sample in output.samples]
    return [list(text) for text in dict.fromkeys(map(tuple, texts)) if text]


def beginning_states(target: Model, ids: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """The target's states (n, E) at some tokens of an answer, in float32."""
    count = min(PLACES, len(text))
    token_places = [len(ids) - 1 + round((i + 1) * len(text) / count) for i in range(count)]
    last_layer = len(target.layout)
    tree = TokenTree(ids[0]).chain([*ids[1:], *text])
    reply = answer_ask(target, Ask(tree, rows=[0], taps=(last_layer,)))
    return reply.hidden[last_layer][token_places].cpu().float().clone()


def label_beginnings(lm: LM, ids: Sequence[int], config: TrainAttribute) -> Labelled:
    """The states of beginnings of the model's answers to a prompt, with the answers' labels."""
    states, labels = [], []
    for text in answers_to(lm, ids, config):
        label = config.condition.label(tuple(text), lm.engine.eos, lm.decode)
        text_states = lm.driver.run(partial(beginning_states, lm.models["target"], ids, text))
        states.append(text_states)
        labels.append(torch.full((len(text_states),), float(label)))
    return torch.cat(states), torch.cat(labels)


def train_attribute(
    lm: LM, prompts: Sequence[Any], out: Path, config: TrainAttribute, tell: Tell
) -> dict[str, Any]:
    """Writes the classifier to a file; returns what came of it.

    Raises BadConfig where the texts are too few or all alike, Unsupported without hidden states.
    """
    target = lm.models["target"]
    if "taps" not in target.caps:
        cure = "use another model"
        raise Unsupported.missing_capability("train attribute", target.name, "hidden states", cure)
    labelled_prompts: list[Labelled] = []
    prompt_order = list(prompts)
    random.Random(config.seed).shuffle(prompt_order)
    for prompt_number, prompt in enumerate(prompt_order):
        tell("answering", prompt_number, len(prompt_order))
        try:
            labelled_prompts.append(label_beginnings(lm, prompt_ids(lm, prompt), config))
        except PromptTooLong:
            continue
    held_back, choosing = labelled_prompts[::PARTS], labelled_prompts[1::PARTS]
    learnt = [
        labelled
        for prompt_number, labelled in enumerate(labelled_prompts)
        if prompt_number % PARTS > 1
    ]
    parts = [
        join_labelled(labelled_part)
        for labelled_part in (learnt, choosing, held_back)
        if labelled_part
    ]
    if len(parts) < 3 or not all(0 < float(labels.mean()) < 1 for _, labels in parts):
        raise BadConfig(
            f"{len(labelled_prompts)} prompts gave texts, too few to learn from, to choose by and "
            "to hold back with both kinds in each: give more prompts, or another condition"
        )
    tell("fitting", 0, 1)
    judge = choose_judge(parts[0], parts[1])
    target_mark = norm_mark(target)
    save_judge(LinearJudge(judge.weight.float(), judge.bias.float(), frozenset(), target_mark), out)
    all_labels = join_labelled(labelled_prompts)[1]
    return {
        "prompts": len(labelled_prompts),
        "beginnings": len(all_labels),
        "good": float(all_labels.mean()),
        "strength": judge.strength,
        "auc": judge.rank(*parts[2]),
    }


def join_labelled(labelled_parts: Sequence[Labelled]) -> Labelled:
    return torch.cat([states for states, _ in labelled_parts]), torch.cat(
        [labels for _, labels in labelled_parts]
    )

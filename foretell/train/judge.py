"""Trains the judge of rule `judge`: `foretell train judge`.

The labels are AutoJudge's (github.com/garipovroma/autojudge): the target answers a task greedily;
at each place where a draft model's best token is another one, that token is put in and the target
writes on greedily. Is the task's answer still the same, the mismatch was unimportant and the new
text takes the old one's place; else it was important, and the old text stays. So every mismatch is
judged below the text that the ones before it left. The judge is a logistic regression of that label
on the target's state at the token that was put in, as Bachmann et al. (arXiv:2501.19309) read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

from foretell.bench.answer_tasks import Task
from foretell.bench.sets import prompt_ids
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, BadFile, PromptTooLong, Unsupported, first_message_line
from foretell.ops.files import write_text
from foretell.ops.fingerprint import norm_mark
from foretell.ops.parsing import parse_json
from foretell.train.acceptance import answer_ask, auc, read_tokens
from foretell.train.answers import AT_ONCE
from foretell.verification.judge_model import FILE, LinearJudge, save_judge

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.core.model import Model
    from foretell.speculation.costs import Costs

T = TypeVar("T")
STRENGTHS = tuple(10 ** (-7 + i / 2) for i in range(19))  # of C, the weight of errors: 1e-7 to 100
PARTS = 10  # of the tasks one of so many chooses C; by turns one of so many is held back
ROUNDS = 200  # of L-BFGS at most
PREFIXES = 1 << 30  # bytes of rows that are kept of texts: the next one of a task begins alike
Tell = Callable[[str, int, int], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class TrainJudge:
    """Settings of the run."""

    labels: int = 1_000  # mismatches to be judged, about
    answer_tokens: int = 160  # longest answer; one that goes on is of no use
    seed: int = 0  # of the order of the tasks, and of those made here

    def __post_init__(self) -> None:
        for name, lower, upper in (("labels", 50, 1 << 24), ("answer_tokens", 4, 1 << 16)):
            if not lower <= getattr(self, name) <= upper:
                raise BadConfig.field(name, getattr(self, name), f"between {lower} and {upper}")


@dataclass
class Labels:
    """Labels of n mismatches: whether each was unimportant (n,), the target's states (n, E) at the
    token that was put in and at the one before it, and the target's log-probability (n,) of it.
    """

    good: torch.Tensor
    states: torch.Tensor
    before: torch.Tensor
    logprobs: torch.Tensor

    def __len__(self) -> int:
        return len(self.good)


def plan_judge(tasks: int, config: TrainJudge, costs: Costs) -> str:
    """Says how long a run takes, by the measured costs of the target's forwards."""
    tokens = config.labels * config.answer_tokens // 2
    seconds = tokens * float(costs.curve(AT_ONCE)[-1]) / AT_ONCE
    return (
        f"{tasks:,} tasks, of which as many are answered as give {config.labels:,} labels: "
        f"at most about {seconds / 3600:.1f} hours"
    )


# --- labels


@dataclass
class Walk:
    """A task on its way through its answer.

    `text`: prompt and current answer, of which `prompt` tokens are the prompt; `answer`: what the
    target's own text answers, None where it does not; `place`: all before it is done; `judged`:
    (place, token put in, whether the answer stayed), from left to right.
    """

    text: list[int]
    prompt: int
    answer: str | None
    place: int
    judged: list[tuple[int, int, bool]]

    @property
    def is_done(self) -> bool:
        return self.answer is None or self.place >= len(self.text)

    def save(self, path: Path) -> None:
        """Writes a file, whole or not at all. Raises BadFile."""
        write_text(path, json.dumps(asdict(self)))


def read_walk(path: Path) -> Walk | None:
    """The walk in a file, None where there is no file. Raises BadFile."""
    if not path.exists():
        return None
    try:
        walk = Walk(**parse_json(path.read_text("utf-8")))
        walk.judged = [
            (int(place), int(token), bool(answer_stayed))
            for place, token, answer_stayed in walk.judged
        ]
    except (OSError, ValueError, TypeError) as error:
        complaint = f"is no walk through an answer ({first_message_line(error)})"
        raise BadFile(f"{path}: {complaint}; remove it, and it is made again") from error
    return walk


async def walk_task(lm: LM, task: Task, path: Path, config: TrainJudge) -> AsyncIterator[Walk]:
    """The walk of a task, after each step of it, from where its file left off."""
    draft, barred_tokens = lm.models["draft"], unjudged_tokens(lm)
    prompt = prompt_ids(lm, task.prompt)

    async def written(text: list[int]) -> tuple[list[int], str | None]:
        """The text to its end, and its answer; None where it does not end in time."""
        room = config.answer_tokens - (len(text) - len(prompt))
        output = await lm.agenerate(text, "plain", max_new_tokens=room)
        whole_text = [*text, *output.tokens]
        if output.finish_reason != "stop":
            return whole_text, None
        return whole_text, task.answer(lm.decode(whole_text[len(prompt) :]))

    walk = read_walk(path)
    if walk is None:
        text, answer = await written(prompt)
        walk = Walk(text, len(prompt), answer, len(prompt), [])
    draft_tokens: list[int] = []
    while not walk.is_done:
        draft_tokens = draft_tokens or await best_tokens(lm, draft, walk.text, len(prompt))
        place = walk.place
        token = draft_tokens[place - len(prompt)]
        walk.place += 1
        if token == walk.text[place] or token in barred_tokens:
            continue
        changed_text, answer = await written([*walk.text[:place], token])
        walk.judged.append((place, token, answer == walk.answer))
        if answer == walk.answer:
            walk.text, draft_tokens = changed_text, []
        walk.save(path)
        yield walk
    walk.save(path)
    yield walk


async def best_tokens(lm: LM, draft: Model, text: Sequence[int], first_place: int) -> list[int]:
    """The draft model's best token at each place of a text from `first_place` on."""
    reply = await run_alone(lm, partial(read_tokens, draft, text[:-1], first_place - 1))
    return list(reply.logits.argmax(-1).tolist())


async def run_alone(lm: LM, function: Callable[[], T]) -> T:
    """Runs a function, which has the models to itself between two steps; returns its result."""
    return await asyncio.to_thread(lm.driver.run, function)


def unjudged_tokens(lm: LM) -> frozenset[int]:
    """The tokens that no judge accepts: those that end texts, and the tokenizer's special ones."""
    special = [] if lm.tokenizer is None else lm.tokenizer.all_special_ids
    return frozenset((*lm.engine.eos, *special))


def labels_of(target: Model, walk: Walk) -> Labels:
    """Labels of a walk's judgements, with the target's states: all from one forward over a tree.

    The text that is left at the end has every unimportant token in it; of the important ones, each
    stands beside the token that stayed.
    """
    tree = TokenTree(walk.text[0]).chain(walk.text[1:])
    tree_nodes, parent_places = [], []
    for place, token, _ in walk.judged:
        parent_places.append(place - 1)
        tree_nodes.append(tree.add(place - 1, token))
    last_layer = len(target.layout)
    reply = answer_ask(target, Ask(tree, rows=sorted(set(parent_places)), taps=(last_layer,)))
    states = reply.hidden[last_layer].cpu().float()
    rows = dict(zip(reply.nodes, reply.logits.cpu().float().log_softmax(-1), strict=True))
    return Labels(
        torch.tensor([float(stays) for _, _, stays in walk.judged]),
        states[tree_nodes].clone(),
        states[parent_places].clone(),
        torch.stack([rows[place - 1][token] for place, token, _ in walk.judged]),
    )


def name_of(lm: LM, task: Task) -> str:
    """A task's file: another one where anything is another that its walk depends on."""
    parts = [norm_mark(lm.models["target"]), lm.models["draft"].name, task.prompt, task.words]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def collect_walks(
    lm: LM, tasks: Sequence[Task], folder: Path, config: TrainJudge, tell: Tell
) -> list[Walk]:
    """Walks through tasks side by side until enough is judged; returns what was judged in each.

    Files that are there are kept and gone on with. Raises BadFile.
    """
    paths = {folder / f"{name_of(lm, task)}.json": task for task in tasks}
    walk_order = list(paths)
    random.Random(config.seed).shuffle(walk_order)
    earlier_walks = ((path, read_walk(path)) for path in walk_order)
    walks_by_path = {path: walk for path, walk in earlier_walks if walk is not None}
    walk_order.sort(key=lambda path: path in walks_by_path)  # the last come first
    open_walks = [
        path for path in walk_order if path not in walks_by_path or not walks_by_path[path].is_done
    ]

    def count() -> int:
        total = sum(len(walk.judged) for walk in walks_by_path.values())
        tell("judging", min(total, config.labels), config.labels)
        return total

    async def work() -> None:
        while open_walks and count() < config.labels:
            path = open_walks.pop()
            with contextlib.suppress(PromptTooLong):
                async for walk in walk_task(lm, paths[path], path, config):
                    walks_by_path[path] = walk
                    if count() >= config.labels:
                        return

    async def run() -> None:
        jobs = [asyncio.create_task(work()) for _ in range(AT_ONCE)]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for job in jobs:
                job.cancel()
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    if count() < config.labels:
        lm.limit(prefixes=PREFIXES)
        try:
            asyncio.run(run())
        finally:
            lm.limit()
    return [walk for _, walk in sorted(walks_by_path.items()) if walk.judged]


# --- learning


def join_labels(parts: Sequence[Labels]) -> Labels:
    """The labels of several tasks."""
    return Labels(*(torch.cat([getattr(p, part.name) for p in parts]) for part in fields(Labels)))


def fit_logistic(
    states: torch.Tensor, labels: torch.Tensor, strength: float, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights and bias (E + 1,) of the logistic regression of good (n,) on states (n, E).

    The least of |w|^2 / 2 + strength * the errors' sum, in which both classes weigh alike and the
    bias is free. `start`: where the search begins.
    """
    x = torch.cat([states, states.new_ones(len(states), 1)], 1).double()
    y = labels.double()
    good_share = y.mean()
    weights = torch.where(y > 0, 0.5 / good_share, 0.5 / (1 - good_share))
    w = torch.zeros(x.shape[1], dtype=torch.float64) if start is None else start.clone()
    w.requires_grad_(True)
    # Divided by all that the errors weigh, so that no strength makes steps too small to see.
    scale = 1 + strength * float(weights.sum())
    optimiser = torch.optim.LBFGS(
        [w], max_iter=ROUNDS, tolerance_grad=1e-8, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        errors = F.binary_cross_entropy_with_logits(x @ w, y, weights, reduction="sum")
        value = (w[:-1].square().sum() / 2 + strength * errors) / scale
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return w.detach()


@dataclass
class Fitted:
    """weight (E,) and bias () for states as they are; C, and how well it ranks what chose C."""

    weight: torch.Tensor
    bias: torch.Tensor
    strength: float
    auc: float = 0.0

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """States (n, E) -> the logit (n,) of each being good."""
        return states.double() @ self.weight + self.bias

    def rank(self, states: torch.Tensor, labels: torch.Tensor) -> float:
        """The area under the curve on other labels."""
        return auc(self.scores(states), labels)


def choose_judge(
    learnt: tuple[torch.Tensor, ...], other_labels: tuple[torch.Tensor, ...]
) -> Fitted:
    """The best of all strengths by the ranks of others; each part: states (n, E) and good (n,).

    Of strengths that rank alike, the one whose probabilities fit the others best.
    """
    states, labels = learnt
    state_mean, state_spread = states.double().mean(0), states.double().std(0, correction=0)
    state_spread = torch.where(state_spread > 0, state_spread, torch.ones_like(state_spread))
    normed_states = (states.double() - state_mean) / state_spread
    judges: list[Fitted] = []
    w: torch.Tensor | None = None
    for strength in STRENGTHS:
        w = fit_logistic(normed_states, labels, strength, w)
        weight = w[:-1] / state_spread
        judges.append(Fitted(weight, w[-1] - weight @ state_mean, strength))
        judges[-1].auc = judges[-1].rank(*other_labels)

    def worth(judge: Fitted) -> tuple[float, float]:
        loss = F.binary_cross_entropy_with_logits(
            judge.scores(other_labels[0]), other_labels[1].double()
        )
        return judge.auc, -float(loss)

    return max(judges, key=worth)


def held_back_auc(tasks: Sequence[Labels], name: str) -> float:
    """The area under the curve of all labels by judges of states `name`, each fitted without the
    tenth of the tasks that it ranks.
    """
    scores, all_good = [], []
    for part in range(PARTS):
        held_tasks = tasks[part::PARTS]
        other_tasks = [task for number, task in enumerate(tasks) if number % PARTS != part]
        judge = fit_judge(other_tasks, name)
        held_labels = join_labels(held_tasks)
        scores.append(judge.scores(getattr(held_labels, name)))
        all_good.append(held_labels.good)
    return auc(torch.cat(scores), torch.cat(all_good))


def fit_judge(tasks: Sequence[Labels], name: str) -> Fitted:
    """A judge of the states `name` of these tasks, of which about a tenth chooses its strength."""
    parts = tasks[::PARTS], [task for number, task in enumerate(tasks) if number % PARTS]
    choosing, learnt = ((getattr(part, name), part.good) for part in map(join_labels, parts))
    return choose_judge(learnt, choosing)


def train_judge(
    lm: LM, tasks: Sequence[Task], out: Path, config: TrainJudge, tell: Tell
) -> dict[str, Any]:
    """Walks through tasks in OUT/walks, writes OUT/judge.safetensors, returns what came of it.

    Raises BadConfig where the labels are too few, Unsupported without a draft model or hidden
    states.
    """
    check_models(lm)
    walks = collect_walks(lm, tasks, out / "walks", config, tell)
    random.Random(config.seed).shuffle(walks)
    target = lm.models["target"]
    task_labels = []
    for number, walk in enumerate(walks):
        tell("reading", number, len(walks))
        task_labels.append(lm.driver.run(partial(labels_of, target, walk)))
    parts = (
        task_labels[::PARTS],
        [labels for number, labels in enumerate(task_labels) if number % PARTS],
    )
    if len(task_labels) < 2 * PARTS or not all(
        0 < float(join_labels(part).good.mean()) < 1 for part in parts
    ):
        raise BadConfig(
            f"{len(task_labels)} tasks gave labels, too few to learn from, to choose by and "
            "to hold back with both kinds in each: give more tasks, or more --labels"
        )
    tell("fitting", 0, 1)
    fitted = fit_judge(task_labels, "states")
    judge = LinearJudge(
        fitted.weight.float(), fitted.bias.float(), unjudged_tokens(lm), norm_mark(target)
    )
    save_judge(judge, out / FILE)
    all_labels = join_labels(task_labels)
    return {
        "tasks": len(task_labels),
        "labels": len(all_labels),
        "unimportant": float(all_labels.good.mean()),
        "strength": fitted.strength,
        "chosen_auc": fitted.auc,
        "auc": held_back_auc(task_labels, "states"),
        "early_auc": held_back_auc(task_labels, "before"),
        "chance_auc": auc(all_labels.logprobs, all_labels.good),
    }


def check_models(lm: LM) -> None:
    """Raises Unsupported where there is no draft model, or the target shows no hidden states."""
    target = lm.models["target"]
    if "draft" not in lm.models:
        cure = "name one with --draft"
        raise Unsupported.missing_capability("train judge", target.name, "a 'draft' model", cure)
    if "taps" not in target.caps:
        raise Unsupported.missing_capability(
            "train judge", target.name, "hidden states", "use another model"
        )

"""Group-relative policy optimisation, as LoRA weights of a model: `foretell train grpo`.

In each round the engine draws a group of answers to each of some prompts with the weights as they
are, and a reward says what each is worth. An answer's advantage is its reward less the group's
mean, over the group's standard deviation; its tokens become likelier or less likely by it, as far
as the clipped ratio to the distributions that the round began with allows, and a divergence holds
the model to what it was. Most of the time goes into answers, so they may be drawn in 8 bits and
with drafts: what is learnt is merged into the model's matrices before every round, and read from
OUT/model.

With `hardest` only prompts are learnt from whose greedy answer has the lowest BLEU (BLEUBERI). With
`calibrate` a reward counts by its rank among those of the untrained model's answers, and with `t`
by exp(t rank), for a model that is to win after best-of-n (InfAlign's CTRL).

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1, outcome supervision; Chang et
al., "BLEUBERI" (arXiv 2505.11080), whose settings are the defaults; Balashankar et al., "InfAlign"
(arXiv 2412.19792).
Differs: LoRA in place of all weights, so the rate is ten times theirs; the deviation is that of a
sample (n - 1), as in trl, and of a group whose rewards are equal all advantages are 0;
distributions are those at the temperature that was sampled with, as in trl; the hardest prompts are
found by a greedy answer, where BLEUBERI draws one at temperature 0.7. What 8 bits change in the
distributions that are sampled from is not corrected. InfAlign's optimum is that of `scale=False,
kl="k2"`: the gradient of k3 as a loss is that of the divergence the other way round.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.adapted import LoraLinear, share_modules
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.learning import copy_modules
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.amateur import TrainAmateur, save_lora, with_lora
from foretell.train.heads.medusa_2 import FORMATS
from foretell.train.lm import Run
from foretell.train.preferences.groups import (
    ESTIMATORS,
    Group,
    Part,
    advantages,
    grpo_loss,
    hardest_prompts,
    k3,
    mean_rewards,
    parts_of,
    round_prompts,
    transform_rewards,
)
from foretell.train.preferences.rollouts import (
    Question,
    Tell,
    bleu_of_first,
    check_ranked,
    draw_answers,
    keep_json,
    measure_parts,
    questions_digest,
    sampling_method,
)

if TYPE_CHECKING:
    from foretell.api.lm import LM

HELD_BACK = 8  # one of so many prompts is for measuring
HIGH = 1 << 40  # seeds of what is measured begin here, those of rounds below


@dataclass(frozen=True)
class TrainGrpo:
    """Settings of the run. Lengths are in tokens."""

    reward: str = "bleu"  # what an answer is worth; a row of the prompts may have its own
    rounds: int = 0  # of drawing and learning; 0: until each prompt has come once
    per_round: int = 4  # prompts of a round
    group: int = 8  # answers to each prompt
    iterations: int = 1  # optimiser steps of a round
    answer_tokens: int = 512  # of an answer at most
    prompt_tokens: int = 512  # of a prompt at most; longer ones are left out
    temperature: float = 0.9  # that answers are drawn with
    drafter: str = ""  # that speeds it up, such as suffix; none: plain decoding
    clip: float = 0.2  # how far the ratio of probabilities counts on either side of 1
    beta: float = 0.04  # of the divergence from the untrained model; 0: free
    kl: str = "k3"  # its estimator at each token: k3, or k2
    scale: bool = True  # whether advantages are divided by the group's deviation
    hardest: float = 1.0  # share of the prompts, those whose greedy answer has the lowest BLEU
    calibrate: int = 0  # answers of the untrained model to rank rewards among (InfAlign: 100)
    t: float = 0.0  # with calibrate: 10 to win best-of-n, -10 for worst-of-n, 0: by the rank
    rank: int = 16  # numbers between the two matrices of a layer
    alpha: float = 32.0  # by which, divided by the rank, their product is multiplied
    layers: str = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"  # ends of their names
    rate: float = 0.00001  # learning rate (AdamW)
    warmup: float = 0.05  # share of the run over which the rate rises
    norm: float = 0.2  # that gradients are cut to
    micro: int = 4  # answers a forward
    precision: str = "bfloat16"  # of the forwards that are learnt through, or float32
    seed: int = 0  # of the weights, the draws and the order of prompts

    def __post_init__(self) -> None:
        ranges = {
            "rounds": (0, 1 << 40),
            "per_round": (1, 1 << 20),
            "group": (2, 256),
            "iterations": (1, 1 << 20),
            "answer_tokens": (1, 1 << 20),
            "prompt_tokens": (1, 1 << 20),
            "temperature": (0.01, 100),
            "clip": (0, 1e9),
            "beta": (0, 1e6),
            "hardest": (0, 1),
            "calibrate": (0, 256),
            "t": (-100, 100),
            "rank": (1, 4096),
            "alpha": (1e-3, 1e6),
            "rate": (0, 1),
            "warmup": (0, 1),
            "norm": (1e-9, 1e9),
            "micro": (1, 1 << 20),
            "seed": (0, 1 << 20),
        }
        recipes.check_ranges(self, ranges)
        if self.kl not in ESTIMATORS:
            raise BadConfig.field("kl", self.kl, f"one of {', '.join(ESTIMATORS)}")
        if self.precision not in ("bfloat16", "float32"):
            raise BadConfig.field("precision", self.precision, "bfloat16 or float32")
        if not self.hardest:
            raise BadConfig.field("hardest", self.hardest, "above 0")
        if self.calibrate == 1 or (self.t and not self.calibrate):
            raise BadConfig("t counts for ranks: give calibrate, at least 2, such as 100")

    @property
    def steps(self) -> int:
        return self.rounds

    @property
    def batch(self) -> int:
        return self.per_round * self.group


class GrpoRun(Run):
    """A run folder whose steps are rounds."""

    longer = "rounds"
    unit = "answers"

    def __init__(self, folder: Path, config: TrainGrpo, hf: Any, layers: dict[str, LoraLinear]):
        self.layers = layers
        super().__init__(folder, config, hf, hf)

    def make_optimisers(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        rate = self.config.rate
        return [(torch.optim.AdamW(self.trained.values(), lr=rate, weight_decay=0.0), rate)]

    def update(self) -> None:
        """Takes an optimiser step; the rate rises and then holds."""
        config: TrainGrpo = self.config
        rise = max(1.0, config.warmup * config.rounds)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), config.norm)
        for optimiser, base in zip(self.optimisers, self.rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = base * min(1.0, (self.step + 1) / rise)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def logprobs(self, part: Part) -> torch.Tensor:
        """(n, L) of the answers' tokens, at the temperature that they were drawn with."""
        config: TrainGrpo = self.config
        max_length = part.mask.shape[1]
        device = part.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bfloat16"):
            out = self.model(input_ids=part.ids, use_cache=False, logits_to_keep=max_length + 1)
        rows = out.logits[:, :-1].float().flatten(0, 1) / config.temperature
        labels = part.ids[:, -max_length:].flatten()
        return -F.cross_entropy(rows, labels, reduction="none").view(-1, max_length)

    def learn(self, groups: Sequence[Group], worths: Sequence[torch.Tensor]) -> dict[str, float]:
        """Takes the optimiser steps of a round; returns its loss, divergence and share of clipped
        tokens, of the last one.
        """
        config: TrainGrpo = self.config
        count = sum(len(group.answers) for group in groups)
        round_figures = {"loss": 0.0, "divergence": 0.0, "clipped": 0.0}
        parts: list[Part] = []
        for group, worth in zip(groups, worths, strict=True):
            parts += parts_of(group, worth, config.micro, self.model.device)
        for part in parts:
            with torch.no_grad():
                if config.beta:
                    with untrained_model(self.layers):
                        part.reference = self.logprobs(part)
                if config.iterations > 1:
                    part.drawn_logprobs = self.logprobs(part)
        for _ in range(config.iterations):
            round_figures = dict.fromkeys(round_figures, 0.0)
            for part in parts:
                logprobs = self.logprobs(part)
                sampled = logprobs.detach() if part.drawn_logprobs is None else part.drawn_logprobs
                clip, beta, kl = config.clip, config.beta, config.kl
                losses = grpo_loss(
                    logprobs, sampled, part.reference, part.advantages, part.mask, clip, beta, kl
                )
                loss = losses.sum() / count
                loss.backward()  # type: ignore[no-untyped-call]
                watched_sums = self._watched_sums(logprobs.detach(), sampled, part)
                round_figures["loss"] += loss.item()
                for name, value in watched_sums.items():
                    round_figures[name] += value / count
            if count:
                self.update()
        self.step += 1
        return round_figures

    def _watched_sums(
        self, logprobs: torch.Tensor, drawn_logprobs: torch.Tensor, part: Part
    ) -> dict[str, float]:
        """The sums over answers of what is only looked at."""
        config: TrainGrpo = self.config
        token_weights = part.mask / part.mask.sum(1, keepdim=True)
        divergence = 0.0
        if part.reference is not None:
            divergence = float((k3(part.reference - logprobs) * token_weights).sum())
        signed_change = (logprobs - drawn_logprobs) * part.advantages.sign()[:, None]
        ratio = (logprobs - drawn_logprobs).exp()
        is_clipped = ((ratio - 1).abs() > config.clip) & (signed_change > 0)
        return {"divergence": divergence, "clipped": float((is_clipped * token_weights).sum())}


@contextmanager
def untrained_model(layers: Mapping[str, LoraLinear]) -> Iterator[None]:
    """Makes the model what it was before any training, for the block."""
    scales = {name: lora.scale for name, lora in layers.items()}
    for lora in layers.values():
        lora.scale = 0.0
    try:
        yield
    finally:
        for name, lora in layers.items():
            lora.scale = scales[name]


@torch.no_grad()
def write_model(
    lm: LM, hf: Any, layers: Mapping[str, LoraLinear], folder: Path, format_name: str
) -> None:
    """A folder of the model with its LoRA weights added to its matrices in float32, in the number
    format `format_name`, with the tokenizer.
    """
    twin = share_modules(hf)
    for name, lora in layers.items():
        linear: Any = copy.deepcopy(lora.base)
        linear.weight += (lora.scale * (lora.b @ lora.a)).to(linear.weight)
        twin.set_submodule(name, linear)
    merged_model: Any = copy.deepcopy(twin).to(FORMATS[format_name])
    merged_model.save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)


class Sampler:
    """The engine, with the weights that were learnt so far."""

    def __init__(self, lm: LM, run: GrpoRun, folder: Path, dtype: str, options: Mapping[str, Any]):
        self.lm, self.run = lm, run
        self.folder, self.merged, self.options = folder, dtype, options
        self.config: TrainGrpo = run.config

    def load_engine(self) -> LM:
        """Loads the engine with the weights as they are now."""
        import foretell

        write_model(self.lm, self.run.model, self.run.layers, self.folder, self.merged)
        return foretell.load(self.folder, **self.options)

    def draw(self, lm: LM, questions: Sequence[Question], n: int, seed: int) -> list[Group]:
        config = self.config
        return draw_answers(
            lm,
            questions,
            n,
            config.seed * 1_000_003 + seed,
            tokens=config.answer_tokens,
            temperature=config.temperature,
            drafter=config.drafter,
        )


@dataclass
class Before:
    """Measurements of the untrained model."""

    learnt_prompts: list[int]  # the numbers of the prompts that are learnt from
    bleus: list[float]  # of its greedy answers, where they were asked for
    references: list[list[float]]  # of each prompt ascending rewards, where it is calibrated
    held_back: list[dict[str, Any]]  # of prompts for measuring: their rewards, their tokens


def measure_untrained(
    sampler: Sampler,
    train_questions: Sequence[Question],
    held_questions: Sequence[Question],
    out: Path,
    tell: Tell,
) -> Before:
    """Measures the untrained model, as far as OUT/before does not hold it already."""
    config = sampler.config
    mark = questions_digest([*train_questions, *held_questions])
    stored_mark = keep_json(out / "questions.json", lambda: mark)
    if stored_mark != mark:
        raise BadConfig(
            f"{out} holds a run with other prompts or rewards; repeat them, or choose another --out"
        )
    engines: list[LM] = []

    def engine() -> LM:
        if not engines:
            with untrained_model(sampler.run.layers):
                engines.append(sampler.load_engine())
        return engines[0]

    def held_back(part: Sequence[Question], start: int) -> list[Any]:
        return [asdict(group) for group in sampler.draw(engine(), part, config.group, HIGH + start)]

    def references(part: Sequence[Question], first_number: int) -> list[Any]:
        groups = sampler.draw(engine(), part, config.calibrate, 2 * HIGH + first_number)
        return [sorted(group.rewards) for group in groups]

    def first_answers(part: Sequence[Question], first_number: int) -> list[Any]:
        return bleu_of_first(engine(), part, config.answer_tokens)

    untrained = Before(list(range(len(train_questions))), [], [], [])
    untrained.held_back = measure_parts(out, "held back", held_questions, held_back, tell)
    if not any(group["rewards"] for group in untrained.held_back):
        raise BadConfig("the reward says nothing of any answer, so nothing can be learnt from it")
    if config.hardest < 1:
        untrained.bleus = measure_parts(out, "greedy answers", train_questions, first_answers, tell)
        untrained.learnt_prompts = hardest_prompts(untrained.bleus, config.hardest)
    if config.calibrate:
        ranked_questions = [train_questions[number] for number in untrained.learnt_prompts]
        ranked_questions += held_questions
        untrained.references = measure_parts(out, "references", ranked_questions, references, tell)
    return untrained


def worth_of(group: Group, references: Sequence[float], config: TrainGrpo) -> torch.Tensor:
    """The advantages of a group's answers; 0 where there is nothing to rank them among."""
    counted = group.rewards
    if config.calibrate and not references:
        return torch.zeros(len(counted), dtype=torch.float64)
    if config.calibrate:
        counted = transform_rewards(counted, references, config.t)
    return advantages(counted, config.scale)


def divide_questions(
    questions: Sequence[Question], config: TrainGrpo
) -> tuple[list[Question], ...]:
    """Prompts to learn from, and those for measuring. Raises BadConfig where they are too few, or
    lack what the settings need.
    """
    held_questions = list(questions[HELD_BACK // 2 :: HELD_BACK]) or list(questions[-1:])
    train_questions = [question for question in questions if question not in held_questions]
    if not train_questions:
        raise BadConfig(
            f"{len(questions)} prompts of at most {config.prompt_tokens} tokens, and one to learn "
            "from and another one to measure by are needed; give more, or raise prompt-tokens"
        )
    if config.hardest < 1 and not all(question.references for question in train_questions):
        raise BadConfig(
            "hardest: BLEU compares with references, and some prompts have none; give each row "
            "`references`, or leave it at 1"
        )
    if config.calibrate:
        check_ranked(questions)
    return train_questions, held_questions


def plan_grpo(questions: Sequence[Question], config: TrainGrpo) -> str:
    """Says how many tokens a run takes at most."""
    train_questions, held_questions = divide_questions(questions, config)
    prompt_count = max(1, round(config.hardest * len(train_questions)))
    rounds = config.rounds or math.ceil(prompt_count / config.per_round)
    measured_answers = 2 * len(held_questions) * config.group
    measured_answers += len(train_questions) if config.hardest < 1 else 0
    measured_answers += (prompt_count + len(held_questions)) * config.calibrate
    answer_count = rounds * config.batch
    max_length = max(len(question.ids) for question in questions) + config.answer_tokens
    forward_count = config.iterations * 3 + bool(config.beta) + (config.iterations > 1)
    return (
        f"{len(train_questions):,} prompts to learn from and {len(held_questions):,} to measure "
        f"by; at most {measured_answers * config.answer_tokens:,} tokens are drawn to measure, and "
        f"{answer_count * config.answer_tokens:,} in {rounds:,} rounds to learn from, in the time "
        f"of {forward_count} forwards over {answer_count * max_length:,} tokens with their prompts"
    )


def train_grpo(
    lm: LM,
    questions: Sequence[Question],
    out: Path,
    config: TrainGrpo,
    options: Mapping[str, Any],
    merged: str = "bfloat16",
    save_every: float = 300.0,
    quiet: bool = False,
    recipe: Mapping[str, Any] | None = None,
    tell: Tell = lambda what, done, total: None,
) -> dict[str, Any]:
    """Trains for `config.rounds`; writes OUT/lora and OUT/model, and returns the report.

    `lm`: the model, which stays as it is; a copy of it learns, in float32. `options`: of
    `foretell.load`, by which the engine that draws answers opens OUT/model; `merged`: the number
    format of that folder. `recipe`: all that the run was started with. Raises BadConfig for the
    settings, Unsupported for a model that torch cannot train.
    """
    target: Any = lm.models["target"]
    if type(target) is not Decoder or target.narrow:
        need = "a plain decoder, whose linear layers torch can train"
        cure = "load one of transformers"
        raise Unsupported.missing_capability("train grpo", target.name, need, cure)
    if merged not in FORMATS:
        raise BadConfig.field("merged", merged, f"one of {', '.join(FORMATS)}")
    learnt, held_questions = divide_questions(questions, config)
    lm.resolve(sampling_method(config.group, config.drafter))
    if not config.rounds:
        prompt_count = max(1, round(config.hardest * len(learnt)))
        config = replace(config, rounds=math.ceil(prompt_count / config.per_round))
    shape = TrainAmateur(config.rank, config.alpha, config.layers, seed=config.seed)
    hf = copy_modules(target)
    layers = with_lora(hf, shape)
    embeddings = hf.get_input_embeddings().weight
    if any(lora.base.weight is embeddings for lora in layers.values()):
        raise BadConfig.field("layers", config.layers, "layers that are not the embeddings too")
    out.mkdir(parents=True, exist_ok=True)
    run = GrpoRun(out, config, hf, layers)
    run.keep_recipe(recipe)
    sampler = Sampler(lm, run, out / "model", merged, options)
    untrained = measure_untrained(sampler, learnt, held_questions, out / "before", tell)
    run.run_steps(lambda: one_round(sampler, learnt, untrained, out), save_every, quiet)
    save_lora(out / "lora", layers, shape, target.name)
    last_groups = sampler.draw(sampler.load_engine(), held_questions, config.group, HIGH)
    first_groups = [Group(**held_group) for held_group in untrained.held_back]
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "rounds": config.rounds,
        "prompts": len(untrained.learnt_prompts),
        "held_back": len(held_questions),
        "before": mean_rewards(first_groups),
        "after": mean_rewards(last_groups),
        "settings": asdict(config),
        "recipe": recipe,
    }
    if untrained.bleus:
        hard_bleus = [untrained.bleus[number] for number in untrained.learnt_prompts]
        report["bleu"] = {"all": _mean(untrained.bleus), "hardest": _mean(hard_bleus)}
    if config.calibrate:
        held_references = untrained.references[len(untrained.learnt_prompts) :]
        win_ranks = [
            transform_rewards(group.rewards, references, 0.0)
            for group, references in zip(last_groups, held_references, strict=True)
            if references
        ]
        report["win_rate"] = _mean([held_group for group in win_ranks for held_group in group])
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report


def one_round(sampler: Sampler, learnt: Sequence[Question], untrained: Before, out: Path) -> float:
    """Draws answers, learns from them, and notes what came of it; returns the loss."""
    run, config = sampler.run, sampler.config
    places = round_prompts(len(untrained.learnt_prompts), config.per_round, run.step, config.seed)
    questions = [learnt[untrained.learnt_prompts[place]] for place in places]
    engine = sampler.load_engine()
    groups = sampler.draw(engine, questions, config.group, run.step * config.per_round)
    worths = []
    for place, group in zip(places, groups, strict=True):
        references = untrained.references[place] if config.calibrate else ()
        worths.append(worth_of(group, references, config))
    round_figures = run.learn(groups, worths)
    log_line = {"round": run.step, **mean_rewards(groups), **round_figures}
    log_line["equal"] = sum(not bool(worth.any()) for worth in worths) / len(worths)
    with (out / "rounds.jsonl").open("a") as log:
        log.write(json.dumps(log_line) + "\n")
    return round_figures["loss"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

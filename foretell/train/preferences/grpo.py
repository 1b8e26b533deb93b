"""Group-relative policy optimisation, as LoRA weights of a model: `foretell train grpo`.

In each round the engine draws a group of answers to each of some prompts with the weights as they
are, and a reward says what each is worth. An answer's advantage is its reward less the group's
mean, over the group's standard deviation; its tokens become likelier or less likely by it, as far
as the clipped ratio to the laws that the round began with allows, and a divergence holds the model
to what it was. Most of the time goes into answers, so they may be drawn in 8 bits and with drafts:
what is learnt is merged into the model's matrices before every round, and read from OUT/model.

With `hardest` only prompts are learnt from whose greedy answer has the lowest BLEU (BLEUBERI). With
`calibrate` a reward counts by its rank among those of the untrained model's answers, and with `t`
by exp(t rank), for a model that is to win after best-of-n (InfAlign's CTRL).

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1, outcome supervision; Chang et
al., "BLEUBERI" (arXiv 2505.11080), whose settings are the defaults; Balashankar et al., "InfAlign"
(arXiv 2412.19792).
Differs: LoRA in place of all weights, so the rate is ten times theirs; the deviation is that of a
sample (n - 1), as in trl, and of a group whose rewards are equal all advantages are 0; laws are
those at the temperature that was sampled with, as in trl; the hardest prompts are found by a greedy
answer, where BLEUBERI draws one at temperature 0.7. What 8 bits change in the laws that are sampled
from is not corrected. InfAlign's optimum is that of `scale=False, kl="k2"`: the gradient of k3 as a
loss is that of the divergence the other way round.
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
from foretell.models.decoder.adapted import LoraLinear, shared
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.learning import copied
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.amateur import TrainAmateur, save, with_lora
from foretell.train.heads.medusa_2 import FORMATS
from foretell.train.lm import Run
from foretell.train.preferences.groups import (
    ESTIMATORS,
    Group,
    Part,
    advantages,
    hardest,
    k3,
    means,
    objective,
    of_round,
    parts_of,
    transformed,
)
from foretell.train.preferences.rollouts import (
    Question,
    Tell,
    bleu_of_first,
    check_ranked,
    drawn,
    fingerprint,
    in_parts,
    kept,
    sampled,
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
        recipes.check(self, ranges)
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

    def rated(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        rate = self.config.rate
        return [(torch.optim.AdamW(self.trained.values(), lr=rate, weight_decay=0.0), rate)]

    def update(self) -> None:
        """One optimiser step; the rate rises and then holds."""
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
        longest = part.mask.shape[1]
        device = part.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bfloat16"):
            out = self.model(input_ids=part.ids, use_cache=False, logits_to_keep=longest + 1)
        rows = out.logits[:, :-1].float().flatten(0, 1) / config.temperature
        labels = part.ids[:, -longest:].flatten()
        return -F.cross_entropy(rows, labels, reduction="none").view(-1, longest)

    def learn(self, groups: Sequence[Group], worths: Sequence[torch.Tensor]) -> dict[str, float]:
        """The optimiser steps of a round; returns its loss, divergence and share of clipped tokens,
        of the last one.
        """
        config: TrainGrpo = self.config
        count = sum(len(group.answers) for group in groups)
        found = {"loss": 0.0, "divergence": 0.0, "clipped": 0.0}
        parts: list[Part] = []
        for group, worth in zip(groups, worths, strict=True):
            parts += parts_of(group, worth, config.micro, self.model.device)
        for part in parts:
            with torch.no_grad():
                if config.beta:
                    with untrained(self.layers):
                        part.reference = self.logprobs(part)
                if config.iterations > 1:
                    part.old = self.logprobs(part)
        for _ in range(config.iterations):
            found = dict.fromkeys(found, 0.0)
            for part in parts:
                now = self.logprobs(part)
                old = now.detach() if part.old is None else part.old
                clip, beta, kl = config.clip, config.beta, config.kl
                losses = objective(now, old, part.reference, part.worth, part.mask, clip, beta, kl)
                loss = losses.sum() / count
                loss.backward()  # type: ignore[no-untyped-call]
                told = self._told(now.detach(), old, part)
                found["loss"] += loss.item()
                for name, value in told.items():
                    found[name] += value / count
            if count:
                self.update()
        self.step += 1
        return found

    def _told(self, now: torch.Tensor, old: torch.Tensor, part: Part) -> dict[str, float]:
        """The sums over answers of what is only looked at."""
        config: TrainGrpo = self.config
        share = part.mask / part.mask.sum(1, keepdim=True)
        apart = 0.0
        if part.reference is not None:
            apart = float((k3(part.reference - now) * share).sum())
        moved = (now - old) * part.worth.sign()[:, None]
        ratio = (now - old).exp()
        outside = ((ratio - 1).abs() > config.clip) & (moved > 0)
        return {"divergence": apart, "clipped": float((outside * share).sum())}


@contextmanager
def untrained(layers: Mapping[str, LoraLinear]) -> Iterator[None]:
    """The model is what it was before any training."""
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
    lm: LM, hf: Any, layers: Mapping[str, LoraLinear], folder: Path, merged: str
) -> None:
    """A folder of the model with its LoRA weights added to its matrices in float32, in the number
    format `merged`, with the tokenizer.
    """
    twin = shared(hf)
    for name, lora in layers.items():
        linear: Any = copy.deepcopy(lora.base)
        linear.weight += (lora.scale * (lora.b @ lora.a)).to(linear.weight)
        twin.set_submodule(name, linear)
    whole: Any = copy.deepcopy(twin).to(FORMATS[merged])
    whole.save_pretrained(folder)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(folder)


class Sampler:
    """The engine, with the weights that were learnt so far."""

    def __init__(self, lm: LM, run: GrpoRun, folder: Path, merged: str, options: Mapping[str, Any]):
        self.lm, self.run = lm, run
        self.folder, self.merged, self.options = folder, merged, options
        self.config: TrainGrpo = run.config

    def renewed(self) -> LM:
        """It with the weights as they are now."""
        import foretell

        write_model(self.lm, self.run.model, self.run.layers, self.folder, self.merged)
        return foretell.load(self.folder, **self.options)

    def draw(self, lm: LM, questions: Sequence[Question], n: int, seed: int) -> list[Group]:
        config = self.config
        return drawn(
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
    """What is known of the untrained model."""

    chosen: list[int]  # the numbers of the prompts that are learnt from
    bleus: list[float]  # of its greedy answers, where they were asked for
    references: list[list[float]]  # of each prompt ascending rewards, where it is calibrated
    held_back: list[dict[str, Any]]  # of prompts for measuring: their rewards, their tokens


def before(
    sampler: Sampler, train: Sequence[Question], held: Sequence[Question], out: Path, tell: Tell
) -> Before:
    """Measures the untrained model, as far as OUT/before does not hold it already."""
    config = sampler.config
    mark = fingerprint([*train, *held])
    known = kept(out / "questions.json", lambda: mark)
    if known != mark:
        raise BadConfig(
            f"{out} holds a run with other prompts or rewards; repeat them, or choose another --out"
        )
    made: list[LM] = []

    def engine() -> LM:
        if not made:
            with untrained(sampler.run.layers):
                made.append(sampler.renewed())
        return made[0]

    def held_back(part: Sequence[Question], first: int) -> list[Any]:
        return [asdict(one) for one in sampler.draw(engine(), part, config.group, HIGH + first)]

    def references(part: Sequence[Question], first: int) -> list[Any]:
        groups = sampler.draw(engine(), part, config.calibrate, 2 * HIGH + first)
        return [sorted(group.rewards) for group in groups]

    def first_answers(part: Sequence[Question], first: int) -> list[Any]:
        return bleu_of_first(engine(), part, config.answer_tokens)

    found = Before(list(range(len(train))), [], [], [])
    found.held_back = in_parts(out, "held back", held, held_back, tell)
    if not any(group["rewards"] for group in found.held_back):
        raise BadConfig("the reward says nothing of any answer, so nothing can be learnt from it")
    if config.hardest < 1:
        found.bleus = in_parts(out, "greedy answers", train, first_answers, tell)
        found.chosen = hardest(found.bleus, config.hardest)
    if config.calibrate:
        some = [*(train[number] for number in found.chosen), *held]
        found.references = in_parts(out, "references", some, references, tell)
    return found


def worth_of(group: Group, references: Sequence[float], config: TrainGrpo) -> torch.Tensor:
    """The advantages of a group's answers; 0 where there is nothing to rank them among."""
    counted = group.rewards
    if config.calibrate and not references:
        return torch.zeros(len(counted), dtype=torch.float64)
    if config.calibrate:
        counted = transformed(counted, references, config.t)
    return advantages(counted, config.scale)


def divided(questions: Sequence[Question], config: TrainGrpo) -> tuple[list[Question], ...]:
    """Those to learn from, and those for measuring. Raises BadConfig where they are too few, or
    lack what the settings need.
    """
    held = list(questions[HELD_BACK // 2 :: HELD_BACK]) or list(questions[-1:])
    train = [question for question in questions if question not in held]
    if not train:
        raise BadConfig(
            f"{len(questions)} prompts of at most {config.prompt_tokens} tokens, and one to learn "
            "from and another one to measure by are needed; give more, or raise prompt-tokens"
        )
    if config.hardest < 1 and not all(question.references for question in train):
        raise BadConfig(
            "hardest: BLEU compares with references, and some prompts have none; give each row "
            "`references`, or leave it at 1"
        )
    if config.calibrate:
        check_ranked(questions)
    return train, held


def plan(questions: Sequence[Question], config: TrainGrpo) -> str:
    """What a run takes at most, in tokens."""
    train, held = divided(questions, config)
    chosen = max(1, round(config.hardest * len(train)))
    rounds = config.rounds or math.ceil(chosen / config.per_round)
    measured = 2 * len(held) * config.group + (len(train) if config.hardest < 1 else 0)
    measured += (chosen + len(held)) * config.calibrate
    answers = rounds * config.batch
    longest = max(len(question.ids) for question in questions) + config.answer_tokens
    forwards = config.iterations * 3 + bool(config.beta) + (config.iterations > 1)
    return (
        f"{len(train):,} prompts to learn from and {len(held):,} to measure by; at most "
        f"{measured * config.answer_tokens:,} tokens are drawn to measure, and "
        f"{answers * config.answer_tokens:,} in {rounds:,} rounds to learn from, in the time of "
        f"{forwards} forwards over {answers * longest:,} tokens with their prompts"
    )


def train(
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
        raise Unsupported.missing("train grpo", target.name, need, "load one of transformers")
    if merged not in FORMATS:
        raise BadConfig.field("merged", merged, f"one of {', '.join(FORMATS)}")
    learnt, held = divided(questions, config)
    lm.resolve(sampled(config.group, config.drafter))
    if not config.rounds:
        chosen = max(1, round(config.hardest * len(learnt)))
        config = replace(config, rounds=math.ceil(chosen / config.per_round))
    shape = TrainAmateur(config.rank, config.alpha, config.layers, seed=config.seed)
    hf = copied(target)
    layers = with_lora(hf, shape)
    embeddings = hf.get_input_embeddings().weight
    if any(lora.base.weight is embeddings for lora in layers.values()):
        raise BadConfig.field("layers", config.layers, "layers that are not the embeddings too")
    out.mkdir(parents=True, exist_ok=True)
    run = GrpoRun(out, config, hf, layers)
    run.keep(recipe)
    sampler = Sampler(lm, run, out / "model", merged, options)
    known = before(sampler, learnt, held, out / "before", tell)
    run.through(lambda: one_round(sampler, learnt, known, out), save_every, quiet)
    save(out / "lora", layers, shape, target.name)
    last = sampler.draw(sampler.renewed(), held, config.group, HIGH)
    first = [Group(**one) for one in known.held_back]
    report: dict[str, Any] = {
        "parameters": run.size,
        "rounds": config.rounds,
        "prompts": len(known.chosen),
        "held_back": len(held),
        "before": means(first),
        "after": means(last),
        "settings": asdict(config),
        "recipe": recipe,
    }
    if known.bleus:
        hard = [known.bleus[number] for number in known.chosen]
        report["bleu"] = {"all": _mean(known.bleus), "hardest": _mean(hard)}
    if config.calibrate:
        ranks = known.references[len(known.chosen) :]
        won = [
            transformed(group.rewards, some, 0.0)
            for group, some in zip(last, ranks, strict=True)
            if some
        ]
        report["win_rate"] = _mean([one for group in won for one in group])
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report


def one_round(sampler: Sampler, learnt: Sequence[Question], known: Before, out: Path) -> float:
    """Draws answers, learns from them, and notes what came of it; returns the loss."""
    run, config = sampler.run, sampler.config
    places = of_round(len(known.chosen), config.per_round, run.step, config.seed)
    questions = [learnt[known.chosen[place]] for place in places]
    groups = sampler.draw(sampler.renewed(), questions, config.group, run.step * config.per_round)
    worths = []
    for place, group in zip(places, groups, strict=True):
        references = known.references[place] if config.calibrate else ()
        worths.append(worth_of(group, references, config))
    found = run.learn(groups, worths)
    told = {"round": run.step, **means(groups), **found}
    told["equal"] = sum(not bool(worth.any()) for worth in worths) / len(worths)
    with (out / "rounds.jsonl").open("a") as log:
        log.write(json.dumps(told) + "\n")
    return found["loss"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

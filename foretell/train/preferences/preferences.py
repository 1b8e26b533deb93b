"""Teaches a target which of two answers is the better one, by LoRA weights beside its own: what
`foretell train dpo` and `foretell train mango` share.

Both read pairs of answers to one prompt and lower a loss of their log-probabilities. A run folder
can be interrupted at any time: the pairs of a step depend on its number and the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from foretell.bench.prompts import Prompt
from foretell.bench.sets import prompt_ids
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.adapted import LoraLinear
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.learning import copy_modules
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.amateur import HELD_OUT, Example, TrainAmateur, merge_lora, save_lora, with_lora
from foretell.train.lm import Run

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.speculation.costs import Costs

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
IGNORED = -100  # a label without loss
PIECE = 384  # tokens of a forward whose cost is measured
BACKWARD = 2  # forwards that a gradient takes
Pair = tuple[Example, Example]  # one prompt with its better answer, and with the other


@dataclass(frozen=True)
class TrainPairs:
    """Shape of the LoRA weights and of the training. Lengths are in tokens."""

    rank: int = 16
    alpha: float = 32.0
    layers: str = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    length: int = 2048
    epochs: int = 1
    batch: int = 32
    micro: int = 1
    rate: float = 0.00002
    warmup: float = 0.1
    precision: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        recipes.check_ranges(
            self,
            {
                "length": (2, 1 << 20),
                "epochs": (1, 10_000),
                "batch": (1, 1 << 20),
                "micro": (1, 1 << 20),
                "rate": recipes.RATE,
                "warmup": (0, 1),
                "seed": (0, 1 << 31),
            },
        )
        if self.precision not in ("bfloat16", "float32"):
            raise BadConfig.field("precision", self.precision, "bfloat16 or float32")
        _ = self.lora

    @property
    def lora(self) -> TrainAmateur:
        """Settings of the LoRA weights. Raises BadConfig."""
        return TrainAmateur(rank=self.rank, alpha=self.alpha, layers=self.layers, seed=self.seed)

    @property
    def compares(self) -> bool:
        """Whether the loss asks for what the model said before it learnt."""
        raise NotImplementedError

    def loss(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Loss of each pair (n,), by the log-probabilities of both answers (n, 2), as they are and
        as they were, and by how many tokens they have (n, 2).
        """
        raise NotImplementedError

    def numbers(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Numbers of the report on pairs, by the arguments of `loss`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plan:
    """A run over certain pairs: all that must be the same when it goes on."""

    settings: TrainPairs
    pairs: str  # a digest of their tokens
    steps: int
    batch: int
    warmup: int  # steps
    decay: float  # share of the run over which the rate falls to 0

    @classmethod
    def of(cls, settings: TrainPairs, pairs: Sequence[Pair]) -> Plan:
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        steps = math.ceil(settings.epochs * len(pairs) / settings.batch)
        warmup = max(1, round(settings.warmup * steps))
        return cls(settings, digest, steps, settings.batch, warmup, 1 - settings.warmup)


class Reader:
    """Turns answers into tokens, and counts those that it leaves out by the reason.

    `place`: where they are from.
    """

    def __init__(self, lm: LM, length: int, place: str):
        self.lm, self.place = lm, place
        self.length = min(length, lm.models["target"].context)
        self.pairs: list[Pair] = []
        self.left_out: dict[str, int] = {}

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def add(self, prompt: Prompt, better: str, worse: str) -> None:
        """Adds a pair, whose answers both end with the model's end."""
        if better == worse:
            return self.leave_out("of equal answers")
        prompt_tokens = prompt_ids(self.lm, prompt)
        end_tokens = self.lm.engine.eos[:1]
        better_example, worse_example = (
            (
                [*prompt_tokens, *self.lm.encode(text, special=False), *end_tokens],
                len(prompt_tokens),
            )
            for text in (better, worse)
        )
        if max(len(better_example[0]), len(worse_example[0])) > self.length:
            return self.leave_out("too long")
        return self.pairs.append((better_example, worse_example))

    def parts(self) -> tuple[list[Pair], list[Pair]]:
        """Pairs to learn from, and every eighth, which is held out. Raises BadConfig."""
        if len(self.pairs) < 2:
            left_out_text = "".join(
                f"; {count:,} {reason}" for reason, count in self.left_out.items()
            )
            raise BadConfig(
                f"{self.place}: {len(self.pairs)} pairs of answers of at most {self.length} tokens "
                f"with their prompts{left_out_text}; "
                "give one to learn from and one to hold out at least"
            )
        learnt = [pair for number, pair in enumerate(self.pairs) if number % HELD_OUT != 1]
        return learnt, self.pairs[1::HELD_OUT]


def plan_pairs(pairs: Sequence[Pair], config: TrainPairs, costs: Costs) -> str:
    """Says how many hours a run takes, by the measured costs of the target's forwards."""
    tokens = config.epochs * sum(len(side[0]) for pair in pairs for side in pair)
    forward_count = 1 + BACKWARD + config.compares
    seconds = tokens * forward_count * float(costs.curve(PIECE)[-1]) / PIECE
    steps = Plan.of(config, pairs).steps
    return (
        f"{len(pairs):,} pairs, {steps:,} steps over {tokens:,} tokens with their gradients: about "
        f"{seconds / 3600:.1f} hours"
    )


def answer_logprobs(
    hf: Any, rows: Sequence[Example], precision: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of whole answers after their prompts (n,), float32, and how many tokens
    they have (n,). Shorter rows are filled up after, where no token sees the filling.
    """
    max_length = max(len(tokens) for tokens, _ in rows)
    logit_places = (
        max_length - min(prompt_length for _, prompt_length in rows) + 1
    )  # places from the last of a prompt on
    ids = torch.zeros(len(rows), max_length, dtype=torch.long)
    labels = torch.full((len(rows), max_length), IGNORED)
    for row, (tokens, prompt_length) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
    device = hf.device
    half = precision == "bfloat16"
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
        logits = hf(input_ids=ids.to(device), use_cache=False, logits_to_keep=logit_places).logits[
            :, :-1
        ]
    answer_labels = labels[:, max_length - logit_places + 1 :].to(device)
    surprise = F.cross_entropy(
        logits.float().flatten(0, 1),
        answer_labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return -surprise.view_as(answer_labels).sum(1), (answer_labels != IGNORED).sum(1)


@contextmanager
def switched_off(layers: Iterable[LoraLinear]) -> Iterator[None]:
    """Makes the model what it was before it learnt, without gradients, for the block."""
    scales = [(lora, lora.scale) for lora in layers]
    try:
        for lora, _ in scales:
            lora.scale = 0.0
        with torch.no_grad():
            yield
    finally:
        for lora, scale in scales:
            lora.scale = scale


class PairRun(Run):
    """A run folder whose batches are pairs of answers."""

    longer = "steps"
    unit = "pairs"

    def __init__(
        self, folder: Path, settings: TrainPairs, hf: Any, layers: Mapping[str, LoraLinear],
        pairs: Sequence[Pair],
    ):  # fmt: skip
        self.settings, self.layers, self.pairs = settings, layers, pairs
        super().__init__(folder, Plan.of(settings, pairs), hf, hf)

    def make_optimisers(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        weights = [p for p in layers.parameters() if p.requires_grad]
        rate = self.settings.rate
        return [(torch.optim.AdamW(weights, lr=rate, weight_decay=0.0), rate)]

    def step_pairs(self, step: int) -> list[Pair]:
        """The pairs of a step, by their lengths. Each round over all has another order."""
        batch, count = self.settings.batch, len(self.pairs)
        pair_places = range(step * batch, (step + 1) * batch)
        round_orders = {}
        for round_number in {place // count for place in pair_places}:
            generator = torch.Generator().manual_seed(self.settings.seed * 1_000 + round_number)
            round_orders[round_number] = torch.randperm(count, generator=generator).tolist()
        pairs = [self.pairs[round_orders[place // count][place % count]] for place in pair_places]
        return sorted(pairs, key=lambda pair: max(len(pair[0][0]), len(pair[1][0])))

    def forward_pairs(
        self, pairs: Sequence[Pair]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of the loss, each (n, 2), by a forward with these pairs."""
        rows = [side for pair in pairs for side in pair]
        current, counts = answer_logprobs(self.model, rows, self.settings.precision)
        reference = current.detach()
        if self.settings.compares:
            with switched_off(self.layers.values()):
                reference, _ = answer_logprobs(self.model, rows, self.settings.precision)
        return current.view(-1, 2), reference.view(-1, 2), counts.view(-1, 2)

    def advance_on(self) -> float:
        """Takes an optimiser step; returns its mean loss."""
        settings = self.settings
        step_pairs = self.step_pairs(self.step)
        loss_sum = 0.0
        for start in range(0, len(step_pairs), settings.micro):
            loss_arguments = self.forward_pairs(step_pairs[start : start + settings.micro])
            loss = settings.loss(*loss_arguments).sum() / len(step_pairs)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return loss_sum

    @torch.no_grad()
    def report_numbers(self, pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
        """The numbers of these pairs before training and after it, one pair a forward."""
        current_parts = [
            answer_logprobs(self.model, pair, self.settings.precision) for pair in pairs
        ]
        current, counts = (torch.stack(part).cpu() for part in zip(*current_parts, strict=True))
        with switched_off(self.layers.values()):
            rows = [answer_logprobs(self.model, pair, self.settings.precision)[0] for pair in pairs]
        reference = torch.stack(rows).cpu()
        both_sides = {"before": reference, "after": current}
        return {
            when: {
                name: round(float(value), 4)
                for name, value in self.settings.numbers(side, reference, counts).items()
            }
            for when, side in both_sides.items()
        }


def export_pairs(lm: LM, run: PairRun, format_name: str) -> None:
    """Writes OUT/lora as PEFT does and, in the number format `format_name`, OUT/model, whose
    matrices are added up in float32. The LoRA weights become part of the run's model.
    """
    name = lm.models["target"].name
    save_lora(run.folder / "lora", dict(run.layers), run.settings.lora, name)
    if not format_name:
        return
    hf = run.model
    merge_lora(hf, run.layers)
    hf.to(FORMATS[format_name]).save_pretrained(run.folder / "model")
    tokenizer: Any = lm.tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(run.folder / "model")


def check_pairs(lm: LM, format_name: str) -> None:
    """Raises BadConfig for what is no number format, Unsupported for what torch cannot train."""
    if format_name and format_name not in FORMATS:
        raise BadConfig.field("merged", format_name, f"one of {', '.join(FORMATS)}, or empty")
    target = lm.models["target"]
    if type(target) is not Decoder:
        need = "a plain decoder, whose linear layers torch can train"
        raise Unsupported.missing_capability(
            "training", target.name, need, "load one of transformers"
        )


def train_pairs(
    lm: LM,
    reader: Reader,
    out: Path,
    config: TrainPairs,
    save_every: float = 300.0,
    quiet: bool = False,
    merged: str = "bfloat16",
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains on the pairs that were read; writes OUT/lora, OUT/model and OUT/report.json, and
    returns the report. The model of `lm` stays as it is.

    `merged`: number format of OUT/model; "": it is not written. `recipe`: all that the run was
    started with, which is kept in its folder. Raises BadConfig for too few pairs, Unsupported for a
    model that torch cannot train.
    """
    check_pairs(lm, merged)
    learnt, held_out = reader.parts()
    hf = copy_modules(lm.models["target"])
    layers = with_lora(hf, config.lora)
    out.mkdir(parents=True, exist_ok=True)
    run = PairRun(out, config, hf, layers, learnt)
    run.keep_recipe(recipe)
    run.run_steps(run.advance_on, save_every, quiet)
    report = {
        "parameters": run.parameter_count,
        "steps": run.step,
        "pairs": len(learnt),
        "held_out": len(held_out),
        "left_out": reader.left_out,
        **run.report_numbers(held_out),
        "settings": asdict(config),
        "recipe": recipe,
    }
    export_pairs(lm, run, merged)
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

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
from foretell.models.decoder.learning import copied
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.amateur import HELD_OUT, Example, TrainAmateur, merge_lora, save, with_lora
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
        recipes.check(
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
        """What the weights' maker has to know. Raises BadConfig."""
        return TrainAmateur(rank=self.rank, alpha=self.alpha, layers=self.layers, seed=self.seed)

    @property
    def compares(self) -> bool:
        """Whether the loss asks for what the model said before it learnt."""
        raise NotImplementedError

    def loss(self, now: torch.Tensor, before: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Of each pair (n,), by the log-probabilities of both answers (n, 2), as they are and as
        they were, and by how many tokens they have (n, 2).
        """
        raise NotImplementedError

    def numbers(
        self, now: torch.Tensor, before: torch.Tensor, counts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What the report tells of pairs, by the same."""
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

    def add(self, prompt: Prompt, better: str, other: str) -> None:
        """Both answers end with the model's end."""
        if better == other:
            return self.leave_out("of equal answers")
        asked = prompt_ids(self.lm, prompt)
        ends = self.lm.engine.eos[:1]
        first, second = (
            ([*asked, *self.lm.encode(text, special=False), *ends], len(asked))
            for text in (better, other)
        )
        if max(len(first[0]), len(second[0])) > self.length:
            return self.leave_out("too long")
        return self.pairs.append((first, second))

    def parts(self) -> tuple[list[Pair], list[Pair]]:
        """Those to learn from, and every eighth, which is held out. Raises BadConfig."""
        if len(self.pairs) < 2:
            told = "".join(f"; {count:,} {why}" for why, count in self.left_out.items())
            raise BadConfig(
                f"{self.place}: {len(self.pairs)} pairs of answers of at most {self.length} tokens "
                f"with their prompts{told}; give one to learn from and one to hold out at least"
            )
        learnt = [pair for number, pair in enumerate(self.pairs) if number % HELD_OUT != 1]
        return learnt, self.pairs[1::HELD_OUT]


def plan(pairs: Sequence[Pair], config: TrainPairs, costs: Costs) -> str:
    """What a run takes: hours, by the measured costs of the target's forwards."""
    tokens = config.epochs * sum(len(side[0]) for pair in pairs for side in pair)
    forwards = 1 + BACKWARD + config.compares
    seconds = tokens * forwards * float(costs.curve(PIECE)[-1]) / PIECE
    steps = Plan.of(config, pairs).steps
    return (
        f"{len(pairs):,} pairs, {steps:,} steps over {tokens:,} tokens with their gradients: about "
        f"{seconds / 3600:.1f} hours"
    )


def logprobs(
    hf: Any, rows: Sequence[Example], precision: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of whole answers behind their prompts (n,), float32, and how many tokens
    they have (n,). Shorter rows are filled up behind, where no token sees the filling.
    """
    longest = max(len(tokens) for tokens, _ in rows)
    keep = longest - min(asked for _, asked in rows) + 1  # places from the last of a prompt on
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (tokens, asked) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, asked : len(tokens)] = torch.tensor(tokens[asked:])
    device = hf.device
    half = precision == "bfloat16"
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
        logits = hf(input_ids=ids.to(device), use_cache=False, logits_to_keep=keep).logits[:, :-1]
    wanted = labels[:, longest - keep + 1 :].to(device)
    surprise = F.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -surprise.view_as(wanted).sum(1), (wanted != IGNORED).sum(1)


@contextmanager
def switched_off(layers: Iterable[LoraLinear]) -> Iterator[None]:
    """The model is meanwhile what it was before it learnt, and no gradients are kept."""
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

    def rated(self, layers: torch.nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        weights = [p for p in layers.parameters() if p.requires_grad]
        rate = self.settings.rate
        return [(torch.optim.AdamW(weights, lr=rate, weight_decay=0.0), rate)]

    def chosen(self, step: int) -> list[Pair]:
        """The pairs of a step, by their lengths. Each round over all has another order."""
        batch, count = self.settings.batch, len(self.pairs)
        places = range(step * batch, (step + 1) * batch)
        orders = {}
        for turn in {place // count for place in places}:
            draw = torch.Generator().manual_seed(self.settings.seed * 1_000 + turn)
            orders[turn] = torch.randperm(count, generator=draw).tolist()
        found = [self.pairs[orders[place // count][place % count]] for place in places]
        return sorted(found, key=lambda pair: max(len(pair[0][0]), len(pair[1][0])))

    def of_pairs(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the loss asks for, of a forward with these pairs: now, before and counts, (n, 2)."""
        rows = [side for pair in pairs for side in pair]
        now, counts = logprobs(self.model, rows, self.settings.precision)
        before = now.detach()
        if self.settings.compares:
            with switched_off(self.layers.values()):
                before, _ = logprobs(self.model, rows, self.settings.precision)
        return now.view(-1, 2), before.view(-1, 2), counts.view(-1, 2)

    def advance_on(self) -> float:
        """One optimiser step; returns its mean loss."""
        settings = self.settings
        chosen = self.chosen(self.step)
        total = 0.0
        for start in range(0, len(chosen), settings.micro):
            part = self.of_pairs(chosen[start : start + settings.micro])
            loss = settings.loss(*part).sum() / len(chosen)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return total

    @torch.no_grad()
    def told(self, pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
        """The numbers of these pairs before training and after it, one pair a forward."""
        found = [logprobs(self.model, pair, self.settings.precision) for pair in pairs]
        now, counts = (torch.stack(part).cpu() for part in zip(*found, strict=True))
        with switched_off(self.layers.values()):
            rows = [logprobs(self.model, pair, self.settings.precision)[0] for pair in pairs]
        before = torch.stack(rows).cpu()
        both = {"before": before, "after": now}
        return {
            when: {
                name: round(float(value), 4)
                for name, value in self.settings.numbers(side, before, counts).items()
            }
            for when, side in both.items()
        }


def export(lm: LM, run: PairRun, merged: str) -> None:
    """Writes OUT/lora as PEFT does and, in the number format `merged`, OUT/model, whose matrices
    are added up in float32. The LoRA weights become part of the run's model.
    """
    name = lm.models["target"].name
    save(run.folder / "lora", dict(run.layers), run.settings.lora, name)
    if not merged:
        return
    hf = run.model
    merge_lora(hf, run.layers)
    hf.to(FORMATS[merged]).save_pretrained(run.folder / "model")
    tokenizer: Any = lm.tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(run.folder / "model")


def check(lm: LM, merged: str) -> None:
    """Raises BadConfig for what is no number format, Unsupported for what torch cannot train."""
    if merged and merged not in FORMATS:
        raise BadConfig.field("merged", merged, f"one of {', '.join(FORMATS)}, or empty")
    target = lm.models["target"]
    if type(target) is not Decoder:
        need = "a plain decoder, whose linear layers torch can train"
        raise Unsupported.missing("training", target.name, need, "load one of transformers")


def train(
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
    check(lm, merged)
    learnt, held_out = reader.parts()
    hf = copied(lm.models["target"])
    layers = with_lora(hf, config.lora)
    out.mkdir(parents=True, exist_ok=True)
    run = PairRun(out, config, hf, layers, learnt)
    run.keep(recipe)
    run.through(run.advance_on, save_every, quiet)
    report = {
        "parameters": run.size,
        "steps": run.step,
        "pairs": len(learnt),
        "held_out": len(held_out),
        "left_out": reader.left_out,
        **run.told(held_out),
        "settings": asdict(config),
        "recipe": recipe,
    }
    export(lm, run, merged)
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

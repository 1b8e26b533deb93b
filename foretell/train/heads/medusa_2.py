"""Trains Medusa heads together with a LoRA on their target: `foretell train medusa-2`.

The target learns, by small matrices beside its own, to have states from which the next tokens can
be told further ahead, and is held to what it said before: the divergence of its distributions from
those with the adapters off is a part of the loss (self-distillation), so no second model is needed.
The heads' part is small and grows over the run. What comes of it is another model than the target,
with texts of its own; heads draft for that one.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads" (arXiv 2401.10774), sections 2.2.2 and 2.3.2.
Differs: no adapter on the output matrix, which is often also the embeddings, and which the heads
share; AdamW in 32 bits; the rates fall linearly over the last part of the run.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell.drafters.heads.networks.base import Head, Texts
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.errors import BadConfig, Unsupported
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.draft import TextRun, group_lengths
from foretell.train.heads.head import TrainHead, head_loss, read_head
from foretell.train.heads.head_data import Corpus, Known, Teacher, answer_places
from foretell.train.heads.head_report import hit_shares, rank_table, true_ranks
from foretell.train.objectives import cross_entropy, divergence, row_loss
from foretell.train.processes import Processes

if TYPE_CHECKING:
    from foretell.api.lm import LM

KIND = "medusa"
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CARD = """\
# A LoRA on {name} for its Medusa heads

Made by `foretell train medusa-2` (Medusa-2: Cai et al., arXiv 2401.10774). With these adapters
{name} is another model, whose texts are its own; from its states the heads beside this folder
foretell further tokens. Perplexity of the target's own answers, held back from training: {before}
without the adapters, {after} with them.
"""


@dataclass(frozen=True)
class TrainMedusa2:
    """Settings of the run. Lengths are in tokens."""

    rank: int = 32  # of the adapters
    alpha: int = 16  # their output counts alpha / rank
    dropout: float = 0.05  # of their input
    weight: float = 0.01  # of the heads' loss beside the target's
    schedule: str = "sine"  # how that weight grows: sine, linear or constant
    depths: int = 0  # that the heads learn to draft; 0: all
    objective: str = "ce"  # of the heads: ce, kl, tv, tvd++ or certainty
    window: int = 640  # tokens of the longest text
    tokens: int = 1_000_000  # tokens of texts in all, prompts included
    batch: int = 4_096  # tokens a step
    micro: int = 1_024  # tokens a forward
    common: int = 8_192  # commonest tokens, which the heads may draft
    rate: float = 0.0001  # learning rate of the adapters
    head_rate: float = 0.0004  # learning rate of the heads
    warmup: int = 40  # steps over which the rates rise
    decay: float = 0.6  # share of the run over which the rates fall to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        ranges = {
            "rank": (1, 1024),
            "alpha": (1, 4096),
            "dropout": (0, 0.99),
            "weight": (0, 100),
            "common": recipes.SIZE,
            "rate": recipes.RATE,
            "head_rate": recipes.RATE,
        }
        recipes.check_ranges(self, {**recipes.OF_RUNS, **ranges})
        if self.schedule not in SCHEDULES:
            raise BadConfig.field("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        recipes.check_batches(self)
        _ = self.heads

    @property
    def heads(self) -> TrainHead:
        """Settings that the heads' loss reads."""
        return TrainHead(kind=KIND, depths=self.depths, objective=self.objective)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)


SCHEDULES = {
    "sine": lambda done: math.sin(math.pi / 2 * done),
    "linear": lambda done: done,
    "constant": lambda done: 1.0,
}


def check_format(format_name: str) -> None:
    """Raises BadConfig for what is no number format, Unsupported without the package `peft`."""
    if format_name and format_name not in FORMATS:
        raise BadConfig.field("merged", format_name, f"one of {', '.join(FORMATS)}, or empty")
    if find_spec("peft") is None:
        raise Unsupported("peft is not installed: pip install 'foretell[lora]'")


def add_adapters(hf: Any, config: Any) -> Any:
    """The model with adapters on all projections of its layers, which alone are to be trained.

    `config` has their `rank`, `alpha` and `dropout`, and the `seed` of their weights.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about peft
        return get_peft_model(hf, settings)


class LiveTeacher(Teacher):
    """The target as it is now: its states come of forwards, normed, and not of files."""

    def __init__(self, target: Any, adapted: Any, head: Head, draft_tokens: torch.Tensor):
        super().__init__(target, head.taps, head, draft_tokens)
        self.adapted = adapted
        self.decoder = target.hf.get_decoder()

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (B, n), filled up after -> normed last states (B, n, E)."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            out: torch.Tensor = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return out

    @torch.no_grad()
    def original_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Normed last states (B, n, E) of the target as it was before any training."""
        training = self.adapted.training
        self.adapted.eval()
        with self.adapted.disable_adapter():
            states = self.states(ids)
        self.adapted.train(training)
        return states

    def laws_drift(
        self, logits: torch.Tensor, original_states: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """(m,) the divergence of distributions by logits (m, V) from those of the states before (m,
        E).
        """
        original_laws = (
            (original_states.to(self.full_matrix.dtype) @ self.full_matrix.T).float().softmax(-1)
        )
        return divergence(logits, original_laws, labels)

    @torch.no_grad()
    def read_states(self, texts: Sequence[Known], size: int, is_original: bool) -> list[Known]:
        """The texts, in any order, with the states that the target has or had of them."""
        known_texts: list[Known] = []
        self.adapted.eval()
        for group in group_lengths([len(text.tokens) for text in texts], size, 0):
            group_texts = [texts[number] for number in group]
            ids = self.texts(group_texts, 0.0, 0)[0].ids
            states = (
                (self.original_states(ids) if is_original else self.states(ids)).bfloat16().cpu()
            )
            for row, text in enumerate(group_texts):
                known_texts.append(replace(text, states=states[row, : len(text.tokens)]))
        self.adapted.train()
        return known_texts


def joint_loss(
    teacher: LiveTeacher, batch: Texts, answers: torch.Tensor, config: TrainMedusa2, step: int
) -> torch.Tensor:
    """The mean divergence of the target's distributions from what they were, over answers' tokens,
    and the heads' loss with the weight that it has at this step.
    """
    finals = teacher.states(batch.ids)
    row, token_place = answer_places(answers, 0).T
    divergence_sum = row_loss(
        finals[row, token_place],
        teacher.full_matrix,
        teacher.original_states(batch.ids)[row, token_place],
        row,
        teacher.laws_drift,
    )
    head_weight = config.weight * SCHEDULES[config.schedule](step / config.steps)
    if not head_weight:
        return divergence_sum / len(row)
    head = teacher.head
    features = F.pad(finals, (0, 0, head.lag, 0))[:, : finals.shape[1]]
    texts = replace(batch, features=features, finals=finals.detach())
    drafted_loss = head_loss(head, texts, answers, teacher, config.heads)
    return divergence_sum / len(row) + head_weight * head.decay * drafted_loss


@torch.no_grad()
def perplexity(teacher: Teacher, texts: Sequence[Known], size: int) -> float:
    """Perplexity of the answers, by the states that the texts have."""
    nat_sum, token_count = 0.0, 0
    for group in group_lengths([len(text.tokens) for text in texts], size, 0):
        batch, answers = teacher.texts([texts[number] for number in group], 0.0, 0)
        row, token_place = answer_places(answers, 0).T
        labels = batch.ids[row, token_place + 1]
        finals = batch.finals[row, token_place]
        nat_sum += float(row_loss(finals, teacher.full_matrix, labels, labels, cross_entropy))
        token_count += len(row)
    return math.exp(nat_sum / token_count)


class Both(nn.Module):
    """The adapted target and its heads, trained as one."""

    def __init__(self, adapted: nn.Module, head: Head):
        super().__init__()
        self.adapted = adapted
        self.head = head


class Medusa2Run(TextRun):
    """A run folder of adapters and heads."""

    def __init__(
        self, folder: Path, config: TrainMedusa2, teacher: LiveTeacher, processes: Processes
    ):
        self.teacher = teacher
        head = teacher.head
        super().__init__(folder, config, Both(teacher.adapted, head), head, processes)

    def make_optimisers(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        adapters = [p for p in self.teacher.adapted.parameters() if p.requires_grad]
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
        parts = ((adapters, self.config.rate), ([*layers.parameters()], self.config.head_rate))
        return [(torch.optim.AdamW(part, lr=rate, **settings), rate) for part, rate in parts]

    def advance_on(self, corpus: Corpus) -> float:
        """Takes an optimiser step; returns its mean loss."""
        config: TrainMedusa2 = self.config

        def loss(group: list[int], number: int) -> torch.Tensor:
            group_texts = [corpus.train[index] for index in group]
            batch, answers = self.teacher.texts(group_texts, 0.0, 0)
            torch.manual_seed(config.seed * 1_000_003 + number)  # of dropout
            return joint_loss(self.teacher, batch, answers, config, self.step)

        return self.step_on([len(text.tokens) for text in corpus.train], loss)


def export_adapters(
    lm: LM, model: Any, out: Path, format_name: str, report: Mapping[str, Any]
) -> None:
    """Writes OUT/lora as peft reads it and, in the number format `format_name`, OUT/model, of
    matrices that are added up in float32. The adapters become part of the target.
    """
    name = lm.models["target"].name
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(out / "lora", save_embedding_layers=False)
    write_text(out / "lora" / "README.md", CARD.format(name=name, **report["perplexity"]))
    if not format_name:
        return
    merged_model = model.merge_and_unload().to(FORMATS[format_name])
    merged_model.save_pretrained(out / "model")
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(out / "model")


def train_medusa_2(
    lm: LM,
    files: Sequence[Path],
    out: Path,
    config: TrainMedusa2,
    save_every: float = 300.0,
    quiet: bool = False,
    init: Path | None = None,
    merged: str = "bfloat16",
    processes: Processes | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/lora, OUT/head and OUT/model, and returns
    the report.

    `lm`: a model in float32, whose adapters become part of it. `init`: folder of heads to begin
    with; None: heads that say what the target says. `merged`: number format of OUT/model; "": it is
    not written. `processes`: those that share the work; None: there is one, on the CPU. `recipe`:
    all that the run was started with, which is kept in its folder.
    """
    target: Any = lm.models["target"]
    processes = processes or Processes()
    processes.check(config.batch, config.micro)
    check_format(merged)
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(files, None, config.window)
    if init is None:
        head = build_head(KIND, target_shape(target))
        draft_tokens = corpus.commonest(min(config.common, target.vocab), target.vocab)
    else:
        head, draft_tokens = read_head(init, target, KIND)
        head.requires_grad_(True).train()
    if config.depths > head.deepest:
        raise BadConfig.field("depths", config.depths, f"at most {head.deepest} for {KIND}")
    model = add_adapters(target.hf.to(processes.device), config)
    teacher = LiveTeacher(target, model, head.to(processes.device), draft_tokens)
    run = Medusa2Run(out, config, teacher, processes)
    run.keep_recipe(recipe)
    model.train()
    run.run_steps(lambda: run.advance_on(corpus), save_every, quiet)
    original_texts = teacher.read_states(corpus.held_back, config.micro, is_original=True)
    tuned_texts = teacher.read_states(corpus.held_back, config.micro, is_original=False)
    depths = config.depths or head.depths
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "answers": len(corpus.train),
        "perplexity": {
            "before": round(perplexity(teacher, original_texts, config.micro), 4),
            "after": round(perplexity(teacher, tuned_texts, config.micro), 4),
        },
        "hits": hit_shares(head, tuned_texts, teacher, depths, config.micro),
        "ranks": rank_table(true_ranks(head, tuned_texts, teacher, depths, config.micro)),
        "settings": asdict(config),
        "recipe": recipe,
    }
    if processes.is_first:
        report_extract = {name: report[name] for name in ("hits", "ranks", "tokens_seen")}
        save_head(head, draft_tokens, out / "head", target, report_extract)
        export_adapters(lm, model, out, merged, report)
        write_text(out / "report.json", json.dumps(report, indent=1))
    processes.wait()
    return report

"""Trains a head on a target's own answers and its hidden states: `foretell train head`.

The head learns at every depth at once, each from the distributions that the target has there, and
no depth sees more than it will when it drafts. Its output matrix is the target's, cut down to the
commonest tokens, and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from foretell.drafters.heads.networks.base import Drafted, Head, TargetShape, Texts
from foretell.drafters.heads.networks.folder import (
    build_head,
    head_kinds,
    load_head,
    save_head,
    target_shape,
)
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig
from foretell.ops.files import write_text
from foretell.spec import NO, YES, iterate_fields
from foretell.speculation.costs import Costs
from foretell.train import recipes
from foretell.train.answers import AT_ONCE
from foretell.train.draft import TextRun
from foretell.train.heads.head_data import Corpus, Teacher, answer_places
from foretell.train.heads.head_report import hit_shares, mean_overlaps, rank_table, true_ranks
from foretell.train.objectives import (
    OBJECTIVES,
    furthest_behind,
    lag_behind,
    objective_named,
    row_loss,
)
from foretell.train.processes import Processes

if TYPE_CHECKING:
    from foretell.api.lm import LM

PIECE = 128  # tokens of a forward by which the time of reading texts is told


@dataclass(frozen=True)
class TrainHead:
    """Settings of the run. Lengths are in tokens."""

    kind: str = "eagle3"  # of the head, with its fields: hydra:prefix=yes,blocks=4
    depths: int = 0  # that it learns to draft; 0: as many as its paper trains
    objective: str = "kl"  # kl, ce, tv, tvd++ or certainty
    keep: float = 0.4  # share of the tokens that is learnt from beside a reference
    window: int = 640  # tokens of the longest text it is trained on
    tokens: int = 2_400_000  # tokens of texts in all, prompts included
    batch: int = 1_024  # tokens a step
    micro: int = 1_024  # tokens a forward
    common: int = 8_192  # commonest tokens, which it may draft
    anchors: int = 64  # places of a text at which rows learn at once (ppd, hidden-transfer)
    entry: int = -1  # layer that rows enter (hidden-transfer); -1: a third of them below it
    rate: float = 0.0  # learning rate of rows and their maps (Adam, cosine); 0: the paper's
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of norms and biases (AdamW)
    warmup: int = 20  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        rates = dict.fromkeys(("matrix_rate", "other_rate"), recipes.RATE)
        recipes.check_ranges(self, {**recipes.OF_RUNS, "common": recipes.SIZE, **rates})
        trained_kinds = {kind for kind, head in head_kinds().items() if not head.bound}
        if self.name in head_kinds().keys() - trained_kinds:
            allowed_values = (
                f"one that leaves its target as it is; `train {self.name}` makes this one"
            )
            raise BadConfig.field("kind", self.kind, allowed_values)
        if self.name not in trained_kinds:
            raise BadConfig.field("kind", self.kind, f"one of {', '.join(sorted(trained_kinds))}")
        _ = self.options
        if self.objective not in OBJECTIVES:
            raise BadConfig.field("objective", self.objective, f"one of {', '.join(OBJECTIVES)}")
        if not 0 < self.keep <= 1:
            raise BadConfig.field("keep", self.keep, "above 0, and at most 1")
        if not 0 <= self.depths <= 64:
            raise BadConfig.field("depths", self.depths, "between 0 (the paper's) and 64")
        if self.anchors < 1:
            raise BadConfig.field("anchors", self.anchors, "at least 1")
        if self.rate < 0:
            raise BadConfig.field("rate", self.rate, "above 0, or 0 (the paper's)")
        recipes.check_batches(self)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    @property
    def name(self) -> str:
        """The kind without its fields."""
        return self.kind.partition(":")[0]

    @property
    def options(self) -> dict[str, Any]:
        """The fields of the kind. Raises BadConfig for one that training does not make."""
        head = head_kinds()[self.name]
        field_values: dict[str, Any] = {}
        for _, field, text in iterate_fields(self.kind):
            if field not in head.trained:
                known_fields = (
                    f"its fields are {', '.join(head.trained)}" if head.trained else "has none"
                )
                reason = "is of published heads and" if field in head.options else "is"
                raise BadConfig(f"kind={self.kind!r}: {field} {reason} not trained; {known_fields}")
            is_flag = type(head.options[field]) is bool
            if is_flag and text.lower() in YES + NO:
                field_values[field] = text.lower() in YES
            elif not is_flag and text.isdigit():
                field_values[field] = int(text)
            else:
                allowed_values = "yes or no" if is_flag else "a whole number"
                raise BadConfig.field(f"{self.name}:{field}", text, allowed_values)
        return field_values


def taps_of(
    kind: str, target: TargetShape, options: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """Taps whose states are kept: the usual ones of all heads, and those of this kind."""
    usual_taps = (2, target.layers // 2, target.layers - 3, target.layers)
    return tuple(sorted({*usual_taps, *build_head(kind, target, options).taps}))


def plan_head(
    prompts: int,
    answer_tokens: int,
    target: TargetShape,
    taps: Sequence[int],
    config: TrainHead,
    costs: Costs,
) -> str:
    """Says how many bytes and hours a run takes, by the measured costs of the target's forwards."""
    tokens = prompts * answer_tokens
    answer_seconds = tokens * float(costs.curve(AT_ONCE)[-1]) / AT_ONCE
    read_seconds = tokens * float(costs.curve(PIECE)[-1]) / PIECE
    state_bytes = tokens * len(taps) * target.hidden * 2
    return (
        f"at most {tokens:,} tokens of answers: {answer_seconds / 3600:.1f} hours to write them, "
        f"{read_seconds / 3600:.1f} hours and {state_bytes / 1e9:.1f} GB for their states; then "
        f"{config.tokens:,} tokens of training, whose time shows when it begins"
    )


def head_loss(
    head: Head,
    texts: Texts,
    answers: torch.Tensor,
    teacher: Teacher,
    config: TrainHead,
    reference: Head | None = None,
    progress: float = 0.0,
) -> torch.Tensor:
    """The mean over a batch's drafted tokens, depths weighed by `head.decay`.

    With a reference of the same kind it is the mean over those tokens of a depth from which most is
    to be learnt. `progress`: the share of training that is over.
    """
    depths = config.depths or head.depths
    loss_by = objective_named(config.objective)
    rows, columns = answer_places(answers, 0).T  # the target's own distribution is wanted there
    laws = teacher.laws(texts.finals[rows, columns])
    row_numbers = torch.full(texts.ids.shape, -1)
    row_numbers[rows, columns] = torch.arange(len(rows))
    loss_sum = texts.finals.new_zeros((), dtype=torch.float32)
    reference_drafts: Iterator[Drafted | None] = repeat(None)
    with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
        if reference is not None:
            with torch.no_grad():
                reference_drafts = iter(list(reference.unroll_depths(texts, depths)))
        glanced_texts = replace(
            texts, shown=head.glance(texts, answers, teacher.likeliest_tokens, progress)
        )
        for drafted, reference_draft in zip(
            head.unroll_depths(glanced_texts, depths), reference_drafts, strict=False
        ):
            row, token_place = answer_places(answers, drafted.depth, drafted.anchors).T
            if not len(row):
                break
            if reference_draft is not None:
                drafted_laws = laws[row_numbers[row, token_place + drafted.depth]]
                lags = lag_behind(
                    drafted.states[row, token_place],
                    reference_draft.states[row, token_place],
                    teacher.weight,
                    drafted_laws,
                )
                learnt_rows = furthest_behind(lags, config.keep).to(row)
                row, token_place = row[learnt_rows], token_place[learnt_rows]
            law_rows = row_numbers[row, token_place + drafted.depth]
            labels = teacher.names[texts.ids[row, token_place + drafted.depth + 1].cpu()]
            states = drafted.states[row, token_place]
            depth_loss = head.agreement * row_loss(
                states, teacher.weight, laws[law_rows], labels.to(teacher.device), loss_by
            )
            if head.regression and drafted.feature is not None:
                final_states = texts.finals[row, token_place + drafted.depth].float()
                distance = F.smooth_l1_loss(
                    drafted.feature[row, token_place].float(), final_states, reduction="none"
                )
                depth_loss = depth_loss + head.regression * distance.mean(-1).sum()
            loss_sum = loss_sum + head.decay**drafted.depth * depth_loss / len(row)
    return loss_sum


def read_head(
    folder: Path, target: Any, kind: str, options: dict[str, Any] | None = None
) -> tuple[Head, torch.Tensor]:
    """A head that is there already, and the tokens that it drafts. Raises BadConfig for one of
    another build than training makes, as published heads are, or than these options say.
    """
    head, draft_tokens = load_head(folder, target, kind)
    if options is not None and head.config.options != options:
        option_text = " ".join(f"{name}={value}" for name, value in head.config.options.items())
        raise BadConfig(
            f"{folder}: is built with {option_text or 'no fields'}; give --kind the same"
        )
    unknown_options = sorted(head.config.options.keys() - {*head.trained})
    if unknown_options:
        complaint = f"has {', '.join(unknown_options)} of its own"
        raise BadConfig(f"{folder}: {complaint}; begin with a head of `foretell train head`")
    return head, torch.arange(target.vocab) if draft_tokens is None else draft_tokens


@dataclass
class Beginning:
    """Beginning of a run: the head; the tokens that it drafts, None: the commonest of the answers;
    and the head beside which it learns, if any.
    """

    head: Head
    draft_tokens: torch.Tensor | None = None
    reference: Head | None = None


def begin_head(
    target: Any, config: TrainHead, init: Path | None = None, reference: Path | None = None
) -> Beginning:
    """Makes or reads all of it, before anything takes hours. `init`, `reference`: folders of heads
    of the same kind. Raises BadConfig, BadModel, Unsupported.
    """
    torch.manual_seed(config.seed)
    options = config.options
    head = build_head(config.name, target_shape(target, "train head"), options)
    if config.depths > head.deepest:
        raise BadConfig.field("depths", config.depths, f"at most {head.deepest} for {config.kind}")
    head.take_weights(target)
    Output(target, torch.arange(1)).train_weight()  # its output matrix can be cut down
    beginning = Beginning(head)
    if init is not None:
        initial_head, beginning.draft_tokens = read_head(init, target, config.name, options)
        head.load_state_dict(initial_head.state_dict())
    if reference is not None:
        beginning.reference, draft_tokens = read_head(reference, target, config.name, options)
        if beginning.draft_tokens is not None and not torch.equal(
            beginning.draft_tokens, draft_tokens
        ):
            raise BadConfig(f"{init} and {reference} draft other tokens; train both from one")
        refuse_itself(head, beginning.reference, reference)
        beginning.draft_tokens = draft_tokens
        beginning.reference.eval()
    return beginning


def refuse_itself(head: Head, reference: Head, folder: Path) -> None:
    """Raises BadConfig where a head would be its own reference: every token would be as far on."""
    theirs = reference.state_dict()
    ours = head.state_dict()
    if all(torch.equal(ours[name], theirs[name].to(ours[name])) for name in theirs):
        raise BadConfig(
            f"the reference {folder} is the head that training begins with; give one that is "
            "trained already"
        )


class HeadRun(TextRun):
    """A run folder whose batches are groups of answers with their states."""

    def __init__(
        self,
        folder: Path,
        config: TrainHead,
        head: Head,
        reference: Head | None = None,
        processes: Processes | None = None,
    ):
        super().__init__(folder, config, head, head, processes)
        self.reference = reference

    def advance_on(self, corpus: Corpus, teacher: Teacher) -> float:
        """Takes an optimiser step; returns its mean loss."""
        config: Any = self.config

        def loss(group: list[int], number: int) -> torch.Tensor:
            group_texts = [corpus.train[index] for index in group]
            seed = config.seed * 1_000_003 + number
            batch, answers = teacher.texts(group_texts, self.model.noise, seed)
            torch.manual_seed(seed)  # dropout goes on where it was, too
            progress = self.step / config.steps
            return head_loss(self.model, batch, answers, teacher, config, self.reference, progress)

        return self.step_on([len(text.tokens) for text in corpus.train], loss)


def train_head(
    lm: LM,
    files: Sequence[Path],
    states: Sequence[Path],
    taps: Sequence[int],
    out: Path,
    config: TrainHead,
    save_every: float = 300.0,
    quiet: bool = False,
    processes: Processes | None = None,
    init: Path | None = None,
    reference: Path | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/head and returns the report.

    `processes`: those that share the work; None: there is one, on the CPU.

    `init`: folder of a head of the same kind to begin with. `reference`: of one that is trained
    already, beside which the tokens to learn from are chosen. The new head keeps their tokens.
    `recipe`: all that the run was started with, which is kept in its folder.
    """
    target: Any = lm.models["target"]
    processes = processes or Processes()
    processes.check(config.batch, config.micro)
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(files, states, config.window)
    beginning = begin_head(target, config, init, reference)
    head, reference_head = beginning.head.to(processes.device), beginning.reference
    draft_tokens = beginning.draft_tokens
    if draft_tokens is None:
        draft_tokens = corpus.commonest(min(config.common, target.vocab), target.vocab)
    if reference_head is not None:
        reference_head.to(processes.device)
    missing_taps = {*head.taps, head.config.target.layers} - {*taps}
    if missing_taps:
        raise BadConfig(
            f"the states have taps {list(taps)}, and {config.kind} needs {missing_taps} too"
        )
    teacher = Teacher(target, taps, head, draft_tokens)
    run = HeadRun(out, config, head, reference_head, processes)
    run.keep_recipe(recipe)
    run.run_steps(lambda: run.advance_on(corpus, teacher), save_every, quiet)
    trained_depths = config.depths or head.depths
    depths = min(max(trained_depths, 5), head.deepest)
    ranks = rank_table(true_ranks(head, corpus.held_back, teacher, trained_depths, config.micro))
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "answers": len(corpus.train),
        "hits": hit_shares(head, corpus.held_back, teacher, depths, config.micro),
        "overlaps": mean_overlaps(head, corpus.held_back, teacher, depths, config.micro),
        "ranks": ranks,
        "settings": asdict(config),
        "recipe": recipe,
    }
    if processes.is_first:
        report_extract = {name: report[name] for name in ("hits", "ranks", "tokens_seen")}
        save_head(head, draft_tokens, out / "head", target, report_extract)
        write_text(out / "report.json", json.dumps(report, indent=1))
    processes.wait()
    return report

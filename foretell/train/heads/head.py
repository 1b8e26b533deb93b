"""Trains a head on a target's own answers and its hidden states: `foretell train head`.

The head learns at every depth at once, each from the laws that the target has there, and no depth
sees more than it will when it drafts. Its output matrix is the target's, cut down to the commonest
tokens, and stays as it is.
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
from foretell.drafters.heads.networks.folder import build, kinds, load, save, target_shape
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig
from foretell.ops.files import write_text
from foretell.spec import NO, YES, given
from foretell.speculation.costs import Costs
from foretell.train import recipes
from foretell.train.answers import AT_ONCE
from foretell.train.draft import TextRun
from foretell.train.heads.head_data import Corpus, Teacher, places
from foretell.train.heads.head_report import hits, overlaps, rank_table, true_ranks
from foretell.train.objectives import (
    OBJECTIVES,
    furthest_behind,
    lag_behind,
    objective,
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
        recipes.check(self, {**recipes.OF_RUNS, "common": recipes.SIZE, **rates})
        made = {kind for kind, head in kinds().items() if not head.bound}
        if self.name in kinds().keys() - made:
            allowed = f"one that leaves its target as it is; `train {self.name}` makes this one"
            raise BadConfig.field("kind", self.kind, allowed)
        if self.name not in made:
            raise BadConfig.field("kind", self.kind, f"one of {', '.join(sorted(made))}")
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
        head = kinds()[self.name]
        found: dict[str, Any] = {}
        for _, field, text in given(self.kind):
            if field not in head.trained:
                known = f"its fields are {', '.join(head.trained)}" if head.trained else "has none"
                which = "is of published heads and" if field in head.options else "is"
                raise BadConfig(f"kind={self.kind!r}: {field} {which} not trained; {known}")
            flag = type(head.options[field]) is bool
            if flag and text.lower() in YES + NO:
                found[field] = text.lower() in YES
            elif not flag and text.isdigit():
                found[field] = int(text)
            else:
                allowed = "yes or no" if flag else "a whole number"
                raise BadConfig.field(f"{self.name}:{field}", text, allowed)
        return found


def taps_of(
    kind: str, target: TargetShape, options: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """What states are kept for: the usual taps of all heads, and those of this kind."""
    usual = (2, target.layers // 2, target.layers - 3, target.layers)
    return tuple(sorted({*usual, *build(kind, target, options).taps}))


def plan(
    prompts: int,
    answer_tokens: int,
    target: TargetShape,
    taps: Sequence[int],
    config: TrainHead,
    costs: Costs,
) -> str:
    """What a run takes: bytes, and hours by the measured costs of the target's forwards."""
    tokens = prompts * answer_tokens
    answering = tokens * float(costs.curve(AT_ONCE)[-1]) / AT_ONCE
    reading = tokens * float(costs.curve(PIECE)[-1]) / PIECE
    size = tokens * len(taps) * target.hidden * 2
    return (
        f"at most {tokens:,} tokens of answers: {answering / 3600:.1f} hours to write them, "
        f"{reading / 3600:.1f} hours and {size / 1e9:.1f} GB for their states; then "
        f"{config.tokens:,} tokens of training, whose time shows when it begins"
    )


def loss_of(
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
    loss_by = objective(config.objective)
    rows, columns = places(answers, 0).T  # the target's own law is wanted there
    laws = teacher.laws(texts.finals[rows, columns])
    number = torch.full(texts.ids.shape, -1)
    number[rows, columns] = torch.arange(len(rows))
    total = texts.finals.new_zeros((), dtype=torch.float32)
    others: Iterator[Drafted | None] = repeat(None)
    with torch.autocast(teacher.device.type, dtype=torch.bfloat16):
        if reference is not None:
            with torch.no_grad():
                others = iter(list(reference.unroll(texts, depths)))
        shown = replace(texts, shown=head.glance(texts, answers, teacher.best, progress))
        for drafted, other in zip(head.unroll(shown, depths), others, strict=False):
            row, place = places(answers, drafted.depth, drafted.anchors).T
            if not len(row):
                break
            if other is not None:
                known = laws[number[row, place + drafted.depth]]
                lags = lag_behind(
                    drafted.states[row, place], other.states[row, place], teacher.weight, known
                )
                chosen = furthest_behind(lags, config.keep).to(row)
                row, place = row[chosen], place[chosen]
            here = number[row, place + drafted.depth]
            labels = teacher.names[texts.ids[row, place + drafted.depth + 1].cpu()]
            states = drafted.states[row, place]
            part = head.agreement * row_loss(
                states, teacher.weight, laws[here], labels.to(teacher.device), loss_by
            )
            if head.regression and drafted.feature is not None:
                wanted = texts.finals[row, place + drafted.depth].float()
                distance = F.smooth_l1_loss(
                    drafted.feature[row, place].float(), wanted, reduction="none"
                )
                part = part + head.regression * distance.mean(-1).sum()
            total = total + head.decay**drafted.depth * part / len(row)
    return total


def head_before(
    folder: Path, target: Any, kind: str, options: dict[str, Any] | None = None
) -> tuple[Head, torch.Tensor]:
    """A head that is there already, and the tokens that it drafts. Raises BadConfig for one of
    another build than training makes, as published heads are, or than these options say.
    """
    head, kept = load(folder, target, kind)
    if options is not None and head.config.options != options:
        told = " ".join(f"{name}={value}" for name, value in head.config.options.items())
        raise BadConfig(f"{folder}: is built with {told or 'no fields'}; give --kind the same")
    published = sorted(head.config.options.keys() - {*head.trained})
    if published:
        what = f"has {', '.join(published)} of its own"
        raise BadConfig(f"{folder}: {what}; begin with a head of `foretell train head`")
    return head, torch.arange(target.vocab) if kept is None else kept


@dataclass
class Beginning:
    """What a run begins with: the head; the tokens that it drafts, None: the commonest of the
    answers; and the head beside which it learns, if any.
    """

    head: Head
    kept: torch.Tensor | None = None
    reference: Head | None = None


def beginning(
    target: Any, config: TrainHead, init: Path | None = None, reference: Path | None = None
) -> Beginning:
    """Makes or reads all of it, before anything takes hours. `init`, `reference`: folders of heads
    of the same kind. Raises BadConfig, BadModel, Unsupported.
    """
    torch.manual_seed(config.seed)
    options = config.options
    head = build(config.name, target_shape(target, "train head"), options)
    if config.depths > head.deepest:
        raise BadConfig.field("depths", config.depths, f"at most {head.deepest} for {config.kind}")
    head.begin(target)
    Output(target, torch.arange(1)).weight()  # its output matrix can be cut down
    made = Beginning(head)
    if init is not None:
        known, made.kept = head_before(init, target, config.name, options)
        head.load_state_dict(known.state_dict())
    if reference is not None:
        made.reference, kept = head_before(reference, target, config.name, options)
        if made.kept is not None and not torch.equal(made.kept, kept):
            raise BadConfig(f"{init} and {reference} draft other tokens; train both from one")
        refuse_itself(head, made.reference, reference)
        made.kept = kept
        made.reference.eval()
    return made


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
        """One optimiser step; returns its mean loss."""
        config: Any = self.config

        def loss(group: list[int], number: int) -> torch.Tensor:
            chosen = [corpus.train[index] for index in group]
            seed = config.seed * 1_000_003 + number
            batch, answers = teacher.texts(chosen, self.model.noise, seed)
            torch.manual_seed(seed)  # dropout goes on where it was, too
            progress = self.step / config.steps
            return loss_of(self.model, batch, answers, teacher, config, self.reference, progress)

        return self.step_on([len(text.tokens) for text in corpus.train], loss)


def train(
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
    made = beginning(target, config, init, reference)
    head, beside = made.head.to(processes.device), made.reference
    kept = made.kept
    if kept is None:
        kept = corpus.commonest(min(config.common, target.vocab), target.vocab)
    if beside is not None:
        beside.to(processes.device)
    missing = {*head.taps, head.config.target.layers} - {*taps}
    if missing:
        raise BadConfig(f"the states have taps {list(taps)}, and {config.kind} needs {missing} too")
    teacher = Teacher(target, taps, head, kept)
    run = HeadRun(out, config, head, beside, processes)
    run.keep(recipe)
    run.through(lambda: run.advance_on(corpus, teacher), save_every, quiet)
    trained = config.depths or head.depths
    depths = min(max(trained, 5), head.deepest)
    ranks = rank_table(true_ranks(head, corpus.held_back, teacher, trained, config.micro))
    report: dict[str, Any] = {
        "parameters": run.size,
        "tokens_seen": config.steps * config.batch,
        "answers": len(corpus.train),
        "hits": hits(head, corpus.held_back, teacher, depths, config.micro),
        "overlaps": overlaps(head, corpus.held_back, teacher, depths, config.micro),
        "ranks": ranks,
        "settings": asdict(config),
        "recipe": recipe,
    }
    if processes.first:
        about = {name: report[name] for name in ("hits", "ranks", "tokens_seen")}
        save(head, kept, out / "head", target, about)
        write_text(out / "report.json", json.dumps(report, indent=1))
    processes.wait()
    return report

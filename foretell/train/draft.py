"""Distils a small draft model for a target on the target's own answers: `foretell train draft`.

The draft model is a small Llama with the target's tokens. Its embeddings begin as the target's,
projected on their main directions. It learns the target's laws at every token of the answers, over
the likeliest tokens and all others together: how far its own are from them, by an objective. The
answers are those of `answers.py`.

Beside a reference, another draft model that has learnt already, it learns at those tokens alone
where it is furthest behind that one.

With `exits` it learns them behind several of its layers at once, by the mean of the exits' losses,
each read by the same last norm and head: a draft model for `s2d`.

Of the vocabulary a step looks at the commonest tokens, those of the batch's laws and a random
sample of the others that stands for all of them: the output matrix is by far the largest part of
such a model.

Source: Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation"
(arXiv 2310.08461), section 3, forward divergence on the target's own texts. Exits: Valipour et al.,
"SortedNet" (arXiv 2309.00255), with the mean of all losses in a step in place of one drawn exit's.
References: Hu et al., "AdaSPEC" (arXiv 2510.19779), section 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretell.drafters.model.exit_table import FIELD, checked
from foretell.errors import BadConfig
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.answers import Text, read
from foretell.train.lm import Run, begin_with, check_heads, read_model
from foretell.train.objectives import Objective, divergence, furthest_behind, objective
from foretell.train.processes import Processes

if TYPE_CHECKING:
    from foretell.api.lm import LM

ROUND = 32  # tokens: texts of a batch are filled up to a multiple
HELD_BACK = 32  # one of so many answers is for measuring
REST = 1e-6  # least probability that is told from 0


@dataclass(frozen=True)
class TrainDraft:
    """Shape of the model and of the run. Lengths are in tokens."""

    hidden: int = 192  # width of the hidden state
    layers: int = 6  # layers of the model
    heads: int = 3  # attention heads
    kv_heads: int = 1  # heads of keys and values
    intermediate: int = 512  # width inside a feed-forward block
    context: int = 8192  # tokens of the longest sequence
    window: int = 768  # tokens of the longest text it is trained on
    tokens: int = 10_000_000  # training tokens in all, prompts included
    batch: int = 8_192  # tokens a step
    micro: int = 4_096  # tokens a forward
    common: int = 12_288  # commonest tokens, whose output rows are in every step
    sampled: int = 2_048  # of the others, anew for each forward
    matrix_rate: float = 0.02  # learning rate of matrices (Muon)
    other_rate: float = 0.003  # learning rate of embeddings and norms (AdamW)
    warmup: int = 20  # steps over which the rate rises
    decay: float = 0.6  # share of the run over which the rate falls to 0
    seed: int = 0  # of the weights and of the order of texts
    objective: str = "kl"  # kl, ce, tv, tvd++ or certainty
    keep: float = 0.4  # share of the tokens that is learnt from beside a reference
    exits: str = ""  # layers behind which it learns as well, as in 2,4: a model for s2d

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "intermediate", "context", "common")
        rates = dict.fromkeys(("matrix_rate", "other_rate"), recipes.RATE)
        ranges = {**recipes.OF_RUNS, **dict.fromkeys(sizes, recipes.SIZE), **rates}
        recipes.check(self, {**ranges, "sampled": (0, 1 << 40), "keep": (REST, 1)})
        objective(self.objective)
        check_heads(self.hidden, self.heads, self.kv_heads)
        self.exit_layers  # noqa: B018
        recipes.check_batches(self)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """Where it learns, the last layer included. Raises BadConfig."""
        try:
            exits = [int(part) for part in self.exits.split(",") if part.strip()]
        except ValueError:
            allowed = f"numbers of layers below {self.layers} with commas between, as in 2,4"
            raise BadConfig.field("exits", self.exits, allowed) from None
        return checked("exits", exits, self.layers)


def build(config: TrainDraft, embeddings: torch.Tensor, ends: Sequence[int]) -> LlamaForCausalLM:
    """A Llama with tied embeddings, float32, that begin as the target's (V, E) projected."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(embeddings),
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            eos_token_id=list(ends),
            attn_implementation="sdpa",
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(projected(embeddings, config.hidden))
    return model


def projected(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """(V, E) -> (V, width), along the directions in which they differ most, of a scale at which
    the products with normed states are about 1.
    """
    wide = embeddings.float()
    if width < wide.shape[1]:
        wide = wide - wide.mean(0)
        _, directions = torch.linalg.eigh(wide.T @ wide)
        wide = wide @ directions[:, -width:]
    elif width > wide.shape[1]:
        raise BadConfig.field("hidden", width, f"at most the target's {wide.shape[1]}")
    return wide / wide.norm(dim=1).mean()


class Texts:
    """All answers in memory, those for measuring aside."""

    def __init__(self, files: Sequence[Path], window: int):
        self.train: list[Text] = []
        self.held_back: list[Text] = []
        for file in files:
            for text in read(file):
                room = window - text.prompt
                if room < 8:
                    continue
                length = text.prompt + min(room, len(text.best))
                short = Text(
                    text.tokens[:length], text.prompt, text.best[:room], text.logprobs[:room]
                )
                seen = len(self.train) + len(self.held_back)
                (self.held_back if seen % HELD_BACK == 0 else self.train).append(short)
        if not self.train or not self.held_back:
            raise BadConfig("there are too few answers to train on; give more prompts")

    def commonest(self, count: int, vocab: int) -> torch.Tensor:
        """The tokens that have most of the target's probability, ascending."""
        mass = np.zeros(vocab)
        for text in self.train:
            np.add.at(mass, text.best.ravel(), np.exp(text.logprobs.astype(np.float32)).ravel())
        return torch.from_numpy(np.sort(np.argsort(-mass, kind="stable")[:count]))


@dataclass
class Batch:
    """Texts of about the same length in one block: ids (n, L), and of every answer's token the
    place of the state it is predicted from, (m,), the target's best tokens and probabilities there
    (m, K), and which of them the token is, (m,), -1: none.
    """

    ids: torch.Tensor
    places: torch.Tensor
    best: torch.Tensor
    chances: torch.Tensor
    labels: torch.Tensor

    @property
    def laws(self) -> torch.Tensor:
        """(m, K + 1): the target's, of its best tokens and of all others together."""
        return torch.cat([self.chances, rest(self.chances)[:, None]], 1)

    def to(self, device: torch.device) -> Batch:
        parts = (self.ids, self.places, self.best, self.chances, self.labels)
        return Batch(*(part.to(device) for part in parts))


def block(texts: Sequence[Text]) -> Batch:
    length = -(-max(len(text.tokens) for text in texts) // ROUND) * ROUND
    ids = np.zeros((len(texts), length), np.int64)
    places = []
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = text.tokens
        places.append(row * length + np.arange(text.prompt - 1, len(text.tokens) - 1))
    best = np.concatenate([text.best for text in texts]).astype(np.int64)
    chances = np.exp(np.concatenate([text.logprobs for text in texts]).astype(np.float32))
    places_of = np.concatenate(places)
    same = best == ids.ravel()[places_of + 1][:, None]
    labels = np.where(same.any(1), same.argmax(1), -1)
    return Batch(*map(torch.from_numpy, (ids, places_of, best, chances, labels)))


def rest(chances: torch.Tensor) -> torch.Tensor:
    """(m, K) -> (m,): what is left for the other tokens."""
    return (1 - chances.sum(-1)).clamp_min(REST)


def blocks(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """The numbers of texts of these lengths in groups of about `size` tokens, filled up, each of
    texts of about the same length; groups in random order.
    """
    draw = np.random.default_rng(seed)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + 64 * draw.random())
    groups: list[list[int]] = [[]]
    for number in order:
        width = -(-lengths[number] // ROUND) * ROUND
        if groups[-1] and (len(groups[-1]) + 1) * width > size:
            groups.append([])
        groups[-1].append(number)
    draw.shuffle(groups)
    return groups


def states_at(
    model: LlamaForCausalLM, ids: torch.Tensor, exits: Sequence[int]
) -> list[torch.Tensor]:
    """Of each exit the normed states (n, L, E) that leave it; none: of the last layer alone."""
    layers = len(model.model.layers)
    early = any(exit_layer < layers for exit_layer in exits)
    out = model.model(input_ids=ids, output_hidden_states=early)
    return [
        out.last_hidden_state
        if exit_layer == layers
        else model.model.norm(out.hidden_states[exit_layer])
        for exit_layer in exits or (layers,)
    ]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that a step looks at: `known` ones, and `drawn` ones that stand for all others, each
    for so many that its logit counts `scale` more.
    """

    known: torch.Tensor  # (k,), ascending
    drawn: torch.Tensor  # (s,)
    scale: float


def vocabulary(
    batch: Batch, common: torch.Tensor, sampled: int, seed: int, size: int
) -> Vocabulary:
    """The commonest tokens, those of a batch's laws, and `sampled` of the others, by `seed`."""
    needed = torch.zeros(size, dtype=torch.bool)
    needed[common] = True
    needed[batch.best.flatten()] = True
    others = (~needed).nonzero()[:, 0]
    draw = torch.Generator().manual_seed(seed)
    chosen = others[torch.randperm(len(others), generator=draw)[:sampled]]
    scale = float(np.log(len(others) / len(chosen))) if len(chosen) else 0.0
    return Vocabulary(needed.nonzero()[:, 0], chosen, scale)


def logs_of(
    model: LlamaForCausalLM, batch: Batch, tokens: Vocabulary, exits: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Of each exit the logarithms (m, K + 1) of its law, over what the target's `laws` are of."""
    weight = model.get_input_embeddings().weight
    known, drawn = tokens.known.to(weight.device), tokens.drawn.to(weight.device)
    where = torch.searchsorted(known, batch.best)
    found = []
    with torch.autocast(weight.device.type, dtype=torch.bfloat16):
        left = [states.flatten(0, 1)[batch.places] for states in states_at(model, batch.ids, exits)]
        read, also_read = weight[known].T, weight[drawn].T
        for states in left:
            logits = (states @ read).float()
            total = logits.logsumexp(-1)
            if len(drawn):
                others = (states @ also_read).float()
                total = torch.logaddexp(total, others.logsumexp(-1) + tokens.scale)
            own = logits.gather(1, where) - total[:, None]
            found.append(torch.cat([own, rest(own.exp()).log()[:, None]], 1))
    return found


def loss_of(
    model: LlamaForCausalLM,
    batch: Batch,
    tokens: Vocabulary,
    exits: Sequence[int] = (),
    loss_by: Objective = divergence,
    reference: LlamaForCausalLM | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """Mean loss of the model's laws beside the target's, over its likeliest tokens and the rest, in
    nats; with `exits` the mean over theirs.

    With a reference it is the mean over the share `keep` of the tokens at which the model's law is
    further from the target's than the reference's is.
    """
    batch = batch.to(model.get_input_embeddings().weight.device)
    laws, labels = batch.laws, batch.labels
    found = logs_of(model, batch, tokens, exits)
    chosen: list[Any] = [slice(None)] * len(found)
    if reference is not None:
        with torch.no_grad():
            (theirs,) = logs_of(reference, batch, tokens)
            known = divergence(theirs, laws, labels)
            lags = [divergence(own.detach(), laws, labels) - known for own in found]
        chosen = [furthest_behind(lag, keep) for lag in lags]
    parts = [
        loss_by(own[rows], laws[rows], labels[rows]).mean()
        for own, rows in zip(found, chosen, strict=True)
    ]
    return torch.stack(parts).mean()


@torch.inference_mode()
def agreement(
    model: LlamaForCausalLM, texts: Sequence[Text], size: int, exits: Sequence[int] = ()
) -> list[dict[str, float]]:
    """Of each exit, how many of its tokens the target would take on these texts: its best tokens
    at temperature 0, and tokens drawn at temperature 1 (a lower bound, by the likeliest tokens).
    """
    model.eval()
    places = len(exits) or 1
    same, drawn, count = [0.0] * places, [0.0] * places, 0
    for group in blocks([len(text.tokens) for text in texts], size, 0):
        batch = block([texts[number] for number in group]).to(model.device)
        count += len(batch.places)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            for place, states in enumerate(states_at(model, batch.ids, exits)):
                rows = states.flatten(0, 1)[batch.places]
                logits = (rows @ model.get_input_embeddings().weight.T).float()
                q = logits.softmax(-1).gather(1, batch.best)
                same[place] += float((logits.argmax(-1) == batch.best[:, 0]).sum())
                drawn[place] += float(torch.minimum(q, batch.chances).sum())
    model.train()
    shares = [[round(total / count, 4) for total in totals] for totals in (same, drawn)]
    return [{"greedy": greedy, "drawn": other} for greedy, other in zip(*shares, strict=True)]


class TextRun(Run):
    """A run folder whose batches are groups of texts."""

    groups: Sequence[list[int]] = ()  # of texts' numbers, a group a forward
    rounds = 0  # over all texts that these make

    def step_on(
        self, lengths: Sequence[int], loss_of: Callable[[list[int], int], torch.Tensor]
    ) -> float:
        """One optimiser step on texts of these lengths; returns its mean loss.

        `loss_of`: the loss of a micro batch, by its texts' numbers and its own number in the run.
        """
        parts = self.config.batch // self.config.micro
        total = 0.0
        for part in self.processes.share(parts):
            number = self.step * parts + part
            loss = loss_of(self._group(lengths, number), number) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update()
        return self.processes.total(total)

    def _group(self, lengths: Sequence[int], number: int) -> list[int]:
        """The texts of the forward of this number; each round over all of them is in another
        order.
        """
        while len(self.groups) <= number:
            seed = self.config.seed * 1_000 + self.rounds
            self.groups = [*self.groups, *blocks(lengths, self.config.micro, seed)]
            self.rounds += 1
        return self.groups[number]


class DraftRun(TextRun):
    """A run folder whose batches are blocks of answers."""

    def __init__(
        self,
        folder: Path,
        config: TrainDraft,
        model: LlamaForCausalLM,
        processes: Processes | None = None,
        reference: LlamaForCausalLM | None = None,
    ):
        super().__init__(folder, config, model, model.model.layers, processes)
        self.reference = reference

    def advance_on(self, texts: Texts, common: torch.Tensor) -> float:
        """One optimiser step; returns its mean loss."""
        config: Any = self.config
        loss_by = objective(config.objective)

        def loss(group: list[int], number: int) -> torch.Tensor:
            seed = config.seed * 1_000_003 + number
            batch = block([texts.train[index] for index in group])
            exits = config.exit_layers
            tokens = vocabulary(batch, common, config.sampled, seed, self.model.config.vocab_size)
            return loss_of(self.model, batch, tokens, exits, loss_by, self.reference, config.keep)

        return self.step_on([len(text.tokens) for text in texts.train], loss)


def beginning(
    lm: LM, config: TrainDraft, init: str | None = None, reference: str | None = None
) -> tuple[LlamaForCausalLM, LlamaForCausalLM | None]:
    """The model that a run begins with, and the one beside which it learns, if any. `init`,
    `reference`: their folders. Raises BadConfig, BadModel.
    """
    target: Any = lm.models["target"]
    with torch.inference_mode():
        embeddings = target.embed(range(target.vocab)).float().cpu()
    model = build(config, embeddings.clone(), lm.engine.eos)
    if init is not None:
        begin_with(model, init)
    if reference is None:
        return model, None
    known = read_model(reference, "reference")
    if not isinstance(known, LlamaForCausalLM) or known.config.vocab_size != target.vocab:
        raise BadConfig(f"reference={reference}: is no draft model of this target's; train one")
    ours, theirs = model.state_dict(), known.state_dict()
    if ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours):
        raise BadConfig(
            f"reference={reference}: is the model that training begins with; give one that is "
            "trained already"
        )
    return model, known.requires_grad_(False).eval()


def train(
    lm: LM,
    files: Sequence[Path],
    out: Path,
    config: TrainDraft,
    save_every: float = 300.0,
    quiet: bool = False,
    init: str | None = None,
    processes: Processes | None = None,
    recipe: Mapping[str, Any] | None = None,
    reference: str | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; returns and writes the report. The model is in
    OUT/model, with the target's tokenizer. `init`: folder of a model of the same shape to begin
    with. `processes`: those that share the work; None: there is one. `recipe`: all that the run was
    started with, which is kept in its folder. `reference`: folder of a draft model that is trained
    already, beside which the tokens to learn from are chosen.
    """
    target: Any = lm.models["target"]
    processes = processes or Processes()
    processes.check(config.batch, config.micro)
    out.mkdir(parents=True, exist_ok=True)
    texts = Texts(files, config.window)
    common = texts.commonest(config.common, target.vocab)
    model, known = beginning(lm, config, init, reference)
    if known is not None:
        known.to(processes.device)
    run = DraftRun(out, config, model.to(processes.device), processes, known)
    run.keep(recipe)
    run.through(lambda: run.advance_on(texts, common), save_every, quiet)
    exits = config.exit_layers
    if config.exits:
        setattr(run.model.config, FIELD, {"layers": list(exits)})
    if processes.first:
        export(lm, run.model, out / "model")
    shares = agreement(run.model, texts.held_back, config.micro, exits)
    report: dict[str, Any] = {
        "parameters": run.size,
        "tokens_seen": config.steps * config.batch,
        "answers": len(texts.train),
        "held_back": shares[-1],
        "exits": dict(zip(map(str, exits), shares, strict=True)) if config.exits else {},
        "settings": asdict(config),
        "recipe": recipe,
    }
    if processes.first:
        write_text(out / "report.json", json.dumps(report, indent=1))
    processes.wait()
    return report


def export(lm: LM, model: LlamaForCausalLM, folder: Path) -> None:
    """Writes a folder that `foretell.load` and transformers open: bfloat16 safetensors, config,
    tokenizer.
    """
    keep = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    model.to(torch.float32).load_state_dict(keep)
    tokenizer: Any = lm.tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)

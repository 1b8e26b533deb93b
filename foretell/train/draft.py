"""Distils a small draft model for a target on the target's own answers: `foretell train draft`.

The draft model is a small Llama with the target's tokens. Its embeddings begin as the target's,
projected on their main directions. It learns the target's distributions at every token of the
answers, over the likeliest tokens and all others together, by an objective. The answers are those
of `answers.py`.

Beside a reference, another draft model that has learnt, it learns where it lags most.

With `exits` it learns them after several of its layers at once, by the mean of the exits' losses,
each read by the same last norm and head: a draft model for `s2d`.

Of the vocabulary a step looks at the commonest tokens, those of the batch's distributions and a
random sample that stands for the others: the output matrix is by far the largest part of a model.

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

from foretell.drafters.model.exit_table import FIELD, check_exits
from foretell.errors import BadConfig
from foretell.ops.files import write_text
from foretell.train import recipes
from foretell.train.answers import Text, read_texts
from foretell.train.lm import Run, begin_with, check_heads, read_model
from foretell.train.objectives import Objective, divergence, furthest_behind, objective_named
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
    exits: str = ""  # layers after which it learns as well, as in 2,4: a model for s2d

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "intermediate", "context", "common")
        rates = dict.fromkeys(("matrix_rate", "other_rate"), recipes.RATE)
        ranges = {**recipes.OF_RUNS, **dict.fromkeys(sizes, recipes.SIZE), **rates}
        recipes.check_ranges(self, {**ranges, "sampled": (0, 1 << 40), "keep": (REST, 1)})
        objective_named(self.objective)
        check_heads(self.hidden, self.heads, self.kv_heads)
        self.exit_layers  # noqa: B018
        recipes.check_batches(self)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """Layers after which the model learns, the last one included. Raises BadConfig."""
        try:
            exits = [int(part) for part in self.exits.split(",") if part.strip()]
        except ValueError:
            allowed_values = f"numbers of layers below {self.layers} with commas between, as in 2,4"
            raise BadConfig.field("exits", self.exits, allowed_values) from None
        return check_exits("exits", exits, self.layers)


def new_draft(
    config: TrainDraft, embeddings: torch.Tensor, ends: Sequence[int]
) -> LlamaForCausalLM:
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
        model.get_input_embeddings().weight.copy_(project_embeddings(embeddings, config.hidden))
    return model


def project_embeddings(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """(V, E) -> (V, width), along the directions in which they differ most, of a scale at which
    the products with normed states are about 1.
    """
    centred = embeddings.float()
    if width < centred.shape[1]:
        centred = centred - centred.mean(0)
        _, directions = torch.linalg.eigh(centred.T @ centred)
        centred = centred @ directions[:, -width:]
    elif width > centred.shape[1]:
        raise BadConfig.field("hidden", width, f"at most the target's {centred.shape[1]}")
    return centred / centred.norm(dim=1).mean()


class Texts:
    """All answers in memory, those for measuring aside."""

    def __init__(self, files: Sequence[Path], window: int):
        self.train: list[Text] = []
        self.held_back: list[Text] = []
        for file in files:
            for text in read_texts(file):
                room = window - text.prompt
                if room < 8:
                    continue
                length = text.prompt + min(room, len(text.top_tokens))
                cut_text = Text(
                    text.tokens[:length], text.prompt, text.top_tokens[:room], text.logprobs[:room]
                )
                text_count = len(self.train) + len(self.held_back)
                (self.held_back if text_count % HELD_BACK == 0 else self.train).append(cut_text)
        if not self.train or not self.held_back:
            raise BadConfig("there are too few answers to train on; give more prompts")

    def commonest(self, count: int, vocab: int) -> torch.Tensor:
        """The tokens that have most of the target's probability, ascending."""
        token_mass = np.zeros(vocab)
        for text in self.train:
            probs = np.exp(text.logprobs.astype(np.float32))
            np.add.at(token_mass, text.top_tokens.ravel(), probs.ravel())
        return torch.from_numpy(np.sort(np.argsort(-token_mass, kind="stable")[:count]))


@dataclass
class Batch:
    """Texts of about the same length in one block: ids (n, L), and of every answer's token the
    place of the state it is predicted from, (m,), the target's best tokens and probabilities there
    (m, K), and which of them the token is, (m,), -1: none.
    """

    ids: torch.Tensor
    places: torch.Tensor
    top_tokens: torch.Tensor
    chances: torch.Tensor
    labels: torch.Tensor

    @property
    def laws(self) -> torch.Tensor:
        """(m, K + 1): the target's, of its best tokens and of all others together."""
        return torch.cat([self.chances, remaining_mass(self.chances)[:, None]], 1)

    def to(self, device: torch.device) -> Batch:
        parts = (self.ids, self.places, self.top_tokens, self.chances, self.labels)
        return Batch(*(part.to(device) for part in parts))


def make_batch(texts: Sequence[Text]) -> Batch:
    padded_length = -(-max(len(text.tokens) for text in texts) // ROUND) * ROUND
    ids = np.zeros((len(texts), padded_length), np.int64)
    place_rows = []
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = text.tokens
        place_rows.append(row * padded_length + np.arange(text.prompt - 1, len(text.tokens) - 1))
    top_tokens = np.concatenate([text.top_tokens for text in texts]).astype(np.int64)
    chances = np.exp(np.concatenate([text.logprobs for text in texts]).astype(np.float32))
    places_of = np.concatenate(place_rows)
    is_label = top_tokens == ids.ravel()[places_of + 1][:, None]
    labels = np.where(is_label.any(1), is_label.argmax(1), -1)
    return Batch(*map(torch.from_numpy, (ids, places_of, top_tokens, chances, labels)))


def remaining_mass(chances: torch.Tensor) -> torch.Tensor:
    """(m, K) -> (m,): what is left for the other tokens."""
    return (1 - chances.sum(-1)).clamp_min(REST)


def group_lengths(lengths: Sequence[int], max_tokens: int, seed: int) -> list[list[int]]:
    """Numbers of texts of these lengths in groups of about `max_tokens` tokens, filled up, each
    of texts of about the same length; groups in random order.
    """
    generator = np.random.default_rng(seed)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + 64 * generator.random())
    groups: list[list[int]] = [[]]
    for number in order:
        padded_width = -(-lengths[number] // ROUND) * ROUND
        if groups[-1] and (len(groups[-1]) + 1) * padded_width > max_tokens:
            groups.append([])
        groups[-1].append(number)
    generator.shuffle(groups)
    return groups


def states_at(
    model: LlamaForCausalLM, ids: torch.Tensor, exits: Sequence[int]
) -> list[torch.Tensor]:
    """Normed states (n, L, E) that leave each exit; without exits: the last layer."""
    layers = len(model.model.layers)
    needs_hidden = any(exit_layer < layers for exit_layer in exits)
    model_output = model.model(input_ids=ids, output_hidden_states=needs_hidden)
    return [
        model_output.last_hidden_state
        if exit_layer == layers
        else model.model.norm(model_output.hidden_states[exit_layer])
        for exit_layer in exits or (layers,)
    ]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that a step looks at: `known` ones, and `drawn` ones that stand for all others, each
    for so many that its logit counts `scale` more.
    """

    known_tokens: torch.Tensor  # (k,), ascending
    sampled_tokens: torch.Tensor  # (s,)
    scale: float


def step_vocabulary(
    batch: Batch, common_tokens: torch.Tensor, sampled: int, seed: int, size: int
) -> Vocabulary:
    """The commonest tokens, those of a batch's distributions, and `sampled` of the others, by
    `seed`.
    """
    is_needed = torch.zeros(size, dtype=torch.bool)
    is_needed[common_tokens] = True
    is_needed[batch.top_tokens.flatten()] = True
    other_tokens = (~is_needed).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    sampled_tokens = other_tokens[torch.randperm(len(other_tokens), generator=generator)[:sampled]]
    scale = float(np.log(len(other_tokens) / len(sampled_tokens))) if len(sampled_tokens) else 0.0
    return Vocabulary(is_needed.nonzero()[:, 0], sampled_tokens, scale)


def exit_logs(
    model: LlamaForCausalLM, batch: Batch, tokens: Vocabulary, exits: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Logarithms (m, K + 1) of each exit's distribution, over what the target's `laws` are of."""
    weight = model.get_input_embeddings().weight
    known_ids = tokens.known_tokens.to(weight.device)
    sampled_ids = tokens.sampled_tokens.to(weight.device)
    token_columns = torch.searchsorted(known_ids, batch.top_tokens)
    exit_rows = []
    with torch.autocast(weight.device.type, dtype=torch.bfloat16):
        exit_states = [h.flatten(0, 1)[batch.places] for h in states_at(model, batch.ids, exits)]
        known_matrix, sampled_matrix = weight[known_ids].T, weight[sampled_ids].T
        for states in exit_states:
            logits = (states @ known_matrix).float()
            total = logits.logsumexp(-1)
            if len(sampled_ids):
                sampled_logits = (states @ sampled_matrix).float()
                total = torch.logaddexp(total, sampled_logits.logsumexp(-1) + tokens.scale)
            logs = logits.gather(1, token_columns) - total[:, None]
            exit_rows.append(torch.cat([logs, remaining_mass(logs.exp()).log()[:, None]], 1))
    return exit_rows


def exit_loss(
    model: LlamaForCausalLM,
    batch: Batch,
    tokens: Vocabulary,
    exits: Sequence[int] = (),
    loss_by: Objective = divergence,
    reference: LlamaForCausalLM | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """Mean loss of the model's distributions beside the target's, over its likeliest tokens and the
    rest, in nats; with `exits` the mean over theirs.

    With a reference it is the mean over the share `keep` of the tokens at which the model's
    distribution is further from the target's than the reference's is.
    """
    batch = batch.to(model.get_input_embeddings().weight.device)
    laws, labels = batch.laws, batch.labels
    exit_rows = exit_logs(model, batch, tokens, exits)
    learnt_rows: list[Any] = [slice(None)] * len(exit_rows)
    if reference is not None:
        with torch.no_grad():
            (reference_rows,) = exit_logs(reference, batch, tokens)
            reference_lag = divergence(reference_rows, laws, labels)
            lags = [divergence(row.detach(), laws, labels) - reference_lag for row in exit_rows]
        learnt_rows = [furthest_behind(lag, keep) for lag in lags]
    parts = [
        loss_by(row[rows], laws[rows], labels[rows]).mean()
        for row, rows in zip(exit_rows, learnt_rows, strict=True)
    ]
    return torch.stack(parts).mean()


@torch.inference_mode()
def exit_agreement(
    model: LlamaForCausalLM, texts: Sequence[Text], size: int, exits: Sequence[int] = ()
) -> list[dict[str, float]]:
    """Share of each exit's tokens that the target would take on these texts: its best tokens at
    temperature 0, and tokens drawn at temperature 1 (a lower bound, by the likeliest tokens).
    """
    model.eval()
    exit_count = len(exits) or 1
    greedy_sums, drawn_sums, count = [0.0] * exit_count, [0.0] * exit_count, 0
    for group in group_lengths([len(text.tokens) for text in texts], size, 0):
        batch = make_batch([texts[number] for number in group]).to(model.device)
        count += len(batch.places)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            for place, states in enumerate(states_at(model, batch.ids, exits)):
                state_rows = states.flatten(0, 1)[batch.places]
                logits = (state_rows @ model.get_input_embeddings().weight.T).float()
                q = logits.softmax(-1).gather(1, batch.top_tokens)
                greedy_sums[place] += float((logits.argmax(-1) == batch.top_tokens[:, 0]).sum())
                drawn_sums[place] += float(torch.minimum(q, batch.chances).sum())
    model.train()
    shares = [[round(total / count, 4) for total in totals] for totals in (greedy_sums, drawn_sums)]
    return [{"greedy": greedy, "drawn": sampled} for greedy, sampled in zip(*shares, strict=True)]


class TextRun(Run):
    """A run folder whose batches are groups of texts."""

    groups: Sequence[list[int]] = ()  # of texts' numbers, a group a forward
    rounds = 0  # over all texts that these make

    def step_on(
        self, lengths: Sequence[int], loss_of: Callable[[list[int], int], torch.Tensor]
    ) -> float:
        """Takes an optimiser step on texts of these lengths; returns its mean loss.

        `loss_of`: the loss of a micro batch, by its texts' numbers and its own number in the run.
        """
        micro_count = self.config.batch // self.config.micro
        loss_sum = 0.0
        for micro_number in self.processes.share(micro_count):
            number = self.step * micro_count + micro_number
            loss = loss_of(self._group(lengths, number), number) / micro_count
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return self.processes.total(loss_sum)

    def _group(self, lengths: Sequence[int], number: int) -> list[int]:
        """Texts of the forward of this number; each round over all is in another order."""
        while len(self.groups) <= number:
            seed = self.config.seed * 1_000 + self.rounds
            self.groups = [*self.groups, *group_lengths(lengths, self.config.micro, seed)]
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

    def advance_on(self, texts: Texts, common_tokens: torch.Tensor) -> float:
        """Takes an optimiser step; returns its mean loss."""
        config: Any = self.config
        loss_by = objective_named(config.objective)

        def loss(group: list[int], number: int) -> torch.Tensor:
            seed = config.seed * 1_000_003 + number
            batch = make_batch([texts.train[index] for index in group])
            exits = config.exit_layers
            vocab = self.model.config.vocab_size
            tokens = step_vocabulary(batch, common_tokens, config.sampled, seed, vocab)
            return exit_loss(self.model, batch, tokens, exits, loss_by, self.reference, config.keep)

        return self.step_on([len(text.tokens) for text in texts.train], loss)


def starting_models(
    lm: LM, config: TrainDraft, init: str | None = None, reference: str | None = None
) -> tuple[LlamaForCausalLM, LlamaForCausalLM | None]:
    """The model that a run begins with, and the one beside which it learns, if any. `init`,
    `reference`: their folders. Raises BadConfig, BadModel.
    """
    target: Any = lm.models["target"]
    with torch.inference_mode():
        embeddings = target.embed(range(target.vocab)).float().cpu()
    model = new_draft(config, embeddings.clone(), lm.engine.eos)
    if init is not None:
        begin_with(model, init)
    if reference is None:
        return model, None
    companion = read_model(reference, "reference")
    if not isinstance(companion, LlamaForCausalLM) or companion.config.vocab_size != target.vocab:
        raise BadConfig(f"reference={reference}: is no draft model of this target's; train one")
    start_weights, reference_weights = model.state_dict(), companion.state_dict()
    same_names = start_weights.keys() == reference_weights.keys()
    if same_names and all(torch.equal(p, reference_weights[k]) for k, p in start_weights.items()):
        raise BadConfig(
            f"reference={reference}: is the model that training begins with; give one that is "
            "trained already"
        )
    return model, companion.requires_grad_(False).eval()


def train_draft(
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
    common_tokens = texts.commonest(config.common, target.vocab)
    model, reference_model = starting_models(lm, config, init, reference)
    if reference_model is not None:
        reference_model.to(processes.device)
    run = DraftRun(out, config, model.to(processes.device), processes, reference_model)
    run.keep_recipe(recipe)
    run.run_steps(lambda: run.advance_on(texts, common_tokens), save_every, quiet)
    exits = config.exit_layers
    if config.exits:
        setattr(run.model.config, FIELD, {"layers": list(exits)})
    if processes.is_first:
        export_draft(lm, run.model, out / "model")
    exit_shares = exit_agreement(run.model, texts.held_back, config.micro, exits)
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "answers": len(texts.train),
        "held_back": exit_shares[-1],
        "exits": dict(zip(map(str, exits), exit_shares, strict=True)) if config.exits else {},
        "settings": asdict(config),
        "recipe": recipe,
    }
    if processes.is_first:
        write_text(out / "report.json", json.dumps(report, indent=1))
    processes.wait()
    return report


def export_draft(lm: LM, model: LlamaForCausalLM, folder: Path) -> None:
    """Writes a folder that `foretell.load` and transformers open: bfloat16 safetensors, config,
    tokenizer.
    """
    float_weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    model.to(torch.float32).load_state_dict(float_weights)
    tokenizer: Any = lm.tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)

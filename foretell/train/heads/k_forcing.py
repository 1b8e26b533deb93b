"""Tunes a model by a LoRA to turn noise into its next k tokens: `foretell train k-forcing`.

First k is 1, and the teacher is the target: of a place's distribution at some temperature the token
that a uniform number stands for, in the order of the vocabulary. Then k doubles, and the teacher is
the student as it was: it says k tokens of the first numbers, reads them as tokens, and says k more
of the other numbers. The student learns all of them by cross entropy, at many places of a text at
once; its ordinary distributions are held to the target's, so that it can verify what its rows say.

Source: K-Forcing: Joint Next-K-Token Decoding via Push-Forward Language Modeling, as its published
code has it (alibaba-damo-academy/K-Forcing); optimiser, steps and batch are not in it.
Differs: a LoRA, and the loss of the ordinary distributions; some places of a text and not all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from foretell.core.draws import draw_by_uniforms
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig
from foretell.ops.files import replace_file
from foretell.train import recipes, saved
from foretell.train.answers import Text
from foretell.train.heads.anchored import Pass
from foretell.train.heads.tuned import Tuned, TunedRun, check_tuning, export_tuned, split_answers
from foretell.train.objectives import divergence

if TYPE_CHECKING:
    from foretell.api.lm import LM

KIND = "k-forcing"


@dataclass(frozen=True)
class TrainKForcing:
    """Settings of the run. Lengths are in tokens."""

    k: int = 4  # tokens of a step: 1, 2, 4, 8 or 16
    hottest: float = 1.0  # temperatures of texts are drawn between 0 and this
    anchors: int = 64  # places of a text at which rows learn at once
    hold: float = 1.0  # weight of the divergence of the ordinary distributions from the target's
    rank: int = 32  # of the adapters
    alpha: int = 32  # their output counts alpha / rank
    dropout: float = 0.0  # of their input
    window: int = 640  # tokens of the longest text
    tokens: int = 1_000_000  # tokens of texts in all, prompts included, as many for each k
    batch: int = 1_024  # tokens a step
    rate: float = 0.0003  # learning rate of the adapters
    row_rate: float = 0.001  # learning rate of the rows' network
    warmup: int = 20  # steps over which the rates rise
    decay: float = 0.6  # share of the run over which the rates fall to 0
    seed: int = 0  # of the weights and of the order of texts

    def __post_init__(self) -> None:
        ranges = {
            **{name: bounds for name, bounds in recipes.OF_RUNS.items() if name != "micro"},
            "hottest": (0, 10),
            "anchors": recipes.SIZE,
            "hold": (0, 100),
            "rank": (1, 1024),
            "alpha": (1, 4096),
            "dropout": (0, 0.99),
            "rate": recipes.RATE,
            "row_rate": recipes.RATE,
        }
        recipes.check_ranges(self, ranges)
        if self.k not in (1, 2, 4, 8, 16):
            raise BadConfig.field("k", self.k, "1, 2, 4, 8 or 16")
        if self.batch < self.window:
            allowed_values = f"at least window={self.window}, which a lower --window allows"
            raise BadConfig.field("batch", self.batch, allowed_values)

    @property
    def steps(self) -> int:
        return max(self.k.bit_length(), self.tokens // self.batch)

    def row_count_at(self, step: int) -> int:
        """How many tokens the rows learn to say at this step: 1, 2, 4, ... for equal parts."""
        stages = self.k.bit_length()
        return int(1 << min(stages - 1, step * stages // self.steps))


@dataclass
class Places:
    """Places of a text, the noise of the tokens after them and the temperature."""

    anchors: torch.Tensor  # (A,) the last token that is known
    noise: torch.Tensor  # (A, k) in [0, 1), float64
    temperature: float


def places_of(text: Text, config: TrainKForcing, k: int, seed: int) -> Places:
    """Draws at most `anchors` places after which k tokens of the answer stand."""
    generator = np.random.default_rng(seed)
    all_places = np.arange(text.prompt - 1, max(text.prompt, len(text.tokens) - k))
    if len(all_places) > config.anchors:
        all_places = np.sort(generator.choice(all_places, config.anchors, replace=False))
    noise = torch.from_numpy(generator.random((len(all_places), k)))
    return Places(torch.from_numpy(all_places), noise, config.hottest * generator.random())


def rows_in(
    model: Tuned,
    text_pass: Pass,
    places: Places,
    first_row: int,
    end_row: int,
    known_tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Logits (A, end - first, V) of the rows from `first_row` to `end_row`. `known_tokens`
    (A, first): the tokens before them, which the text does not have.
    """
    count = len(places.anchors)
    noise = places.noise[:, first_row:end_row].flatten()
    temperatures = torch.full_like(noise, places.temperature)
    entering = model.head.noise_vectors(noise, temperatures).unflatten(0, (count, -1))
    if known_tokens is not None:
        entering = torch.cat([model.through.loop.embedded(known_tokens), entering], 1)
    states = states_behind(model, text_pass, places.anchors, entering)
    return model.logits(states[:, first_row:])


def states_behind(
    model: Tuned, text_pass: Pass, anchors: torch.Tensor, entering: torch.Tensor
) -> torch.Tensor:
    """Normed states (A, n, E) of rows that enter as (A, n, E) after the anchors."""
    count, depth = entering.shape[:2]
    below = anchors.repeat_interleave(depth)
    chain_places = torch.arange(depth).repeat(count).to(below)
    states = model.through.run_beside(text_pass, entering.flatten(0, 1), below, chain_places, 0)
    return states.unflatten(0, (count, depth))


def tokens_at_noise(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> torch.Tensor:
    """The tokens (n,) at these numbers (n,) of the distributions of logits (n, V), by the inverse
    of their sums in the order of the vocabulary; the best ones at temperature 0.
    """
    if temperature < 1e-4:
        return logits.argmax(-1)
    laws = (logits.double() / temperature).softmax(-1)
    return torch.tensor(draw_by_uniforms(laws, noise.tolist()), device=logits.device)


@torch.no_grad()
def by_target(model: Tuned, text: Text, places: Places) -> torch.Tensor:
    """The tokens (A, k) that the target draws one by one with this noise."""
    tokens = model.tokens(text)
    said_tokens = tokens.new_zeros(len(places.anchors), 0)
    with model.original_target():
        _, finals, text_pass = model.through.text(tokens)
        logits = model.logits(finals[places.anchors])
        for place in range(places.noise.shape[1]):
            next_tokens = tokens_at_noise(logits, places.noise[:, place], places.temperature)
            said_tokens = torch.cat([said_tokens, next_tokens[:, None]], 1)
            entering = model.through.loop.embedded(said_tokens)
            logits = model.logits(states_behind(model, text_pass, places.anchors, entering)[:, -1])
    return said_tokens


@torch.no_grad()
def by_rows(model: Tuned, text: Text, places: Places) -> torch.Tensor:
    """The tokens (A, k) that the rows say of this noise, all at once."""
    _, _, text_pass = model.through.text(model.tokens(text))
    return rows_in(model, text_pass, places, 0, places.noise.shape[1], None).argmax(-1)


@torch.no_grad()
def by_teacher(model: Tuned, text: Text, places: Places) -> torch.Tensor:
    """The tokens (A, 2k) of a student of k: k of the first noise, read as tokens, and k more."""
    half = places.noise.shape[1] // 2
    _, _, text_pass = model.through.text(model.tokens(text))
    first_tokens = rows_in(model, text_pass, places, 0, half, None).argmax(-1)
    second_tokens = rows_in(model, text_pass, places, half, 2 * half, first_tokens).argmax(-1)
    return torch.cat([first_tokens, second_tokens], 1)


def k_forcing_loss(
    model: Tuned, text: Text, config: TrainKForcing, labels: torch.Tensor, places: Places
) -> torch.Tensor:
    """Cross entropy of the teacher's tokens (A, k), the sum over a place's rows; and, weighed, the
    divergence of the answer's ordinary distributions from the target's.
    """
    tokens = model.tokens(text)
    answer = slice(text.prompt - 1, len(tokens) - 1)
    with model.original_target():  # ahead of what gradients are kept for
        original_laws = model.logits(model.through.text(tokens)[1][answer]).softmax(-1)
    _, finals, text_pass = model.through.text(tokens)
    k = labels.shape[1]
    logits = rows_in(model, text_pass, places, 0, k, None)
    loss = k * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    law_divergence = divergence(model.logits(finals[answer]), original_laws, tokens[text.prompt :])
    return loss + config.hold * law_divergence.mean()


class KForcingRun(TunedRun):
    """Run folder whose teacher is the target and then the student of half as many tokens."""

    teacher: dict[str, torch.Tensor] | None = None
    taught = 1  # tokens that the teacher of this stage says of noise, doubled

    def prepare(self) -> int:
        """The tokens that rows learn at this step; the teacher is there when it returns."""
        k = int(self.config.row_count_at(self.step))
        if k > 1 and self.taught != k:
            path = self.folder / f"teacher-{k // 2}.safetensors"
            if not path.exists():
                trained_weights = {
                    n: p.detach().cpu().contiguous().clone() for n, p in self.trained.items()
                }
                with replace_file(path) as part:
                    save_file(trained_weights, part)
            teacher = saved.tensors_of(path)
            saved.check_tensors(path, teacher, self.trained)
            self.teacher, self.taught = teacher, k
        return k

    @torch.no_grad()
    def swap_weights(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Puts these in place of the trained weights, and returns those."""
        earlier_weights = {name: p.detach().clone() for name, p in self.trained.items()}
        for name, p in self.trained.items():
            p.copy_(weights[name])
        return earlier_weights

    def loss(self, model: Tuned, text: Text, config: TrainKForcing, seed: int) -> torch.Tensor:
        k = self.prepare()
        places = places_of(text, config, k, seed)
        if k == 1:
            labels = by_target(model, text, places)
        else:
            assert self.teacher is not None, "prepare() has made it"
            student_weights = self.swap_weights(self.teacher)
            model.adapted.eval()
            labels = by_teacher(model, text, places)
            model.adapted.train()
            self.swap_weights(student_weights)
        return k_forcing_loss(model, text, config, labels, places)


@torch.no_grad()
def row_agreement(
    model: Tuned, texts: Sequence[Text], config: TrainKForcing, heat: float
) -> dict[str, list[float]]:
    """Share of anchors, by row, at which it and all before it say what the target draws one by one:
    with the noise by which that draws, and with other noise. `heat`: the temperature.
    """
    same_counts, other_counts, count = np.zeros(config.k), np.zeros(config.k), 0
    for number, text in enumerate(texts):
        places = places_of(text, config, config.k, number)
        places.temperature = heat
        drawn_tokens = by_target(model, text, places)
        said_tokens = by_rows(model, text, places)
        places.noise = torch.from_numpy(
            np.random.default_rng(number + 1).random(drawn_tokens.shape)
        )
        independent = by_rows(model, text, places)
        for row_tokens, count_array in ((said_tokens, same_counts), (independent, other_counts)):
            is_right = (row_tokens == drawn_tokens).cpu().numpy()
            count_array += np.logical_and.accumulate(is_right, 1).sum(0)
        count += len(drawn_tokens)
    return {
        "shared": [round(float(share), 4) for share in same_counts / max(1, count)],
        "other": [round(float(share), 4) for share in other_counts / max(1, count)],
    }


def train_k_forcing(
    lm: LM,
    files: Sequence[Path],
    out: Path,
    config: TrainKForcing,
    save_every: float = 300.0,
    quiet: bool = False,
    merged: str = "bfloat16",
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/model and OUT/head, and returns the report.

    `lm`: a model in float32, which is changed. `merged`: number format of OUT/model. `recipe`: all
    that the run was started with, which is kept in its folder. Raises BadConfig, Unsupported.
    """
    target: Any = lm.models["target"]
    check_tuning(merged)
    shape = target_shape(target, "train k-forcing")
    out.mkdir(parents=True, exist_ok=True)
    learnt, held_back = split_answers(files, config.window)
    torch.manual_seed(config.seed)
    head: Any = build_head(KIND, shape, {"rows": config.k})
    head.take_weights(target)
    model = Tuned(target, head.to(target.device), config)
    run = KForcingRun(out, config, model)
    run.keep_recipe(recipe)
    learned = run.learn(learnt, held_back, run.loss, save_every, quiet)
    report: dict[str, Any] = {
        **learned,
        "drawn": row_agreement(model, held_back, config, config.hottest),
        "greedy": row_agreement(model, held_back, config, 0.0)["shared"],
        "recipe": recipe,
    }
    report_extract = {name: report[name] for name in ("drawn", "greedy", "tokens_seen")}
    export_tuned(lm, model, out, merged, report_extract, report)
    return report

"""Trains rows that run through the target itself (`ppd`, `hidden-transfer`) on its own answers.

The target is frozen. A text runs through it once without gradients, and keeps its keys and values;
then the rows of many places of the text, its anchors, run beside it: each sees the text up to its
anchor and the rows before it of the same anchor. Row i of the anchor t learns the distribution that
the target has at t + i, of the token t + i + 1.

Source: Chen et al., "Hardware-Aware Parallel Prompt Decoding" (arXiv 2405.18628), section 3.2:
divergence from the target's distributions, of the i-th row times 0.8^(i - 1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.folder import (
    build_head,
    head_kinds,
    load_head,
    save_head,
    target_shape,
)
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.loop import StockBlock, use_attention
from foretell.models.decoder.packed import WHOLE_NUMBERS, PackedLinear
from foretell.ops.attention import attend
from foretell.ops.files import write_text
from foretell.speculation.costs import Costs
from foretell.train.answers import AT_ONCE
from foretell.train.draft import group_lengths
from foretell.train.heads.head import PIECE, TrainHead
from foretell.train.heads.head_data import Corpus, Known
from foretell.train.heads.head_report import RANKS, rank_table
from foretell.train.lm import Run
from foretell.train.objectives import CHUNK, objective_named, row_loss

if TYPE_CHECKING:
    from foretell.api.lm import LM

KIND = "foretell-anchored"  # of attention, by transformers' name
BACKWARD = 3  # forwards that a row and its gradient take


def runs_through_target(kind: str) -> bool:
    """Whether a head of this kind is trained here."""
    return kind in head_kinds() and issubclass(head_kinds()[kind], Anchored)


def check_inputs(
    config: TrainHead, states: Path | None, reference: Path | None, states_dtype: str
) -> None:
    """Raises BadConfig where a head of this kind does not learn from these inputs: a folder of
    states, a reference, a target in this number format.
    """
    if not runs_through_target(config.name):
        if states is None:
            what = "learns from hidden states: give a folder, --states FOLDER"
            raise BadConfig(f"{config.kind} {what}")
        return
    if reference is not None:
        raise BadConfig(f"{config.kind} takes no --reference: its rows learn from all tokens")
    if states_dtype in WHOLE_NUMBERS:
        what = "its rows learn through the target's layers; give bfloat16 or float32"
        raise BadConfig(f"{config.kind} takes no --states-dtype {states_dtype}: {what}")


def begin_anchored(target: Any, config: TrainHead, init: Path | None = None) -> Anchored:
    """The head that a run begins with. `init`: folder of one of the same kind and options. Raises
    BadConfig, BadModel, Unsupported.
    """
    options: dict[str, Any] = {}
    if config.depths:
        options["rows"] = config.depths
    if config.entry >= 0:
        options["entry"] = config.entry
    head: Any = build_head(config.name, target_shape(target, "train head"), options)
    head.take_weights(target)
    if init is not None:
        initial_head, _ = load_head(init, target, config.name)
        if initial_head.config != head.config:
            raise BadConfig(
                f"{init}: has options {initial_head.config.options}; give the same ones"
            )
        head.load_state_dict(initial_head.state_dict())
    return cast(Anchored, head)


@dataclass
class Pass:
    """Run through the layers: of a text, whose keys and values it keeps, or of rows beside it."""

    positions: torch.Tensor  # (n,) of the nodes that run
    anchors: torch.Tensor | None = None  # (n,) the place in the text below which each row stands
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (KV, T, D)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, length: int, like: torch.Tensor) -> torch.Tensor:
        """Additive (n, columns): those of the text (T,), and after them those of the rows."""
        if window not in self.masks:
            columns = torch.arange(length, device=like.device)
            row_positions = self.positions[:, None]
            if self.anchors is None:
                visible = columns <= row_positions
            else:
                own_rows = self.anchors[:, None] == self.anchors
                own_rows &= self.positions <= row_positions
                visible = torch.cat([columns <= self.anchors[:, None], own_rows], 1)
                columns = torch.cat([columns, self.positions])
            if window is not None:
                visible &= row_positions - columns < window
            self.masks[window] = torch.where(visible, 0.0, -torch.inf).to(like.dtype)
        return self.masks[window]


RUNNING: ContextVar[Pass] = ContextVar("foretell_anchored_pass")


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    run = RUNNING.get()
    layer: Any = module.layer_idx
    keys, values = k[0], v[0]
    if run.anchors is None:
        run.keys[layer], run.values[layer] = keys, values
        length = keys.shape[1]
    else:
        length = run.keys[layer].shape[1]
        keys = torch.cat([run.keys[layer], keys], 1)
        values = torch.cat([run.values[layer], values], 1)
    mask = run.mask(sliding_window, length, q)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = softcap is None and s_aux is None
    if grouped:
        mask = mask.repeat(q.shape[1] // len(keys), 1)
    return attend(q[0], keys, values, mask, scale, softcap, s_aux, grouped)[None], None


AttentionInterface.register(KIND, _attend)
AttentionMaskInterface.register(KIND, lambda *args, **kwargs: None)


def freeze_weights(hf: nn.Module) -> None:
    """Leaves the weights as they are, but so that gradients may pass by them."""
    hf.requires_grad_(False)
    weight_copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in hf.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_inference():  # of which nothing may be kept for a backward pass
                if weight not in weight_copies:
                    weight_copies[weight] = nn.Parameter(weight.clone(), requires_grad=False)
                setattr(module, name, weight_copies[weight])


class Through:
    """A decoder as a function of the rows beside a text. `frozen`: it is not trained itself.

    Raises Unsupported where gradients do not pass through its layers.
    """

    def __init__(self, target: Any, frozen: bool = True):
        target_shape(target, "train head")  # it has a loop over its layers
        if any(isinstance(module, PackedLinear) for module in target.hf.modules()):
            need = "layers that gradients pass through, which packed weights are not"
            cure = "give --states-dtype bfloat16 or float32"
            raise Unsupported.missing_capability("train head", target.name, need, cure)
        if frozen:
            freeze_weights(target.hf)
        self.frozen = frozen
        self.loop = target.loop
        self.layers = [StockBlock(layer) for layer in self.loop.layers]
        output = Output(target, None)
        self.output = output
        self.device, self.dtype = target.device, target.dtype
        self.weight = output.train_weight().to(self.device, self.dtype)  # (V, E)

    @contextmanager
    def running(self, run: Pass) -> Iterator[None]:
        token = RUNNING.set(run)
        try:
            with use_attention(self.loop.config, KIND):
                yield
        finally:
            RUNNING.reset(token)

    def run_layers(self, h: torch.Tensor, run: Pass, layers: Sequence[int]) -> torch.Tensor:
        """States (n, E) through these layers."""
        positions = run.positions[None]
        layer_kinds = self.loop.kinds or [None] * len(self.layers)
        rotary: dict[str | None, Any] = {}
        with self.running(run):
            layer_states = h[None]
            if 0 in layers:
                layer_states = self.loop.placed(layer_states, run.positions)
            for layer in layers:
                layer_kind = layer_kinds[layer]
                if layer_kind not in rotary:
                    rotary[layer_kind] = self.loop.rotary and self.loop.rotary(
                        layer_states, positions, *([layer_kind] if layer_kind else [])
                    )
                layer_states = self.layers[layer](layer_states, rotary[layer_kind], positions)
        return layer_states[0]

    def text(self, tokens: torch.Tensor, entry: int = 0) -> tuple[torch.Tensor, torch.Tensor, Pass]:
        """Runs a text (n,): what enters this layer, (n, E); the normed last states, which the
        output matrix reads, (n, E); and what rows beside it see of it.
        """
        run = Pass(torch.arange(len(tokens), device=self.device))
        entering = self.run_layers(self.loop.embedded(tokens), run, range(entry))
        finals = self.run_layers(entering, run, range(entry, len(self.layers)))
        return entering, self.loop.norm(finals), run

    def run_beside(
        self,
        text: Pass,
        entering_rows: torch.Tensor,
        below: torch.Tensor,
        places: torch.Tensor,
        entry: int,
    ) -> torch.Tensor:
        """Normed last states (m, E) of rows that enter this layer as `entering_rows` (m, E), below
        these places of the text (m,); `places` (m,): in their chains, from 0.
        """
        rows = Pass(below + places + 1, below, text.keys, text.values)
        states = self.run_layers(entering_rows.to(self.dtype), rows, range(entry, len(self.layers)))
        normed: torch.Tensor = self.loop.norm(states)
        return normed

    def __call__(
        self, head: Anchored, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed last states, which the output matrix reads: of the text (n,) itself, (n, E), and
        of the rows of these anchors (A,), (A, P, E), with the gradients of the head's weights.
        """
        depth = head.deepest
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            entering, finals, text = self.text(tokens, head.entry)
        places = torch.arange(depth, device=self.device).repeat(len(anchors))
        below = anchors.repeat_interleave(depth)
        entering_rows = head.rows(places, entering[below])
        states = self.run_beside(text, entering_rows, below, places, head.entry)
        return finals, states.unflatten(0, (len(anchors), depth))

    @torch.no_grad()
    def laws(self, finals: torch.Tensor) -> torch.Tensor:
        """Normed states (m, E) -> the target's distributions (m, V)."""
        parts = [(rows @ self.weight.T).float().softmax(-1) for rows in finals.split(CHUNK)]
        return torch.cat(parts)


def anchors_of(text: Known, count: int, seed: int) -> torch.Tensor:
    """At most `count` places of a text, ascending, whose first row speaks of the answer."""
    first_place, end = max(0, text.prompt - 2), len(text.tokens) - 2
    places = np.arange(first_place, max(first_place, end))
    if len(places) > count:
        places = np.sort(np.random.default_rng(seed).choice(places, count, replace=False))
    return torch.from_numpy(places)


def anchored_loss(
    head: Anchored, text: Known, through: Through, config: TrainHead, seed: int
) -> torch.Tensor:
    """Mean loss over a text's anchors and, weighed, over their rows."""
    tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(through.device)
    anchors = anchors_of(text, config.anchors, seed).to(through.device)
    finals, states = through(head, tokens, anchors)
    loss_by = objective_named(config.objective)
    loss_sum = states.new_zeros((), dtype=torch.float32)
    for row in range(head.deepest):
        own_places = anchors + row + 1  # its own place; its token is the next
        in_answer = (own_places + 1 >= text.prompt) & (own_places + 1 < len(tokens))
        own_places = own_places[in_answer]
        if not len(own_places):
            continue
        laws = through.laws(finals[own_places])
        row_sum = row_loss(
            states[in_answer, row], through.weight, laws, tokens[own_places + 1], loss_by
        )
        loss_sum = loss_sum + head.decay**row * row_sum / len(own_places)
    return loss_sum / head.deepest


@torch.no_grad()
def ranks_in(head: Anchored, texts: Sequence[Known], through: Through) -> list[np.ndarray]:
    """Ranks (m, P) int, by anchor and row, that rows give the own tokens of each greedy text, RANKS
    where such a token is not among the first.
    """
    text_ranks = []
    for text in texts:
        greedy = (text.tokens[text.prompt :] == text.top_tokens).all()
        anchor_end = len(text.tokens) - 1 - head.deepest
        anchors = torch.arange(max(0, text.prompt - 2), max(0, anchor_end))
        if not greedy or not len(anchors):
            continue
        tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(through.device)
        _, states = through(head, tokens, anchors.to(through.device))
        ranks = np.full(states.shape[:2], RANKS)
        for row in range(head.deepest):
            logits = torch.cat([part @ through.weight.T for part in states[:, row].split(CHUNK)])
            top_tokens = logits.topk(min(RANKS, logits.shape[1]), -1).indices.cpu()
            next_tokens = tokens.cpu()[anchors + row + 2]
            anchor_rows, rank = (top_tokens == next_tokens[:, None]).nonzero().T
            ranks[anchor_rows.numpy(), row] = rank.numpy()
        text_ranks.append(ranks)
    return text_ranks


def hits_of(ranks: Sequence[np.ndarray]) -> list[float]:
    """Share of anchors, by row, at which its best token, and all before it, are the text's."""
    if not ranks:
        return []
    is_right = np.concatenate(list(ranks)) == 0
    return [round(float(share), 4) for share in np.logical_and.accumulate(is_right, 1).mean(0)]


def plan_anchored(
    prompts: int, answer_tokens: int, config: TrainHead, rows: int, costs: Costs
) -> str:
    """Says how many hours a run takes, by the measured costs of the target's forwards."""
    tokens = prompts * answer_tokens
    answer_seconds = tokens * float(costs.curve(AT_ONCE)[-1]) / AT_ONCE
    extra_forwards = BACKWARD * rows * config.anchors / config.window  # for each token of a text
    token_seconds = float(costs.curve(PIECE)[-1]) / PIECE
    train_seconds = config.tokens * (1 + extra_forwards) * token_seconds
    return (
        f"at most {tokens:,} tokens of answers: {answer_seconds / 3600:.1f} hours to write them; "
        f"then {config.tokens:,} tokens of texts with {config.anchors} anchors each, about "
        f"{train_seconds / 3600:.1f} hours"
    )


class AnchoredRun(Run):
    """A run folder whose optimiser is Adam, its rate falling as a cosine."""

    def __init__(self, folder: Path, config: TrainHead, head: Anchored):
        super().__init__(folder, config, head, head)
        self.groups: list[list[int]] = []
        self.rounds = 0

    def make_optimisers(self, layers: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
        return [(torch.optim.Adam(self.model.parameters(), lr=self.rate), self.rate)]

    @property
    def rate(self) -> float:
        return float(self.config.rate or self.model.rate)

    def update(self) -> None:
        falling = (1 + math.cos(math.pi * self.step / self.config.steps)) / 2
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        (optimiser,) = self.optimisers
        for group in optimiser.param_groups:
            group["lr"] = self.rate * falling
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.step += 1

    def advance_on(self, corpus: Corpus, through: Through) -> float:
        """Takes an optimiser step; returns its mean loss."""
        config: Any = self.config
        while len(self.groups) <= self.step:
            lengths = [len(text.tokens) for text in corpus.train]
            self.groups += group_lengths(lengths, config.batch, config.seed * 1_000 + self.rounds)
            self.rounds += 1
        text_group = self.groups[self.step]
        loss_sum = 0.0
        for number in text_group:
            seed = (config.seed * 1_000_003 + self.step) * 4_096 + number
            loss = anchored_loss(self.model, corpus.train[number], through, config, seed) / len(
                text_group
            )
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
        self.update()
        return loss_sum


def train_anchored(
    lm: LM,
    files: Sequence[Path],
    out: Path,
    config: TrainHead,
    save_every: float = 300.0,
    quiet: bool = False,
    init: Path | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains until `config.tokens` are seen; writes OUT/head and returns the report.

    `init`: folder of a head of the same kind and options to begin with. `recipe`: all that the run
    was started with, which is kept in its folder. Raises BadConfig, Unsupported.
    """
    target: Any = lm.models["target"]
    through = Through(target)
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(files, None, config.window)
    head = begin_anchored(target, config, init)
    head.to(through.device)
    run = AnchoredRun(out, config, head)
    run.keep_recipe(recipe)
    run.run_steps(lambda: run.advance_on(corpus, through), save_every, quiet)
    ranks = ranks_in(head, corpus.held_back, through)
    report: dict[str, Any] = {
        "parameters": run.parameter_count,
        "tokens_seen": config.steps * config.batch,
        "answers": len(corpus.train),
        "hits": hits_of(ranks),
        "ranks": rank_table(ranks),
        "settings": asdict(config),
        "recipe": recipe,
    }
    report_extract = {name: report[name] for name in ("hits", "ranks", "tokens_seen")}
    save_head(head, None, out / "head", target, report_extract)
    write_text(out / "report.json", json.dumps(report, indent=1))
    return report

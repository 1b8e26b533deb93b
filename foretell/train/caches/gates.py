"""Which key heads of a model need all of a text: the gates that `kv=duo-attention` reads.

Every key head gets a gate from 1 to 0. What its query heads give is mixed, gate * full attention +
(1 - gate) * attention to the first rows and the last ones alone. The gates fall as long as the
states after passkeys, which were planted far back in a text, stay what full attention makes them.
The model itself stays as it is.

Paper: Xiao et al., DuoAttention, arXiv:2410.10819, section 3.2
Differs: texts of some hundred tokens with two passkeys, in 64 steps of a higher rate, so that a CPU
does it in minutes; the paper has up to 32,000 tokens, ten passkeys and 2,000 steps. Few texts, read
again and again. What precedes the first row that streaming heads miss is computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from foretell.errors import BadConfig, Unsupported
from foretell.kv.select.gates import save_gates
from foretell.models.decoder.loop import use_attention
from foretell.train import recipes
from foretell.train.caches.passkeys import Planted, Planting

if TYPE_CHECKING:
    from foretell.api.lm import LM

Tell = Callable[[str, int, int | None], None]
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values (1, KV, n, D)


@dataclass(frozen=True)
class TrainGates:
    """Settings of the run. Lengths are in tokens."""

    steps: int = 64  # each of one text
    texts: int = 16  # different ones, read again and again
    keys: int = 2  # passkeys of a text
    words: int = 32  # of a passkey
    shortest: int = 640  # text
    longest: int = 896  # text
    sinks: int = 128  # first rows that a streaming head keeps
    recent: int = 256  # last rows that it keeps
    rate: float = 0.03  # learning rate
    weight: float = 0.05  # of the mean gate beside the states' difference
    seed: int = 0  # of the passkeys

    def __post_init__(self) -> None:
        count_range = (1, 1 << 20)
        ranges = dict.fromkeys(("steps", "texts", "recent"), count_range)
        ranges |= {"sinks": (0, 1 << 20), "rate": recipes.RATE, "weight": (0, 100)}
        recipes.check_ranges(self, {**ranges, "seed": recipes.OF_RUNS["seed"]})
        if self.shortest <= self.sinks + self.recent:
            lower = f"above {self.sinks + self.recent}, the rows that streaming heads keep"
            raise BadConfig.field("shortest", self.shortest, lower)
        _ = self.planting

    @property
    def planting(self) -> Planting:
        return Planting(self.keys, self.words, self.shortest, self.longest)

    def pace(self, step: int) -> float:
        """The share of the learning rate at a step: up over the first fifth, down over the last."""
        fifth = max(1, self.steps // 5)
        return min(1.0, max((step + 1) / fifth, 0.1), max((self.steps - step) / fifth, 0.1))


@dataclass(eq=False)
class Reading:
    """How the layers attend in one forward.

    `gates` (L, KV); None: fully, and the first `kept` rows of every layer go to `rows`. Else these
    precede those of the forward.
    """

    sinks: int
    recent: int
    gates: torch.Tensor | None = None
    rows: dict[int, Rows] = field(default_factory=dict)

    @property
    def streamed_rows(self) -> int:
        """First rows after which streaming heads begin to miss some."""
        return self.sinks + self.recent

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q (1, H, n, D), k and v (1, KV, n, D) -> (1, H, n, D)."""
        has_groups = q.shape[1] != k.shape[1]
        if self.gates is None:
            self.rows[layer] = (
                k[:, :, : self.streamed_rows].clone(),
                v[:, :, : self.streamed_rows].clone(),
            )
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=has_groups
            )
        first_rows = self.rows[layer]
        k, v = torch.cat([first_rows[0], k], 2), torch.cat([first_rows[1], v], 2)
        key_positions = torch.arange(k.shape[2], device=q.device)
        distance = key_positions[first_rows[0].shape[2] :, None] - key_positions[None]
        is_streamed = (key_positions < self.sinks) | (distance < self.recent)
        both_outputs = [
            F.scaled_dot_product_attention(
                q, k, v, (distance >= 0) & seen_keys, scale=scale, enable_gqa=has_groups
            )
            for seen_keys in (True, is_streamed)
        ]
        gate = self.gates[layer].to(q).repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return gate * both_outputs[0] + (1 - gate) * both_outputs[1]


READING: ContextVar[Reading] = ContextVar("reading")


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **other_options: Any,
) -> tuple[torch.Tensor, None]:
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return READING.get().attend(layer, q, k, v, scale).transpose(1, 2), None


KIND = "foretell-gates"
AttentionInterface.register(KIND, _attend)
AttentionMaskInterface.register(KIND, lambda *args, **kwargs: None)


class Gating:
    """A model's gates and how far they change its states. The model's weights learn nothing."""

    def __init__(self, target: Any, config: TrainGates):
        self.target, self.config = target, config
        # A copy: joined matrices are of a kind that gradients do not go through.
        self.decoder = copy.deepcopy(target.hf.get_decoder()).requires_grad_(False)
        heads = target.layout[0][0]
        self.gates = torch.ones(len(target.layout), heads, device=target.device)
        self.gates.requires_grad_(True)
        self.known: dict[Planted, tuple[torch.Tensor, dict[int, Rows]]] = {}

    def states(self, tokens: Iterable[int], first_position: int, reading: Reading) -> torch.Tensor:
        """Normed last states (n, E) of tokens that stand at positions from `first_position`."""
        token_ids = torch.tensor([[*tokens]], device=self.target.device)
        position_ids = torch.arange(
            first_position, first_position + token_ids.shape[1], device=token_ids.device
        )[None]
        token = READING.set(reading)
        try:
            with use_attention(self.decoder.config, KIND):
                output_states: torch.Tensor = self.decoder(
                    input_ids=token_ids, position_ids=position_ids, use_cache=False
                ).last_hidden_state[0]
                return output_states
        finally:
            READING.reset(token)

    def full_states(self, text: Planted) -> tuple[torch.Tensor, dict[int, Rows]]:
        """The states from the first question on that full attention makes, and the first rows."""
        if text not in self.known:
            reading = Reading(self.config.sinks, self.config.recent)
            with torch.no_grad():
                states = self.states(text.tokens, 0, reading)[text.question_start :].clone()
            self.known[text] = states, reading.rows
        return self.known[text]

    def states_difference(self, text: Planted) -> torch.Tensor:
        """The mean squared difference of states from the first question on."""
        full_states, rows = self.full_states(text)
        reading = Reading(self.config.sinks, self.config.recent, self.gates, rows)
        skipped_rows = reading.streamed_rows
        mixed_states = self.states(text.tokens[skipped_rows:], skipped_rows, reading)[
            max(0, text.question_start - skipped_rows) :
        ]
        return (
            (
                mixed_states.float()
                - full_states[max(0, skipped_rows - text.question_start) :].float()
            )
            .square()
            .mean()
        )


def check_gates(target: Any) -> None:
    """Raises Unsupported for a model whose gates cannot be learned."""
    same_layout = bool(target.layout) and len({*target.layout}) == 1 and None not in target.layout
    loop = getattr(target, "loop", None)
    need = ""
    if not same_layout or loop is None or any(loop.windows):
        need = "key heads alike in every layer, which see all of a text"
    elif target.narrow:
        need = "matrices that gradients go through"
    if need:
        cure = "load it with --dtype float32" if same_layout and loop else "use another policy"
        raise Unsupported.missing_capability("train gates", target.name, need, cure)


def train_gates(
    lm: LM, documents: Iterable[str], out: Path, config: TrainGates, tell: Tell | None = None
) -> dict[str, Any]:
    """Writes the gates of `lm`'s target, and says how they were found. Raises BadConfig where
    the documents are too short, and Unsupported.
    """
    target: Any = lm.models["target"]
    check_gates(target)
    if config.longest > target.context:
        raise BadConfig.field("longest", config.longest, f"at most {target.context:,}")
    gating = Gating(target, config)
    optimizer = torch.optim.AdamW([gating.gates], lr=config.rate, weight_decay=0)

    def encode(text: str) -> list[int]:
        return lm.encode(text, special=False)

    texts = [*islice(config.planting.texts(encode, documents, config.seed), config.texts)]
    differences = []
    for step in range(config.steps):
        if tell is not None:
            tell("training", step, config.steps)
        for group in optimizer.param_groups:
            group["lr"] = config.rate * config.pace(step)
        difference = gating.states_difference(texts[step % len(texts)])
        (difference + config.weight * gating.gates.abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            gating.gates.clamp_(0, 1)
        differences.append(float(difference.detach()))
    gates = gating.gates.detach().float().cpu()
    save_gates(gates, out, target, config.steps)
    last_differences = differences[-min(len(differences), 16) :]
    return {
        "steps": config.steps,
        "difference": round(sum(last_differences) / len(last_differences), 5),
        "mean": round(float(gates.mean()), 4),
        "median": round(float(gates.median()), 4),
    }

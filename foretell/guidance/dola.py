"""DoLa: what the model's last layer says more of than an earlier one.

Some of the earlier layers are read with the model's own norm and head. In every row the one whose
distribution is farthest from the last layer's, by their Jensen-Shannon divergence, is its opponent:
the row is ln q of the last layer less ln q of the opponent, for tokens of which the last layer's
probability is at least `least` times its best one's; others come far behind. What is there early
(grammar, common words) cancels, what comes late (facts) stays.

Paper: Chuang et al., DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language
Models, arXiv:2309.03883
Guarantee: lossy: the contrast's distribution is not the model's own, on purpose; whatever drafts,
the text has exactly the contrast's distribution
Cost: target 1
Needs: a model whose layers are run one by one here, which shows its hidden states
Trains: nothing
Differs:
- every row has its own opponent, where the paper's code takes one for a whole batch
- the divergence is the paper's; `reference=yes` takes what its code computes, in which the two
distributions and their mean change places
- `low` and `high` are every second layer of the first and second half, as transformers has them (of
models with more than 40 layers the first or last 20; with tied embeddings from layer 2 on); the
paper finds the better of the two on a validation set
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.drafter import Reading
from foretell.core.settings import Range
from foretell.core.source import Nodes, Source
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply
from foretell.errors import BadConfig
from foretell.guidance.mixing import (
    layer_rows,
    log_probs,
    mask_implausible,
    mask_impossible,
    requested_nodes,
)

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

MANY = 40  # layers above which a half has MANY / 2 of them


@dataclass(frozen=True)
class Dola(Source):
    """The settings of DoLa; with layers=none the rows are the target's own."""

    layers: str = "low"  # candidates: low, high, none, or numbers of layers, as in 2 4 6
    # share of the best token's probability below which a token is left out
    least: Annotated[float, Range(0, 1)] = 0.1
    reference: bool = False  # the divergence as the paper's code computes it

    def __post_init__(self) -> None:
        super().__post_init__()
        layer_words = self.layers.split()
        if self.layers not in ("low", "high", "none") and not (
            layer_words and all(word.isdecimal() for word in layer_words)
        ):
            expected = "low, high, none, or numbers of layers with spaces between"
            raise BadConfig.field("dola:layers", self.layers, expected)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.layers == "none" else ("layers", "taps")

    def start(self, ctx: Context) -> Generator[Message, Any, tuple[int, ...]]:
        """Returns the candidates: the layers that are entered with what is read."""
        return self.candidate_layers(ctx.models["target"])
        yield Ask(TokenTree(0))  # never reached: makes this a generator

    def candidate_layers(self, model: Model) -> tuple[int, ...]:
        """The numbers of the candidates. Raises BadConfig for layers that the model has not."""
        layer_count = len(model.layout)
        if self.layers == "none":
            return ()
        if self.layers in ("low", "high"):
            config = getattr(model, "config", None)
            has_tied_embeddings = bool(getattr(config, "tie_word_embeddings", False))
            first_layer = (
                min(2, layer_count - 1) if has_tied_embeddings else 0
            )  # layer 0 of such a model says its own token
            half_count = layer_count // 2 if layer_count <= MANY else MANY // 2
            upper_start = half_count if layer_count <= MANY else layer_count - half_count
            is_low = self.layers == "low"
            chosen_layers = tuple(
                range(first_layer, half_count, 2) if is_low else range(upper_start, layer_count, 2)
            )
            return chosen_layers or (first_layer,)
        chosen_layers = tuple(int(word) for word in self.layers.split())
        if max(chosen_layers) >= layer_count or len({*chosen_layers}) < len(chosen_layers):
            expected = f"different numbers from 0 to {layer_count - 1} for {model.name}"
            raise BadConfig.field("dola:layers", self.layers, expected)
        return chosen_layers

    def read_rows(
        self,
        ctx: Context,
        state: tuple[int, ...],
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        requested_rows = requested_nodes(tree, nodes)
        tapped_layers = tuple(sorted({*taps, *state}))
        reply: Reply = yield Ask(tree, branch=ctx.branch, rows=requested_rows, taps=tapped_layers)
        if not state:
            return reply
        model = ctx.models["target"]
        last_logs = log_probs(reply.logits)
        opponent_logs = torch.empty_like(last_logs)
        max_distances = last_logs.new_full((len(last_logs), 1), -torch.inf)
        for layer in state:
            early_logs = log_probs(layer_rows(model, reply, layer).to(last_logs))
            distances = self.row_distance(last_logs, early_logs)[:, None]
            opponent_logs = torch.where(distances > max_distances, early_logs, opponent_logs)
            max_distances = torch.maximum(distances, max_distances)
        contrast_rows = mask_impossible(last_logs - opponent_logs, last_logs, opponent_logs)
        mixed_rows = mask_implausible(contrast_rows, last_logs, self.least)
        return replace(reply, logits=mixed_rows)

    def row_distance(self, first_logs: torch.Tensor, second_logs: torch.Tensor) -> torch.Tensor:
        """The divergence (N,) of two distributions, given as logarithms (N, V)."""
        p, q = first_logs.exp(), second_logs.exp()
        mean_probs = (p + q) / 2
        if self.reference:
            divergence_terms = mean_probs * (mean_probs.log() - (first_logs + second_logs) / 2)
            return torch.where(mean_probs > 0, divergence_terms, 0).sum(-1)
        entropy = torch.special.entr
        return (entropy(mean_probs) - (entropy(p) + entropy(q)) / 2).sum(-1)

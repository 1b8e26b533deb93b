"""DoLa: what the model's last layer says more of than an earlier one.

Some of the earlier layers are read with the model's own norm and head. In every row the one whose
law is farthest from the last layer's, by their Jensen-Shannon divergence, is its opponent: the row
is ln q of the last layer less ln q of the opponent, for tokens of which the last layer's chance is
at least `least` times its best one's; others come far behind. What is there early (grammar, common
words) cancels, what comes late (facts) stays.

Paper: Chuang et al., DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language
Models, arXiv:2309.03883
Guarantee: lossy: the contrast's law is not the model's own, on purpose; whatever drafts, the text
has exactly the contrast's law
Cost: target 1
Needs: a model whose layers are run one by one here, which shows its hidden states
Trains: nothing
Differs:
- every row has its own opponent, where the paper's code takes one for a whole batch
- the divergence is the paper's; `reference=yes` takes what its code computes, in which the two laws
and their mean change places
- `low` and `high` are every second layer of the first and second half, as transformers has them (of
models with more than 40 layers the first or last 20; with tied embeddings from layer 2 on); the
paper finds the better of the two on a validation set
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.source import Nodes, Reading, Source
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply
from foretell.errors import BadConfig
from foretell.guidance.mixing import layer_rows, logs, plausible, possible, wanted

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

MANY = 40  # layers above which a half has MANY / 2 of them


@dataclass(frozen=True)
class Dola(Source):
    """With layers=none the rows are the target's own."""

    layers: str = "low"  # candidates: low, high, none, or numbers of layers, as in 2 4 6
    least: float = 0.1  # share of the best token's chance below which a token is left out
    reference: bool = False  # the divergence as the paper's code computes it

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise BadConfig.field("dola:least", self.least, "between 0 and 1")
        words = self.layers.split()
        if self.layers not in ("low", "high", "none") and not (
            words and all(word.isdecimal() for word in words)
        ):
            allowed = "low, high, none, or numbers of layers with spaces between"
            raise BadConfig.field("dola:layers", self.layers, allowed)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.layers == "none" else ("layers", "taps")

    def start(self, ctx: Context) -> Generator[Message, Any, tuple[int, ...]]:
        """The candidates: the layers that are entered with what is read."""
        return self.candidates(ctx.models["target"])
        yield Ask(TokenTree(0))  # never reached: makes this a generator

    def candidates(self, model: Model) -> tuple[int, ...]:
        """Raises BadConfig for layers that the model has not."""
        count = len(model.layout)
        if self.layers == "none":
            return ()
        if self.layers in ("low", "high"):
            config = getattr(model, "config", None)
            tied = bool(getattr(config, "tie_word_embeddings", False))
            first = min(2, count - 1) if tied else 0  # layer 0 of such a model says its own token
            half = count // 2 if count <= MANY else MANY // 2
            later = half if count <= MANY else count - half
            low = self.layers == "low"
            found = tuple(range(first, half, 2) if low else range(later, count, 2))
            return found or (first,)
        found = tuple(int(word) for word in self.layers.split())
        if max(found) >= count or len({*found}) < len(found):
            allowed = f"different numbers from 0 to {count - 1} for {model.name}"
            raise BadConfig.field("dola:layers", self.layers, allowed)
        return found

    def read(
        self,
        ctx: Context,
        state: tuple[int, ...],
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        rows = wanted(tree, nodes)
        tapped = tuple(sorted({*taps, *state}))
        reply: Reply = yield Ask(tree, branch=ctx.branch, rows=rows, taps=tapped)
        if not state:
            return reply
        model = ctx.models["target"]
        last = logs(reply.logits)
        opponent = torch.empty_like(last)
        farthest = last.new_full((len(last), 1), -torch.inf)
        for layer in state:
            early = logs(layer_rows(model, reply, layer).to(last))
            apart = self.distance(last, early)[:, None]
            opponent = torch.where(apart > farthest, early, opponent)
            farthest = torch.maximum(apart, farthest)
        contrast = possible(last - opponent, last, opponent)
        mixed = plausible(contrast, last, self.least)
        return replace(reply, logits=mixed)

    def distance(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """(N,) of two laws, given as logarithms (N, V)."""
        p, q = first.exp(), second.exp()
        mean = (p + q) / 2
        if self.reference:
            terms = mean * (mean.log() - (first + second) / 2)
            return torch.where(mean > 0, terms, 0).sum(-1)
        entropy = torch.special.entr
        return (entropy(mean) - (entropy(p) + entropy(q)) / 2).sum(-1)

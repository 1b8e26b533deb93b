"""The target's first layers draft with its own norm and head, and verification runs the others.

A draft token leaves the model after layer `exit_layer`. The rows that these layers wrote, and the
hidden states that left them, stay in the target's cache: the forward that verifies the chain enters
the next layer with those states, so that no layer runs twice for a token. A step of g drafted
tokens computes (g + 1) L layers of one token each, as the verification of any draft of g tokens
does, and no draft model beside it. The target should be trained for it (layer dropout, a loss at
every exit): an ordinary model says little behind its first layers. With `best` nothing is drawn at
any temperature, and how much is drafted follows what it costs.

Paper: Elhoushi et al., LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding,
arXiv:2404.16710
Guarantee: exact
Cost: target 1, layers length+1
Needs: a model whose layers can be run one by one
Trains: nothing; the target, for speed
Differs:
- a prompt that fits one forward is read in the same way, by the first layers and then the others
- where a cache has lost the draft's rows (its request was paused), or another drafter or a
constraint has added nodes, verification runs all layers
- `best` is ours: a token is accepted with the target's own probability of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.own.early_exit import exit_chain, layer_count
from foretell.errors import BadConfig


@dataclass(frozen=True)
class Layerskip(Drafter):
    """A number of layers and a count.

    The authors take 8 layers of 32 and drafts of 6 for Llama 2 7B, 3 and 6 for Llama 3.2 1B."""

    # layers that draft; 0: a quarter of the target's
    exit_layer: Annotated[int, Range(0, 4096)] = 0
    length: Annotated[int, Range(1, 256)] = 6  # tokens drafted
    best: bool = False  # the layers' best tokens at any temperature

    needs = ("layers",)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return not self.best

    def start(self, ctx: Context) -> int:
        """The exit. Raises BadConfig for one that the target does not have."""
        target_layers = layer_count(ctx, "layerskip")
        if self.exit_layer >= target_layers:
            allowed_layers = f"from 0 (a quarter) to {target_layers - 1} for this model"
            raise BadConfig.field("layerskip:exit_layer", self.exit_layer, allowed_layers)
        return self.exit_layer or max(1, target_layers // 4)

    def steps(self, ctx: Context, exit_layer: int, budget: int) -> Drafting:
        length = min(self.length, budget - 1, ctx.depth)
        tree: TokenTree = yield from exit_chain(
            ctx, exit_layer, length, "layerskip", take_best=self.best
        )
        return tree

"""A draft model with exits: each token leaves it after the first that is sure enough of it.

The draft model has a few exits, which share its last norm and head, and is trained at all of them
at once. A token is computed up to the first exit. If the best token there has at least the exit's
threshold of a probability, it is drafted by that exit's distribution; else the layers up to the
next exit go on from the hidden state, and the last exit drafts in any case. Which exit drafts is
decided before the token is drawn, so the distribution it is drawn from is that exit's. A token that
stopped early has no rows after its exit. When a later one goes further, all that lack the next
layers are run through them first, together and in order (drafters/model/lazy_layers.py): a layer
runs at most once for a token, and the rows are those of a forward through all layers.

One draft model serves many targets: thresholds are the target's, from the table that
`foretell train exits` keeps in the draft model's folder, where slow targets have higher ones. An
exit with a threshold above 1 is left out, and its head costs nothing.

Paper: Kavehzadeh et al., S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested
Large Language Models, arXiv:2407.01955
Guarantee: exact
Cost: target 1, s2d length+length+length at most
Needs: a draft model with the target's tokenizer, whose layers can be run one by one
Trains: the draft model, by `foretell train draft --exits`
Differs:
- drafts are chains; the paper also drafts trees
- rows after an exit are computed when they are needed, where the paper does not say
- the probability is that of temperature 1, before the request's sampling options
- without a table the thresholds are 0.6, which is ours: the paper's are not known here
- `best` is ours, and draws nothing at any temperature
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply
from foretell.drafters.model.chains import continue_chains
from foretell.drafters.model.exit_table import check_exits, exits_by_thirds, trained_exits
from foretell.drafters.model.lazy_layers import LazyLayers
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig, ForetellWarning

NAME = "s2d"  # of the draft model as one with exits
USUAL = 0.6


class Sorted(LazyLayers):
    """The draft model with the exits in use, and the threshold of each; the last one's is 0."""

    def __init__(self, base: Model, exits: tuple[int, ...], thresholds: tuple[float, ...]):
        used_exits = [pair for pair in zip(exits, thresholds, strict=True) if pair[1] <= 1]
        super().__init__(base, [exit_layer for exit_layer, _ in used_exits], NAME)
        self.thresholds = [threshold for _, threshold in used_exits]


@dataclass(frozen=True)
class S2D(Drafter):
    """`exits` are numbers of layers; thresholds and `confidence` are probabilities."""

    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain
    # layers after which it may stop; none: those it was trained with
    exits: Annotated[tuple[int, ...], Range(1, 4096)] = ()
    # of the exits but the last, or one for all; none: the target's, else 0.6
    thresholds: Annotated[tuple[float, ...], Range(0)] = ()
    # a chain ends where the last exit's best token is less likely than this
    confidence: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    best: bool = False  # the exits' best tokens at any temperature

    models = ("draft",)
    draft_needs = ("layers",)  # capabilities of the draft model

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return not self.best

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The draft model with its exits.

        Raises BadConfig for exits that it does not have, or another number of thresholds than of
        exits; Unsupported where its layers cannot be run one by one; BadModel where its folder says
        nonsense of its exits. Warns where it was not trained with the exits.
        """
        draft_model = models.get("draft")
        if draft_model is None:  # which is told of where models are looked for
            return {}
        layer_count = len(draft_model.layout)
        known_exits = trained_exits(draft_model)
        exits = exits_by_thirds(layer_count) if known_exits is None else known_exits.layers
        if self.exits:
            exits = check_exits("s2d:exits", self.exits, layer_count)
        if hasattr(draft_model, "hf") and (
            known_exits is None or not {*exits} <= {*known_exits.layers}
        ):
            warnings.warn(
                f"{draft_model.name} was not trained with exits after {' '.join(map(str, exits))} "
                "layers and drafts badly there; `foretell train draft --exits` trains it",
                ForetellWarning,
                stacklevel=2,
            )
        thresholds = self.thresholds
        if not thresholds and known_exits is not None and exits == known_exits.layers:
            thresholds = known_exits.thresholds_for(models["target"]) or ()
        if len(thresholds) <= 1:
            thresholds = (thresholds or (USUAL,)) * (len(exits) - 1)
        if len(thresholds) != len(exits) - 1:
            given_values = " ".join(map(str, self.thresholds))
            allowed_counts = f"one, or one for each of the {len(exits) - 1} exits before the last"
            raise BadConfig.field("s2d:thresholds", given_values, allowed_counts)
        return {NAME: Sorted(draft_model, exits, (*thresholds, 0.0))}

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx, NAME)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return tree
        node = 0
        for draw_index in range(min(self.length, budget - 1, reader.max_depth(ctx))):
            exit_layer, row = yield from self._climb_exits(ctx, reader, tree, node)
            if row is None:
                break
            source = f"{NAME}-{exit_layer}"
            (node,) = continue_chains(
                ctx, tree, node, row, draw_count=draw_index, source=source, take_best=self.best
            )
            if ctx.ends(tree, node):
                break
        return tree

    def _climb_exits(
        self, ctx: Context, reader: DraftReader, tree: TokenTree, node: int
    ) -> Generator[Message, Any, tuple[int, torch.Tensor | None]]:
        """The exit that drafts the token after `node`, and its row (V,); None: nobody is sure
        enough of any.
        """
        model: Any = reader.model
        lower_layer = 0
        for exit_layer, threshold in zip(model.exits, model.thresholds, strict=True):
            layers = tuple(range(lower_layer, exit_layer))
            reply: Reply = yield Ask(tree, NAME, ctx.branch, rows=[node], layers=layers)
            (row,) = reader.resized_rows(reply)
            lower_layer = exit_layer
            probability = float(row.softmax(-1).max())
            if exit_layer < model.exits[-1] and probability >= threshold:
                return exit_layer, row
        return lower_layer, row if probability >= self.confidence else None

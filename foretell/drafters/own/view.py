"""The target drafts for itself over a few rows of its own cache, those that a cache policy reads.

Over a long text a step reads many cache rows, and most of them matter little. So the target drafts
a chain over those rows that `kv` selects, the first ones and the last (`streaming-llm`) or what a
query asks for (`quest`, `double-sparsity`), and verifies it over all. No row is copied and none is
given up: a draft's follow the text's until the target writes its next ones there.

Paper: Sadhukhan et al., MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context
Generation with Speculative Decoding, arXiv:2408.11049
Guarantee: exact
Cost: target 1, view length at most
Needs: a target whose layers keep cache rows of all of a text
Trains: nothing
Try: --method view:kv=quest --compare
Differs:
- the rows are read where the target has them, at their positions; the paper's draft has a cache of
its own, of a fixed length
- any policy that selects may choose them; the paper has the first and last rows, and rows of the
prompt that its last tokens attend to
- a chain may end early, where the draft's best token is less likely than `confidence`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.chains import draw_chains
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import KV
from foretell.kv.select.view_model import build_viewed

VIEW = "view"  # the name of the model


@dataclass(frozen=True)
class View(Drafter):
    """`kv` must be given; `length` is a count, `confidence` a probability."""

    kv: KV | None = None  # the cache policy whose rows are read
    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain
    once: bool = False  # whether all of a chain read what is selected for the text's last token
    # a chain ends where its best token is less likely than this
    confidence: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.kv, KV):
            example = "a cache policy, as in view:kv=quest or view:kv=(quest:budget=512,page=8)"
            raise BadConfig.field("view:kv", self.kv, example)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The target over the rows that are read. Raises Unsupported, BadConfig."""
        assert self.kv is not None
        return {VIEW: build_viewed(models["target"], self.kv, "view:kv", self.once)}

    def start(self, ctx: Context) -> DraftReader:
        if ctx.request.policy is not None:
            name = ctx.models["target"].name
            need = "all rows of the text, and a cache policy changes them"
            raise Unsupported.missing_capability("view", name, need, "use one of the two alone")
        return DraftReader(ctx, VIEW)

    def steps(self, ctx: Context, state: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        length, min_confidence = self.length, self.confidence
        yield from draw_chains(ctx, state, tree, 1, length, budget, VIEW, min_confidence)
        return tree

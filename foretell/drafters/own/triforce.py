"""A hierarchy for long prompts: a draft model, the target over few of its rows, the whole target.

A step over a long text reads many cache rows; most of them matter little. So the target drafts for
itself over a part of its rows: of the prompt the chunks that its last token's queries are nearest
to, chosen once in each layer and for each key-value head, and of later text all. That target in
turn is sped up by a draft model that reads the beginning and the end of the text alone. Each token
it emits has the distribution of the target over the retrieved rows, whatever the draft model
proposed, and names it when the whole target verifies `length` of them at once.

With `fresh` the chunks are those of all of the text, chosen anew after every verification for its
last token, and read where the target has them. With `view` a cache policy that selects rows chooses
in their place: `triforce:view=streaming-llm`, `triforce:view=(quest:budget=512,page=8)`. What is
selected serves all tokens of a draft.

Paper: Sun et al., TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding, arXiv:2404.11912
Guarantee: exact
Cost: target 1, triforce length at most, triforce-draft length at most
Needs: a draft model with the target's tokenizer; a target whose layers see all of a text
Trains: the draft model, best distilled from the target
Differs:
- where the middle level refuses a token it goes on with the residual distribution; the released
code takes a plain sample there, and its texts have another distribution than the target's
- later tokens take more rows, where the paper's take the place of retrieved ones
- a prompt may have any length; the rows after its last whole chunk are kept, of a short one a
quarter in smaller chunks
- key-value heads that several queries share are scored by the sum of these
- the draft model's rows keep their positions in the text, and are given up several at a time
- `fresh` and `view` are ours; the released code never chooses again
- the paper's tree for a cache that lies outside the GPU is left out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.chains import draw_chains
from foretell.drafters.model.nested import Nested
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.own.windowed import Windowed
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import KV
from foretell.kv.select.paged import Chunks
from foretell.kv.select.view_model import Viewed, build_viewed, check_whole, once_per_draft

MIDDLE, LAST = "triforce", "triforce-draft"


@dataclass(frozen=True)
class Last(Drafter):
    """The lowest level: a chain of the draft model's."""

    length: int

    models = (LAST,)
    draws = True

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx, LAST)

    def steps(self, ctx: Context, state: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if state.can_read(ctx.tokens):
            yield from draw_chains(ctx, state, tree, 1, self.length, budget, LAST)
        return tree


@dataclass(frozen=True)
class Triforce(Drafter):
    """All are counts of tokens or rows."""

    length: Annotated[int, Range(1, 256)] = 6  # tokens drafted for the target a step
    # rows that are retrieved of the prompt; at most a quarter of it
    budget: Annotated[int, Range(1, 1 << 24)] = 4096
    chunk: Annotated[int, Range(1, 4096)] = 8  # tokens whose rows are retrieved together
    ahead: Annotated[int, Range(1, 64)] = 1  # tokens that the draft model drafts at once
    sinks: Annotated[int, Range(0, 1 << 16)] = 16  # first tokens whose rows the draft model keeps
    window: Annotated[int, Range(1, 1 << 24)] = 240  # last ones
    fresh: bool = False  # whether chunks are chosen anew after each verification
    view: KV | None = None  # a cache policy that selects rows, in place of chunks

    models = ("draft",)
    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fresh and self.view is not None:
            complaint = "there are no chunks to choose: leave fresh or view out"
            raise BadConfig(f"triforce:fresh=yes,view={self.view.name}: {complaint}")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The target over retrieved rows, and the draft model over the last ones.

        Raises Unsupported, BadConfig.
        """
        target, draft_model = models["target"], models.get("draft")
        if draft_model is None:  # which is told of where models are looked for
            return {}
        return {
            MIDDLE: self._middle_reader(target),
            LAST: Windowed(draft_model, self.sinks, self.window),
        }

    def _middle_reader(self, target: Model) -> Model:
        if self.view is not None:
            return build_viewed(target, self.view, "triforce:view", per_draft=True)
        if self.fresh:
            check_whole("triforce", target)
            chunks = Chunks(0, max(1, self.budget // self.chunk), self.chunk)
            return Viewed(
                target, once_per_draft(chunks, per_draft=True), f"{self.budget} rows of chunks"
            )
        make_retrieving = getattr(target, "retrieving_model", None)
        if make_retrieving is None:
            need = "cache rows that can be chosen from"
            raise Unsupported.missing_capability(
                "triforce", target.name, need, "use the method draft"
            )
        retrieving_model: Model = make_retrieving(self.budget, self.chunk)
        return retrieving_model

    def start(self, ctx: Context) -> Nested:
        if ctx.request.policy is not None:
            name = ctx.models["target"].name
            need = "all rows of the text, and a cache policy changes them"
            raise Unsupported.missing_capability("triforce", name, need, "use one of the two alone")
        return Nested(ctx, "triforce", MIDDLE, Last(self.ahead), self.ahead)

    def steps(self, ctx: Context, state: Nested, budget: int) -> Drafting:
        length = min(self.length, budget - 1)
        if length < 1:
            return TokenTree(ctx.tokens[-1])
        tree = yield from state.draft_chain(ctx, length)
        return tree

    def observe(self, ctx: Context, state: Nested, step: Feedback) -> None:
        state.observe(ctx, step)

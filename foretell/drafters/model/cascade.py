"""A draft model that is itself sped up by a drafter drafts a chain.

The inner drafter proposes what the draft model will say; the draft model verifies it in one forward
with an exact rule and goes on until `length` tokens stand. Each of them has the draft model's own
distribution, whatever the inner drafter proposed, and names that distribution when the target
verifies it. So the tokens are those that `draft` would draft, in fewer forwards of the draft model.
Of the inner drafter's trees the policy keeps what pays, as it does with any other drafter's. A
cascade may stand within a cascade: `cascade:inner=(draft:length=2),model=middle` has two draft
models, of which the smaller drafts for the other.

Paper: Sun et al. (TriForce), arXiv:2404.11912, section 4.2, of which it is the hierarchy alone;
Chen et al. (Cascade Speculative Drafting), arXiv:2312.11462, its vertical cascade
Guarantee: exact
Cost: target 1, draft length at most
Needs: a draft model with the target's tokenizer, and what the inner drafter needs, of that model
Trains: nothing
Try: --method cascade:inner=suffix --compare
Differs:
- any drafter may be the inner one, the two papers have a draft model and n-grams there; one that
writes a text of its own is refused, since that cannot be taken back
- where the draft model refuses an inner token it goes on with the residual distribution; TriForce's
released code takes a plain sample there and so emits another distribution than it records
- the number of tokens is fixed beforehand, and cut by no threshold
- the inner drafter learns from what the draft model says within a draft on a copy of its state,
since the text may not come to have these tokens; what it shares with other requests it keeps
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
from foretell.drafters.model.nested import Nested
from foretell.errors import BadConfig


@dataclass(frozen=True)
class Cascade(Drafter):
    """`inner` must be given; lengths and sizes are counts."""

    inner: Drafter | None = None  # the drafter that drafts for the draft model
    length: Annotated[int, Range(1, 256)] = 4  # tokens drafted for the target
    model: str = "draft"  # the name of the draft model
    # nodes that the inner drafter may propose at once; 0: as many as pay
    size: Annotated[int, Range(0, 1024)] = 0

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Drafter):
            example = "a drafter, as in cascade:inner=suffix or cascade:inner=(ngram:n=2,k=8)"
            raise BadConfig.field("cascade:inner", self.inner, example)
        if self.model == "target" or self.model in self.inner.models:
            allowed_models = "another model than the target and those that the inner drafter asks"
            raise BadConfig.field("cascade:model", self.model, allowed_models)
        if self.inner.taps:
            allowed_drafters = "a drafter that reads neither hidden states nor rows of the target"
            raise BadConfig.field("cascade:inner", self.inner, allowed_drafters)

    @property
    def drafter(self) -> Drafter:
        """The inner one."""
        assert self.inner is not None
        return self.inner

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.model, *self.drafter.models)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        if self.model not in models:
            return {}  # it is refused for that by name
        inner_models = self.drafter.bring({**models, "target": models[self.model]})
        if any(model.reads_target for model in inner_models.values()):
            allowed_drafters = "a drafter that reads neither hidden states nor rows of the target"
            raise BadConfig.field("cascade:inner", self.inner, allowed_drafters)
        return inner_models

    def start(self, ctx: Context) -> Nested:
        return Nested(ctx, "cascade", self.model, self.drafter, self.size)

    def steps(self, ctx: Context, state: Nested, budget: int) -> Drafting:
        length = min(self.length, budget - 1)
        if length < 1:
            return TokenTree(ctx.tokens[-1])
        tree = yield from state.draft_chain(ctx, length)
        return tree

    def observe(self, ctx: Context, state: Nested, step: Feedback) -> None:
        state.observe(ctx, step)

"""A smaller model drafts: one chain, or several independent ones merged by common beginnings.

The draft model continues the text for `length` tokens, each drawn from its own distribution under
the request's sampling options (at temperature 0: its best token). With `drafts` above 1, that many
chains are drawn independently and merged by prefix, which is a tree drawn with replacement; one
draft forward grows all of them by one level. A chain stops at a token that ends the text, and no
level is begun that could exceed the budget. With `best` it is the draft model's best tokens at any
temperature: then nothing is drawn, the C library computes a chain in one call, how much is drafted
follows what it costs, and a seed gives the tokens that plain decoding gives.

With `online=N` the draft model learns while it serves: after every N responses of a tenant one step
of AdamW at `rate` on the divergence of its distributions from the target's (D(p || q), in float32),
where verification tested its tokens. The target's distributions there are known, so nothing is
computed twice. Each request keeps the weights it began with, and its drafts are the draft model's
best tokens: what was learnt changes how much is accepted, never a token.

Paper: Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; several drafts:
Miao et al. (SpecInfer), arXiv:2305.09781; learning: Liu et al. (Online Speculative Decoding),
arXiv:2310.07177
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer (the vocabularies may be padded to different sizes)
Trains: the draft model, best distilled from the target; with `online=N` further, while it serves
Differs:
- `confidence` may end a chain early, before a token is drawn: the decision sees the distribution,
not the draw
- `best` is ours: a token is accepted with the target's own probability of it
- `online` drafts as `best` does, where the paper's drafts are drawn
- it learns at accepted places as well as at refused ones, where the paper has the refused alone
- of a response at most 64 places are kept, those first where the two probabilities of the drafted
token differ most, on its last 1024 tokens, with the target's 64 likeliest tokens and all others as
one
- the update is made before the first draft of the next request; the paper makes it in idle time
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.chains import draw_chains
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig
from foretell.models.online import Corrections, Learner, learning_models


class State(DraftReader):
    """State of one request: the draft model as it reads it, and where it learns."""

    corrections: Corrections | None = None


@dataclass(frozen=True)
class Draft(Drafter):
    """Lengths and numbers are counts; `confidence` is a probability."""

    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain
    drafts: Annotated[int, Range(1, 64)] = 1  # independent chains
    # a chain ends where the draft model's best token is less likely than this
    confidence: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    best: bool = False  # the draft model's best tokens at any temperature
    # responses of a tenant after which the draft model learns; 0: never
    online: Annotated[int, Range(0, 256)] = 0
    rate: Annotated[float, Range(0, 1, open_low=True)] = 1e-4  # learning rate of AdamW

    models = ("draft",)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return not self.follows

    @property
    def follows(self) -> bool:
        """Whether drafts are the draft model's best tokens, so that a seed's tokens are plain
        decoding's, whatever it has learnt.
        """
        return self.best or self.online > 0

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.drafts > 1 else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follows and self.drafts > 1:
            option_text = "best=yes" if self.best else f"online={self.online}"
            raise BadConfig(f"draft:drafts={self.drafts},{option_text}: there is one best chain")

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The draft model as one that learns. Raises Unsupported where it cannot."""
        return learning_models("draft", models) if self.online else {}

    def start(self, ctx: Context) -> State:
        state = State(ctx)
        if self.online:
            model: Any = ctx.models["draft"]
            make_learner = model.learner
            learner: Learner = ctx.shared(lambda: make_learner(self.online, self.rate), "learner")
            state.corrections = Corrections(learner, learner.last_update)
        return state

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        if state.corrections is not None:
            state.corrections.observe(ctx, state.model.vocab, step)

    def steps(self, ctx: Context, reader: State, budget: int) -> Drafting:
        if reader.corrections is not None:
            yield from reader.corrections.begin(ctx)
        tree = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return tree
        chain_count = min(1 if ctx.sampler.greedy else self.drafts, budget - 1)
        yield from draw_chains(
            ctx,
            reader,
            tree,
            chain_count,
            self.length,
            budget,
            "draft",
            self.confidence,
            self.follows,
        )
        return tree

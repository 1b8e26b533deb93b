"""Classifier-free guidance: the text goes away from what the model would say without the prompt.

Beside the prompt's rows c the target is read after another prompt u, which the same output
follows: a `negative` one, or none but the prompt's last token. The row is
ln u + g (ln c - ln u): g=1 is the prompt alone, more follows it the more strictly. With `model` u
is another model's row (of a weaker or a worse one, say) after the same prompt, or after
`negative` where that is given too. Both rows come of one forward where the model is the same, and
a draft's whole tree is read on both branches.

Paper: Kornblith et al., Guiding Image Captioning Models Toward More Specific Captions,
arXiv:2307.16686; for texts Sanchez et al., Stay on topic with Classifier-Free Guidance,
arXiv:2306.17806
Guarantee: lossy: the mixed distribution is not the model's own, on purpose; whatever drafts, the
text has exactly the mixed distribution
Cost: target 1
Needs: nothing; with `model`, a model of that name with the target's tokenizer
Trains: nothing
Differs:
- the model needs no training with prompts left out: u is read after another prompt
- the paper's form with a language model's row beside both (alpha, beta) is not here
- `least` leaves out tokens that the prompt makes implausible, as in contrastive decoding; it is off
unless given
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from foretell.core.drafter import Reading
from foretell.core.settings import Range
from foretell.core.source import Nodes, Source
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply
from foretell.errors import BadConfig
from foretell.guidance.mixing import (
    Beside,
    ask_beside,
    check_partner,
    check_room,
    extrapolate_rows,
    log_probs,
    mask_implausible,
    open_beside,
    requested_nodes,
)

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model


@dataclass(frozen=True)
class Cfg(Source):
    """The settings of guidance; with g=1 and least=0 the rows are the target's own, and nothing
    else is read.
    """

    g: Annotated[float, Range(0, 100)] = 1.5  # the paper's tables have 1 to 4
    negative: TokenIds = ()  # the other prompt, as token ids; none: the prompt's last token
    model: str = ""  # whose rows u are; none: the target's
    # share of the best token's probability below which c leaves a token out
    least: Annotated[float, Range(0, 1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model == "target":
            raise BadConfig("cfg:model='target': is what is guided; leave model out")

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.model,) if self.model and self.g != 1 else ()

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        for name in self.models:
            check_partner("cfg:model", models, name)
        return {}

    def start(self, ctx: Context) -> Generator[Message, Any, Beside | None]:
        if self.g == 1:
            return None
        for name in self.models:
            check_room(ctx, "cfg:model", name)
        if self.model and not self.negative:
            return None
        check_ids("cfg:negative", self.negative, ctx.models[self.model or "target"].vocab)
        other_prompt = self.negative or tuple(ctx.tokens[: len(ctx.tokens) - len(ctx.output)][-1:])
        other_branch = yield from open_beside(ctx, "cfg", other_prompt, self.model or "target")
        return other_branch

    def read_rows(
        self,
        ctx: Context,
        state: Beside | None,
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        requested_rows = requested_nodes(tree, nodes)
        target_ask = Ask(tree, branch=ctx.branch, rows=requested_rows, taps=tuple(taps))
        if self.g == 1:
            reply: Reply = yield target_ask
            if not self.least:
                return reply
            prompted_logs = log_probs(reply.logits)
            return replace(reply, logits=mask_implausible(prompted_logs, prompted_logs, self.least))
        if state is not None:
            other_ask = yield from ask_beside(ctx, state, tree, requested_rows)
        else:
            other_ask = Ask(tree, self.model, ctx.branch, rows=requested_rows)
        reply, other_reply = yield [target_ask, other_ask]
        prompted_logs = log_probs(reply.logits)
        other_logs = log_probs(other_reply.logits.to(prompted_logs), prompted_logs.shape[-1])
        mixed_rows = mask_implausible(
            extrapolate_rows(prompted_logs, other_logs, self.g), prompted_logs, self.least
        )
        return replace(reply, logits=mixed_rows)

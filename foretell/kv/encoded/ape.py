"""Reads several contexts apart, each after the same prefix, and answers after all of them.

Every context is read by itself: its positions begin after the prefix, as those of the others do,
and it sees the prefix and itself. What follows the contexts follows the longest of them and
sees everything. So their order says nothing, and together they may be far longer than what the
model has positions for. Attention to many contexts at once is flatter than what the model has
learnt: `temperature` makes it sharper, and `scale` takes away from the contexts' part of it.

Paper: Yang et al., APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel
Encoding, arXiv:2502.05431
Guarantee: lossy: contexts do not see each other; with drafts the text is the one without them
Cost: target 1
Needs: rotary positions, and cache rows of every layer, of all of the text
Trains: nothing
Try: --kv ape --context FILE --context FILE
Differs:
- contexts are read one after the other, as pieces of one prompt, and not as a padded batch
- a text that is too short to have these contexts, as methods may open beside the prompt, is read as
any other is
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, NEVER, CachePolicy
from foretell.kv.slots import find_turn
from foretell.kv.store.holding import Layers
from foretell.ops.attention import Attention, merge_parts

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Ape(KV):
    """Settings, and the places of contexts in a prompt: `contexts.Contexts` makes one with its
    tokens.
    """

    # of the attention to contexts
    temperature: Annotated[float, Range(0, open_low=True, open_high=True)] = 0.9
    # by which the logarithm of all that contexts get is multiplied
    scale: Annotated[float, Range(0, open_low=True, open_high=True)] = 0.9
    prefix: Annotated[int, Range(0)] = 0  # first tokens, which all contexts follow
    # tokens of each context; what follows them is the question
    sizes: Annotated[tuple[int, ...], Range(1)] = ()

    def with_contexts(self, prefix: int, context_sizes: tuple[int, ...]) -> Ape:
        """These settings for a prompt with contexts of these sizes after the prefix."""
        return replace(self, prefix=prefix, sizes=context_sizes)

    @property
    def spared(self) -> int:
        """Tokens of a prompt that take no positions of their own."""
        return sum(self.sizes) - max(self.sizes, default=0)

    def build_policy(self, target: Model) -> Apart:
        if not self.sizes:
            raise BadConfig(
                "kv=ape: it reads contexts, and the prompt has none; give some (contexts, or "
                "--context FILE), or leave kv out"
            )
        if self.prefix < 1:
            raise BadConfig.field("ape:prefix", self.prefix, "at least 1 token, for attention")
        self.check_target(target)
        find_turn("ape", target)
        apart_policy = Apart(self.temperature, self.scale, self.prefix, self.sizes)
        apart_policy.spared = self.spared
        return apart_policy


@dataclass
class Apart(CachePolicy):
    """`context_rows`: keys and values of the contexts that were read; `rows`: those of all of them,
    of each layer (KV, n, D), once they are complete.
    """

    temperature: float
    scale: float
    prefix: int
    sizes: tuple[int, ...]
    context_rows: tuple[tuple[Layers, Layers], ...] = ()
    rows: tuple[Layers, Layers] | None = None

    plain = False

    @property
    def bytes(self) -> int:
        sides = [*self.context_rows, *(() if self.rows is None else (self.rows,))]
        return sum(layer.nbytes for pair in sides for side in pair for layer in side)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.context_rows, self.rows = (), None

    def room_left(self, length: int) -> int:
        context_ends = list(accumulate(self.sizes, initial=self.prefix))
        if self.prompt <= context_ends[-1]:
            return NEVER
        return min(
            (context_end - length for context_end in context_ends if context_end > length),
            default=NEVER,
        )

    def change_rows(self, cache: Any) -> None:
        """A context, or the prefix before them, is complete: the next one begins where it did."""
        if cache.base > self.prefix:
            self.context_rows = (
                *self.context_rows,
                cache.give_rows(cache.base - self.prefix, self.prefix),
            )
        next_position = self.prefix
        if len(self.context_rows) == len(self.sizes):
            keys, values = zip(*self.context_rows, strict=True)
            self.rows = join_contexts(keys), join_contexts(values)
            self.context_rows = ()
            next_position += max(self.sizes)
        cache.offset = cache.length - next_position

    def watches_job(self, job: Any) -> bool:
        return self.rows is not None

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        assert self.rows is not None, "contexts are read by ordinary attention"
        keys, values = (side[attention.layer] for side in self.rows)
        context_attention = replace(
            attention,
            keys=keys,
            values=values,
            mask=None,
            scale=attention.scale / self.temperature,
            softcap=None if attention.softcap is None else attention.softcap / self.temperature,
            sinks=None,
        )
        context_outputs, log_sum = context_attention.part()
        scaled_part = context_outputs, log_sum * (self.scale * self.temperature)
        return merge_parts([attention.part(), scaled_part]).to(attention.q.dtype)


def join_contexts(context_rows: tuple[Layers, ...]) -> Layers:
    """Rows of several contexts as one, of each layer."""
    return [torch.cat(layer_parts, 1) for layer_parts in zip(*context_rows, strict=True)]

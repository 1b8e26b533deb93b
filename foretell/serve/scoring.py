"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`.

The prompt is generated again, token by given token: as a request among others, in pieces, so that
nobody waits for the whole of a long one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.strategy import Strategy
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Kept, Reply, Steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretell.core.context import Context

CHUNK = 128  # tokens of one forward


@dataclass(frozen=True)
class Given(Strategy):
    """Says these tokens, whatever the target would say."""

    tokens: tuple[int, ...]

    def run(self, ctx: Context) -> Steps:
        said = 0
        while True:
            tokens = list(self.tokens[said : said + CHUNK])
            tree = TokenTree(ctx.tokens[-1]).chain(tokens[:-1])
            reply: Reply = yield Ask(tree, branch=ctx.branch)
            kept: Kept = yield Commit(tokens, reply.logits, ctx.branch, ["target"] * len(tokens))
            said += len(kept.tokens)
            if kept.reason:
                return


def scoring(prompts: Sequence[Sequence[int]], best: int, **terms: Any) -> dict[str, Any]:
    """What to call `LM.generate` or `agenerate` with, so that the `logprobs` of the outputs are
    those of each prompt from its second token on. `terms`: tenant, priority, timeout.
    """
    return {
        "prompt": [[ids[0]] for ids in prompts],
        "method": [Given(tuple(ids[1:])) for ids in prompts],
        "max_new_tokens": [len(ids) - 1 for ids in prompts],
        "ignore_eos": True,
        "logprobs": best,
        **terms,
    }

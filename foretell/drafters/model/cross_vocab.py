"""A draft model with another tokenizer drafts the tokens that both vocabularies have.

The draft model keeps the request's text in its own tokens. Its distribution is restricted to the
tokens that the target has as well (those of equal bytes, special ones of equal names, and the end)
and renormalised; a chain is drawn from it, in the target's ids and under the request's sampling
options. That distribution is the declared one, so the usual verification is exact.

Paper: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies (token-level intersection), arXiv:2502.05202
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model, and both tokenizers, whose tokens must be pieces of the text
Trains: nothing
Differs:
- the pairs are one to one: of several tokens with the same bytes one stands for all
- penalties and all other options hold inside drafts, since the distribution is made in the target's
ids
- nothing is drafted while the text ends inside a character, or where the options allow no shared
token
- the draft model's head is not cut to the shared tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tokenizer_bytes import Shared
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.models.translated import Translated
from foretell.ops.logits import likeliest_token


@dataclass
class State:
    """State of one request: its text in the draft model's tokens, and the tokens of both."""

    translated: Translated
    shared: Shared


@dataclass(frozen=True)
class CrossVocab(Drafter):
    """A count."""

    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain

    models = ("draft",)
    draws = True

    def start(self, ctx: Context) -> State:
        translated = Translated(ctx)
        vocab = ctx.models["target"].vocab

        def pair_vocabularies() -> Shared:
            return Shared(
                translated.target_words, translated.model_words, vocab, translated.model.vocab
            )

        shared_pairs = ctx.shared(pair_vocabularies, "pairs")
        if not shared_pairs.partner:
            raise Unsupported.missing_capability(
                "cross-vocab",
                translated.model.name,
                "tokens that the target has as well",
                "use cross-text",
            )
        return State(translated, shared_pairs)

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        translated = state.translated
        translated.read_text(ctx.tokens)
        length = min(self.length, budget - 1, ctx.depth, translated.max_drafts(ctx))
        if length < 1 or translated.pending_bytes:
            return tree
        draft_tree, draft_node = yield from translated.open_tree()
        node = 0
        for draw_number in range(1, length + 1):
            reply = yield Ask(draft_tree, "draft", translated.branch, rows=[draft_node])
            row = state.shared.row(reply.logits[0])
            child = self._add_child(ctx, tree, node, row, draw_number)
            if child < 0 or ctx.ends(tree, child):
                break
            node = child
            draft_node = draft_tree.add(draft_node, state.shared.partner[tree.tokens[node]])
        return tree

    def _add_child(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor, draw_number: int
    ) -> int:
        """Continues the chain from `node` by a row (V,) in the target's ids; -1: no shared token
        may follow.
        """
        sampler = ctx.sampler
        scores = sampler.scores(row, [*ctx.output, *tree.tokens_to(node)])
        if not bool((scores > -torch.inf).any()):
            return -1
        if sampler.greedy:
            token, probability = likeliest_token(scores)
            return tree.add(
                node, token, value=tree.values[node] * probability, source="cross-vocab"
            )
        q = sampler.laws(scores[None])[0]
        token = ctx.rng.sample(q, "draft", len(ctx.output), draw_number)
        return add_drawn(tree, node, Law(q), [token], "cross-vocab")[0]

"""OmniDraft's own distribution for sequences of a draft model that are one token of the target.

The draft model, which has another tokenizer, keeps the request's text in its own tokens and draws
`length` of them. From the left, the longest sequence that a cache knows becomes the one token of
the target it stands for; other tokens are replaced by the target's equal ones, and the draft ends
where there is none. A sequence's token is verified with the product of its probabilities, and the
distribution that the rest is taken from has this product also subtracted from the sequence's first
token. The drafter `omnidraft` has the exact distribution instead.

Paper: Ramakrishnan et al., OmniDraft: A Cross-vocabulary, Online Adaptive Drafter for On-device
Speculative Decoding, arXiv:2507.02659
Guarantee: lossy: at temperatures above 0, since a token that begins sequences is declared with all
of its probability, though it was proposed only where none of them followed
Cost: target 1, draft length
Needs: a draft model, and both tokenizers, whose tokens must be pieces of the text
Trains: nothing; the paper distils the draft model while it serves, which is left out here, and
without it the speed-up is small
Differs:
- the cache is bounded, and what was noted longest ago gives way
- penalties and bans hold for the target alone, since the draft model's ids are others
- no acceptance head: the paper tried it with equal vocabularies only
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.settings import Range
from foretell.core.tokenizer_bytes import Shared
from foretell.core.tree import Law, TokenTree
from foretell.drafters.model.ngram_pairs import Sequence, State, Stream


@dataclass(frozen=True)
class Omni(Drafter):
    """Both are counts."""

    length: Annotated[int, Range(1, 256)] = 4  # the draft model's tokens in a draft
    # first tokens of sequences that the cache knows
    capacity: Annotated[int, Range(1, 1 << 24)] = 32768

    models = ("draft",)
    draws = True

    def start(self, ctx: Context) -> State:
        return State.of(ctx, self.capacity)

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        state.observe(step.tokens)

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        translated = state.translated
        translated.read_text(ctx.tokens)
        length = min(self.length, translated.max_drafts(ctx))
        if budget < 2 or not length or translated.pending_bytes:
            return tree
        draft_tree, last_node = yield from translated.open_tree()
        stream = Stream(translated, ctx.sampler, draft_tree, last_node, length)
        path: Sequence = ()
        for draw_number in range(1, length + 1):
            yield from stream.request_laws([path])
            law = stream.laws[path]
            if ctx.sampler.greedy:
                token = int(law.argmax())
            else:
                token = ctx.rng.sample(law, "draft", len(ctx.output), draw_number)
            path += (token,)
            if translated.model_words.piece(token) is None:
                break
        self._merge_drawn(ctx, state, stream, path, tree, budget)
        return tree

    def _merge_drawn(
        self,
        ctx: Context,
        state: State,
        stream: Stream,
        path: Sequence,
        tree: TokenTree,
        budget: int,
    ) -> None:
        """Hangs what the drawn tokens are in the target's into the tree, as a chain."""
        node = path_index = 0
        while path_index < len(path) and len(tree) < budget and tree.depths[node] < ctx.depth:
            laws = [stream.laws[path[:end]] for end in range(path_index, len(path))]
            word_length, token = self._find_word(state, path[path_index:])
            if token < 0:
                return
            token_chances = [
                float(law[draft_token])
                for law, draft_token in zip(laws, path[path_index:], strict=True)
            ][:word_length]
            q = self._law_below(state.shared, laws[0], path[path_index], token_chances, token)
            value = tree.values[node] * float(q[token])
            law = None if ctx.sampler.greedy else Law(q)
            node = tree.add(node, token, law=law, value=value, source="omni")
            if ctx.ends(tree, node):
                return
            path_index += word_length

    @staticmethod
    def _find_word(state: State, rest: Sequence) -> tuple[int, int]:
        """(tokens, our token) of the longest known sequence that begins these, else of the single
        one; token -1: it is none of ours.
        """
        known_sequences = dict(state.seen.get(rest[0]) or ())
        for word_length in range(len(rest), 1, -1):
            if rest[:word_length] in known_sequences:
                return word_length, known_sequences[rest[:word_length]]
        our_tokens = state.shared.ours[state.shared.theirs == rest[0]].tolist()
        return 1, our_tokens[0] if our_tokens else -1

    @staticmethod
    def _law_below(
        shared_pairs: Shared,
        law: torch.Tensor,
        first_token: int,
        token_chances: List[float],
        token: int,
    ) -> torch.Tensor:
        """The declared distribution (V,): the paper's equation 2, at the token itself its equation
        1.
        """
        q = law.new_zeros(shared_pairs.vocab)
        q[shared_pairs.ours] = law[shared_pairs.theirs]
        if len(token_chances) > 1:
            product = 1.0
            for token_chance in token_chances:
                product *= token_chance
            q[token] += product
            q[shared_pairs.ours[shared_pairs.theirs == first_token]] -= product
        return q.clamp_min_(0)

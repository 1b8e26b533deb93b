"""A draft model with another tokenizer drafts single tokens and sequences that are one token here.

The draft model keeps the request's text in its own tokens. What it drafts is read as the target's
tokens: those that both vocabularies have, and those that it writes with several of its own, which a
cache notes as they turn up in texts. A token's probability is that of its whole sequence; a shared
token that begins such sequences has the rest of its own probability, and what follows it is none of
their rests. So the distribution that is drawn from is the distribution of the text as it is read,
in the target's ids, and verification is exact. `mode=det` takes its best token instead of drawing,
as a greedy target does, and gives the tokens of the seed without drafts. The paper's own,
approximate distribution is the drafter `omni`.

Paper: Ramakrishnan et al., OmniDraft: A Cross-vocabulary, Online Adaptive Drafter for On-device
Speculative Decoding, arXiv:2507.02659
Guarantee: exact
Cost: target 1, draft forwards at most
Needs: a draft model, and both tokenizers, whose tokens must be pieces of the text
Trains: with `online=N` the draft model, after every N responses of a tenant, on the distributions
that verification saw; without it the speed-up is small
Differs:
- the distribution is corrected for all sequences that may be merged, where the paper subtracts the
drawn one
- only sequences that begin with one of the `width` likeliest tokens are merged, at most `merged` of
them; their inner tokens take further forwards of the draft model
- tokens are drawn one by one from that distribution, instead of merged after they were drawn
- the cache is bounded, and what was noted longest ago gives way
- it learns from the target's raw distributions at 64 likeliest shared tokens and all others as one,
on the last 1024 tokens of a text as it was committed, where the paper has whole distributions
- one step for N responses is made before the first draft of the next request; a request keeps the
weights it began with
- all weights are trained, none of low rank, in a copy for each tenant
- no acceptance head: the paper tried it with equal vocabularies only
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.model import Model
from foretell.core.settings import OneOf, Range
from foretell.core.tokenizer_bytes import Shared
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Message
from foretell.drafters.model.ngram_pairs import Reading, Seen, Sequence, State, Stream
from foretell.models.online import Learner, Study, learning_models

MODES = ("exact", "det")


@dataclass(frozen=True)
class Omnidraft(Drafter):
    """All but `mode` are counts."""

    mode: Annotated[str, OneOf(MODES)] = "exact"  # or det: the best token at each place, none drawn
    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain
    forwards: Annotated[int, Range(1, 256)] = 8  # of the draft model in a step, at most
    # of its likeliest tokens, those after which sequences are looked for
    width: Annotated[int, Range(0, 64)] = 4
    merged: Annotated[int, Range(0, 256)] = 16  # sequences considered at a place, the newest ones
    # first tokens of sequences that the cache knows
    capacity: Annotated[int, Range(1, 1 << 24)] = 32768
    # responses of a tenant after which the draft model is distilled; 0: never
    online: Annotated[int, Range(0, 256)] = 0

    models = ("draft",)
    whole = True

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.mode == "exact"

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The draft model as one that learns. Raises Unsupported where it cannot."""
        return learning_models("omnidraft", models) if self.online else {}

    def start(self, ctx: Context) -> State:
        state = State.of(ctx, self.capacity)
        if self.online:
            model: Any = ctx.models["draft"]
            learner: Learner = ctx.shared(lambda: model.learner(self.online), "learner")
            state.study = Study(learner, learner.last_update)
        return state

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        state.observe(step.tokens)
        if state.study is not None:
            state.study.observe(ctx, state.translated, state.shared, step)

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        if state.study is not None:
            yield from state.study.begin(ctx)
        tree = TokenTree(ctx.tokens[-1])
        translated = state.translated
        translated.read_text(ctx.tokens)
        length = min(self.length, budget - 1, ctx.depth)
        forwards = min(self.forwards, translated.max_drafts(ctx))
        if length < 1 or not forwards or translated.pending_bytes:
            return tree
        draft_tree, last_node = yield from translated.open_tree()
        stream = Stream(translated, ctx.sampler, draft_tree, last_node, forwards)
        path: Sequence = ()
        barred: frozenset[Sequence] = frozenset()
        node = 0
        for draw_number in range(1, length + 1):
            reading = yield from self._read_words(state.seen, stream, path, barred)
            if reading is None:
                break
            child = self._add_child(ctx, state.shared, tree, node, reading, draw_number)
            if child < 0 or ctx.ends(tree, child):
                break
            node = child
            word = self._find_word(state.shared, reading, tree.tokens[node])
            barred = reading.impossible_rests(word)
            path += word
        return tree

    def _read_words(
        self, snapshot: Seen, stream: Stream, path: Sequence, barred: frozenset[Sequence]
    ) -> Generator[Message, Any, Reading | None]:
        """The code words after `path`; None: no forward is left to know their distributions.

        What is merged here is decided by laws and the cache, before anything is drawn here.
        """
        if not (yield from stream.request_laws([path])):
            return None
        first_probs = stream.laws[path]
        likely_tokens = first_probs.topk(min(self.width, len(first_probs)))
        sequences: dict[Sequence, int] = {}
        for token, probability in zip(
            likely_tokens.indices.tolist(), likely_tokens.values.tolist(), strict=True
        ):
            if probability > 0:
                sequences |= (snapshot.get(token) or ())[::-1]
        chosen_sequences = dict(list(sequences.items())[: self.merged])
        known_length = 1
        while inner_paths := {
            path + word[:known_length] for word in chosen_sequences if len(word) > known_length
        }:
            if not (yield from stream.request_laws(sorted(inner_paths))):
                chosen_sequences = {
                    word: token
                    for word, token in chosen_sequences.items()
                    if len(word) <= known_length
                }
            known_length += 1
        return Reading(stream.laws_behind(path), chosen_sequences, barred)

    def _add_child(
        self,
        ctx: Context,
        shared_pairs: Shared,
        tree: TokenTree,
        node: int,
        reading: Reading,
        draw_number: int,
    ) -> int:
        """Continues the chain by the distribution of this reading; -1: no token may follow."""
        masses = reading.token_masses(shared_pairs.ours, shared_pairs.theirs, shared_pairs.vocab)
        scores = ctx.sampler.scores(masses.log(), [*ctx.output, *tree.tokens_to(node)])
        if not bool((scores > -torch.inf).any()):
            return -1
        q = scores.softmax(-1)
        if ctx.sampler.greedy or not self.draws:
            token = int(q.argmax())
            value = tree.values[node] * float(q[token])
            return tree.add(node, token, value=value, source="omnidraft")
        token = ctx.rng.sample(q, "draft", len(ctx.output), draw_number)
        return add_drawn(tree, node, Law(q), [token], "omnidraft")[0]

    @staticmethod
    def _find_word(shared_pairs: Shared, reading: Reading, token: int) -> Sequence:
        """The draft model's tokens for this token of ours."""
        for sequence, our_token in reading.sequences.items():
            if our_token == token:
                return sequence
        return (shared_pairs.partner[token],)

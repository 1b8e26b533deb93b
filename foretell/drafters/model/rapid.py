"""A draft model reads a short context that is retrieved from a long prompt, and drafts a chain.

The prompt is cut into chunks. Its beginning and its last tokens, which hold the question, are kept,
and of the chunks between them those that have most in common with the question, in their order, as
long as they fit. The draft model reads this in place of the prompt, on a branch of its own with
positions of its own, and then what the request writes. Over a short context even a large model is
quick, the target itself (`model=target`) or a larger one. The tokens are drawn from that model's
distribution and verified by the target over the whole prompt. With `rule=augmented` the target
learns from what the short context brings out, and the text has another distribution.

Paper: Chen et al., RAPID: Long-Context Inference with Retrieval-Augmented Speculative Decoding,
arXiv:2502.20330
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer, or model=target
Trains: nothing
Differs:
- chunks are scored by BM25 over tokens, where the paper compares an embedding model's vectors; one
that has no token in common with the question is left out, the paper's threshold is 0.1
- the question is the last `query` tokens, and the first chunk is kept whatever it scores: both hold
the parts of a chat's template
- the augmented target is a rule of its own, since it is lossy; the paper always takes it
- where the target drafts for itself and the prompt is no longer than the short context, nothing is
drafted
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.source import follow_text
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Ask, Open
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig
from foretell.ops.logits import likeliest_token

SHARE = 32  # the short context may have one of so many tokens of the prompt, if that is more
K1, B = 1.5, 0.75  # of BM25: what repetitions count, and the length of a chunk


@dataclass
class State:
    """State of a request. The quiet branch begins with `context` in place of the first `start`
    tokens.
    """

    reader: DraftReader
    context: list[int]
    start: int
    branch: int = -1  # below 0: not opened yet


@dataclass(frozen=True)
class Rapid(Drafter):
    """All but `model` are counts of tokens."""

    model: str = "draft"  # the name of the model that drafts
    length: Annotated[int, Range(1, 256)] = 10  # drafted a step
    # of the short context, at most; of a long prompt a 32nd, if that is more
    context: Annotated[int, Range(1, 1 << 24)] = 4096
    chunk: Annotated[int, Range(1, 1 << 16)] = 128  # that are retrieved together
    # at the prompt's end, by which chunks are chosen
    query: Annotated[int, Range(1, 1 << 16)] = 128

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        min_context = self.chunk + self.query
        if self.context < min_context:
            allowed_range = f"at least {min_context}, a chunk and the query"
            raise BadConfig.field("rapid:context", self.context, allowed_range)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.model == "target" else (self.model,)

    def start(self, ctx: Context) -> State:
        reader = DraftReader(ctx, self.model)
        tokens = ctx.tokens
        context_length = reader.model.context
        to_write = ctx.limit - len(tokens)
        max_tokens = max(self.context, len(tokens) // SHARE)
        max_tokens = min(
            max_tokens, max(context_length - to_write, context_length // 2), context_length - 1
        )
        return State(
            reader, retrieve_context(tokens, max_tokens, self.chunk, self.query), len(tokens)
        )

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        saves_nothing = self.model == "target" and len(state.context) == state.start
        if saves_nothing or budget < 2 or not state.reader.can_read(ctx.tokens):
            return tree
        if state.branch < 0:
            state.branch = yield Open(state.context, self.model)
        yield from follow_text(ctx, state.branch, state.start)
        read_tokens = len(ctx.branches[state.branch].tokens)
        draft_depth = min(
            self.length, budget - 1, ctx.depth, state.reader.model.context - read_tokens
        )
        sampler = ctx.sampler
        for node in range(draft_depth):
            if ctx.ends(tree, node):
                break
            reply = yield Ask(tree, self.model, state.branch, rows=[node])
            row = state.reader.resized_rows(reply)[0]
            output = [*ctx.output, *tree.tokens_to(node)]
            if sampler.greedy:
                scores = sampler.scores(row, output)
                token, probability = likeliest_token(scores)
                tree.add(node, token, value=tree.values[node] * probability, source="rapid")
            else:
                q = sampler.law(row, output)
                token = ctx.rng.sample(q, "draft", len(ctx.output), node + 1)
                add_drawn(tree, node, Law(q), [token], "rapid")
        return tree


def retrieve_context(tokens: Sequence[int], max_tokens: int, chunk: int, query: int) -> list[int]:
    """At most `max_tokens` of the tokens, in their order: the first chunk, the query at the end,
    and between them the chunks that have most in common with it. All tokens, if they fit.
    """
    if len(tokens) <= max_tokens:
        return list(tokens)
    prompt_body, question = tokens[:-query], tokens[-query:]
    chunks = [
        list(prompt_body[start : start + chunk]) for start in range(0, len(prompt_body), chunk)
    ]
    if not chunks or len(chunks[0]) + query > max_tokens:
        return list(tokens[-max_tokens:])
    scores = bm25_scores(chunks, question)
    free_tokens = max_tokens - query - len(chunks[0])
    kept_chunks = {0}
    for chunk_index in sorted(range(1, len(chunks)), key=lambda chunk_index: -scores[chunk_index]):
        if scores[chunk_index] > 0 and len(chunks[chunk_index]) <= free_tokens:
            kept_chunks.add(chunk_index)
            free_tokens -= len(chunks[chunk_index])
    context_parts = [chunks[chunk_index] for chunk_index in sorted(kept_chunks)]
    return [token for context_part in (*context_parts, question) for token in context_part]


def bm25_scores(chunks: Sequence[Sequence[int]], query: Sequence[int]) -> list[float]:
    """How much each chunk has in common with the query, by Robertson and Zaragoza's BM25."""
    query_tokens = set(query)
    chunk_counts = [Counter(token for token in chunk if token in query_tokens) for chunk in chunks]
    chunks_with = Counter(token for token_counts in chunk_counts for token in token_counts)
    weights = {}
    for token, chunk_count in chunks_with.items():
        weights[token] = math.log(1 + (len(chunks) - chunk_count + 0.5) / (chunk_count + 0.5))
    mean_length = sum(map(len, chunks)) / len(chunks)
    scores = []
    for chunk, token_counts in zip(chunks, chunk_counts, strict=True):
        length_norm = K1 * (1 - B + B * len(chunk) / mean_length)
        score_terms = (
            weights[token] * n * (K1 + 1) / (n + length_norm) for token, n in token_counts.items()
        )
        scores.append(sum(score_terms))
    return scores

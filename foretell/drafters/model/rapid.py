"""A draft model reads a short context that is retrieved from a long prompt, and drafts a chain.

The prompt is cut into chunks. Its beginning and its last tokens, which hold the question, are kept,
and of the chunks between them those that have most in common with the question, in their order, as
long as they fit. The draft model reads this in place of the prompt, on a branch of its own with
positions of its own, and then what the request writes. Over a short context even a large model is
quick, the target itself (`model=target`) or a larger one. The tokens are drawn from that model's
law and verified by the target over the whole prompt. With `rule=augmented` the target learns from
what the short context brings out, and the text has another law.

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

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.source import follow
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn
from foretell.core.types import Ask, Open
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig
from foretell.ops.logits import likeliest

SHARE = 32  # the short context may have one of so many tokens of the prompt, if that is more
K1, B = 1.5, 0.75  # of BM25: what repetitions count, and the length of a chunk


@dataclass
class State:
    """Of a request. The quiet branch begins with `context` in place of the first `start` tokens."""

    reader: DraftReader
    context: list[int]
    start: int
    branch: int = -1  # below 0: not opened yet


@dataclass(frozen=True)
class Rapid(Drafter):
    """All but `model` are counts of tokens."""

    model: str = "draft"  # the name of the model that drafts
    length: int = 10  # drafted a step
    context: int = 4096  # of the short context, at most; of a long prompt a 32nd, if that is more
    chunk: int = 128  # that are retrieved together
    query: int = 128  # at the prompt's end, by which chunks are chosen

    draws = True

    def __post_init__(self) -> None:
        ranges = {"length": 256, "context": 1 << 24, "chunk": 1 << 16, "query": 1 << 16}
        for name, high in ranges.items():
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise BadConfig.field(f"rapid:{name}", value, f"between 1 and {high}")
        least = self.chunk + self.query
        if self.context < least:
            allowed = f"at least {least}, a chunk and the query"
            raise BadConfig.field("rapid:context", self.context, allowed)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.model == "target" else (self.model,)

    def start(self, ctx: Context) -> State:
        reader = DraftReader(ctx, self.model)
        tokens = ctx.tokens
        holds = reader.model.context
        to_write = ctx.limit - len(tokens)
        room = max(self.context, len(tokens) // SHARE)
        room = min(room, max(holds - to_write, holds // 2), holds - 1)
        return State(reader, retrieved(tokens, room, self.chunk, self.query), len(tokens))

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        useless = self.model == "target" and len(state.context) == state.start
        if useless or budget < 2 or not state.reader.can_read(ctx.tokens):
            return tree
        if state.branch < 0:
            state.branch = yield Open(state.context, self.model)
        yield from follow(ctx, state.branch, state.start)
        read = len(ctx.branches[state.branch].tokens)
        depth = min(self.length, budget - 1, ctx.depth, state.reader.model.context - read)
        sampler = ctx.sampler
        for node in range(depth):
            if ctx.ends(tree, node):
                break
            reply = yield Ask(tree, self.model, state.branch, rows=[node])
            row = state.reader.rows(reply)[0]
            output = [*ctx.output, *tree.tokens_to(node)]
            if sampler.greedy:
                scores = sampler.scores(row, output)
                token, chance = likeliest(scores)
                tree.add(node, token, value=tree.values[node] * chance, source="rapid")
            else:
                q = sampler.law(row, output)
                token = ctx.rng.sample(q, "draft", len(ctx.output), node + 1)
                add_drawn(tree, node, Law(q), [token], "rapid")
        return tree


def retrieved(tokens: Sequence[int], room: int, chunk: int, query: int) -> list[int]:
    """At most `room` of the tokens, in their order: the first chunk, the query at the end, and
    between them the chunks that have most in common with it. All tokens, if they fit.
    """
    if len(tokens) <= room:
        return list(tokens)
    body, question = tokens[:-query], tokens[-query:]
    chunks = [list(body[start : start + chunk]) for start in range(0, len(body), chunk)]
    if not chunks or len(chunks[0]) + query > room:
        return list(tokens[-room:])
    scores = bm25(chunks, question)
    left = room - query - len(chunks[0])
    kept = {0}
    for place in sorted(range(1, len(chunks)), key=lambda place: -scores[place]):
        if scores[place] > 0 and len(chunks[place]) <= left:
            kept.add(place)
            left -= len(chunks[place])
    parts = [chunks[place] for place in sorted(kept)]
    return [token for part in (*parts, question) for token in part]


def bm25(chunks: Sequence[Sequence[int]], query: Sequence[int]) -> list[float]:
    """How much each chunk has in common with the query, by Robertson and Zaragoza's BM25."""
    wanted = set(query)
    counts = [Counter(token for token in chunk if token in wanted) for chunk in chunks]
    chunks_with = Counter(token for count in counts for token in count)
    weights = {}
    for token, found in chunks_with.items():
        weights[token] = math.log(1 + (len(chunks) - found + 0.5) / (found + 0.5))
    mean = sum(map(len, chunks)) / len(chunks)
    scores = []
    for chunk, count in zip(chunks, counts, strict=True):
        norm = K1 * (1 - B + B * len(chunk) / mean)
        terms = (weights[token] * n * (K1 + 1) / (n + norm) for token, n in count.items())
        scores.append(sum(terms))
    return scores

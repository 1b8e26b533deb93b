"""A draft model's tree and the text's own continuations in one tree, the latter as far as the draft model believes them.

The draft model drafts as in `draft`: one chain, or several. Beside it the places where the newest
tokens stood before are looked up, and what followed them makes a second tree, in which every branch
counts its places. Of that tree the branches whose first token the draft model thinks unlikely are
dropped, the rest are ranked by the draft model's probability times the share of the places, and the
best are hung into the first tree by longest common prefix, until the nodes are used up. Copied
tokens are tried after drawn ones, whose laws they leave alone.

Paper: Quan, Feng, Hao, Jiang, Zhang, Wang, RASD: Retrieval-Augmented Speculative Decoding,
arXiv:2503.03434
Guarantee: exact
Cost: target 1, draft length
Needs: a model that takes trees; a draft model with the target's tokenizer (the vocabularies may be
padded to different sizes)
Trains: the draft model, best distilled from the target
Differs:
- continuations come from the text itself (the paper also asks a datastore) - the paper drafts with
a trained head - the threshold is low by default, to suit weak draft models too (the paper tunes its
own) - a text beyond the draft model's context or vocabulary is continued by its own copies alone,
none of them dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from foretell.core.drafter import Drafter, Drafting
from foretell.core.context import Context
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig
from foretell.ops.lookup import Index
from foretell.ops.trees import grow, merge

# chance of a copied token the draft model was not asked about, if those before it are accepted
HELD = 0.75
NAME = "retrieval-fused"


@dataclass
class State:
    """Of a request: the index of its text, of which `known` tokens are sure to be in the draft
    model's vocabulary.
    """

    index: Index
    known: int = 0


@dataclass(frozen=True)
class RetrievalFused(Drafter):
    """Lengths and numbers are counts; `threshold` is a probability."""

    length: int = 4  # tokens of a drafted chain
    drafts: int = 1  # chains: independent ones, at temperature 0 the most probable ones
    threshold: float = 0.001  # a continuation whose first token is less likely than this is dropped
    longest: int = 3  # n-gram looked up first
    shortest: int = 1  # n-gram looked up last
    places: int = 32  # most recent places of an n-gram that are copied from
    copy: int = 10  # tokens copied

    models = ("draft",)
    needs = ("tree",)
    draws = whole = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("length", 1, 256),
            ("drafts", 1, 64),
            ("longest", 1, 64),
            ("copy", 1, 1024),
            ("shortest", 1, self.longest),
            ("places", 1, 1024),
        ):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"{NAME}:{name}", getattr(self, name), f"between {low} and {high}"
                )
        if not 0 <= self.threshold < 1:
            raise BadConfig.field(f"{NAME}:threshold", self.threshold, "at least 0 and below 1")

    def start(self, ctx: Context) -> State:
        return State(Index(self.longest, least=self.shortest, every=True))

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree, laws = TokenTree(ctx.tokens[-1]), dict[int, torch.Tensor]()
        if all(token < ctx.models["draft"].vocab for token in ctx.tokens[state.known :]):
            state.known = len(ctx.tokens)
            laws = yield from self._draft(ctx, tree, budget)
        copied, twins = self._copies(ctx, state.index, tree, laws, budget)
        room, kept = budget - len(tree), list[int]()
        for node in range(1, len(copied)):
            room -= node not in twins
            if room < 0:
                break
            kept.append(node)
        return merge(tree, copied.keep(kept))

    def _draft(
        self, ctx: Context, tree: TokenTree, budget: int
    ) -> Generator[Ask, Any, dict[int, torch.Tensor]]:
        """Drafts into `tree`; returns the draft model's law (V,) below every node it was asked
        about.
        """
        sampler, model, vocab = ctx.sampler, ctx.models["draft"], ctx.models["target"].vocab
        chains, draws, laws = min(self.drafts, budget - 1), 0, dict[int, torch.Tensor]()
        level = {0: chains}  # node -> chains that pass through it
        for _ in range(min(self.length, ctx.depth, model.context - len(ctx.tokens))):
            if (
                chains < 1 or len(tree) + chains > budget
            ):  # decided before anything of the level is drawn
                break
            reply = yield Ask(tree, model="draft", rows=list(level))
            below: dict[int, int] = {}
            options: list[tuple[float, int, int]] = []
            for (node, passing), row in zip(level.items(), reply.logits, strict=True):
                row = F.pad(row[:vocab], (0, max(0, vocab - len(row))), value=-torch.inf)
                words, value = [*ctx.output, *tree.tokens_to(node)], tree.values[node]
                if sampler.greedy:
                    laws[node] = sampler.scores(row, words).softmax(-1)
                    top = laws[node].topk(min(chains, vocab))
                    options += [
                        (-value * p, node, t)
                        for p, t in zip(*map(torch.Tensor.tolist, top), strict=True)
                    ]
                    continue
                laws[node] = q = sampler.law(row, words)
                law = Law(q)
                for _ in range(passing):
                    draws += 1
                    drawn = ctx.rng.sample(q, "draft", len(ctx.output), draws)
                    child = tree.add(node, drawn, law, value * float(q[drawn]), NAME)
                    below[child] = below.get(child, 0) + 1
            for value, node, token in sorted(options)[:chains]:
                below[tree.add(node, token, None, -value, NAME)] = 1
            level = below
        return laws

    def _copies(
        self,
        ctx: Context,
        index: Index,
        tree: TokenTree,
        laws: dict[int, torch.Tensor],
        budget: int,
    ) -> tuple[TokenTree, dict[int, int]]:
        """What followed the newest tokens before, best first; and which of its nodes stand in
        `tree` too, and where.
        """
        tokens = ctx.tokens
        index.extend(tokens)
        found: list[int] = []
        n = self.longest + 1
        while not found and n > self.shortest:
            n -= 1
            found = index.all(tokens, n, self.places)
        places, twins = {0: found}, {0: 0}  # node -> where the text went on like that

        def successors(copied: TokenTree, node: int) -> list[tuple[int, float]]:
            parent, token, depth = copied.parents[node], copied.tokens[node], copied.depths[node]
            if node:
                places[node] = [p for p in places[parent] if after(p, depth - 1) == token]
                if parent in twins and (twin := tree.child(twins[parent], token)) >= 0:
                    twins[node] = twin
            counts, q = (
                Counter(after(p, depth) for p in places[node]),
                laws.get(twins.get(node, -1)),
            )
            chances = [HELD] * len(counts) if q is None else q[list(counts)].tolist()
            options = list(zip(counts.items(), chances, strict=True))
            if not node and q is not None:
                options = [
                    (option, chance) for option, chance in options if chance >= self.threshold
                ]
            shares = (
                (token, chance * count / len(places[node])) for (token, count), chance in options
            )
            return sorted(shares, key=lambda option: -option[1])

        def after(place: int, depth: int) -> int:
            return tokens[
                place + depth % (len(tokens) - place)
            ]  # a copy that reaches the end goes on into itself

        copied = grow(tokens[-1], successors, budget, min(self.copy, ctx.depth), NAME)
        copied.matches[1:] = [n] * (len(copied) - 1)
        return copied, twins

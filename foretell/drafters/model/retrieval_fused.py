"""A draft model's tree and the text's own continuations, which the draft model ranks, in one tree.

The draft model drafts as in `draft`: one chain, or several. Beside it the places where the newest
tokens stood before are looked up, and what followed them makes a second tree, in which every branch
counts its places. Branches of it whose first token the draft model thinks unlikely are dropped; the
rest are ranked by the draft model's probability times the share of the places, and the best are
merged into the first tree by prefix, until the nodes are used up. Copied tokens are tried after
drawn ones, whose distributions they leave alone.

Paper: Quan, Feng, Hao, Jiang, Zhang, Wang, RASD: Retrieval-Augmented Speculative Decoding,
arXiv:2503.03434
Guarantee: exact
Cost: target 1, draft length
Needs: a model that takes trees; a draft model with the target's tokenizer (the vocabularies may be
padded to different sizes)
Trains: the draft model, best distilled from the target
Differs:
- continuations come from the text itself, where the paper also asks a datastore
- a draft model drafts, where the paper uses a trained head
- the threshold is low by default, to suit weak draft models too; the paper tunes its own
- a text beyond the draft model's context or vocabulary is continued by its own copies alone, none
of them dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import add_drawn, grow_tree, merge_trees
from foretell.core.types import Ask
from foretell.drafters.lookup.lookup import Index
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig

# probability of a copied token the draft model was not asked about, if those before it are accepted
HELD = 0.75
NAME = "retrieval-fused"

# node of the drafted tree -> the draft model's distribution (V,) below it
Laws = dict[int, torch.Tensor]


@dataclass
class State:
    """State of a request."""

    index: Index  # of its text
    reader: DraftReader


@dataclass(frozen=True)
class RetrievalFused(Drafter):
    """Lengths and numbers are counts; `threshold` is a probability."""

    length: Annotated[int, Range(1, 256)] = 4  # tokens of a drafted chain
    # chains: independent ones, at temperature 0 the most probable ones
    drafts: Annotated[int, Range(1, 64)] = 1
    # a continuation whose first token is less likely than this is dropped
    threshold: Annotated[float, Range(0, 1, open_high=True)] = 0.001
    longest: Annotated[int, Range(1, 64)] = 3  # n-gram looked up first
    shortest: Annotated[int, Range(1)] = 1  # n-gram looked up last
    # most recent places of an n-gram that are copied from
    places: Annotated[int, Range(1, 1024)] = 32
    copy: Annotated[int, Range(1, 1024)] = 10  # tokens copied

    models = ("draft",)
    needs = ("tree",)
    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise BadConfig.field(f"{NAME}:shortest", self.shortest, f"at most {self.longest}")

    def start(self, ctx: Context) -> State:
        return State(Index(self.longest, min_length=self.shortest, keep_all=True), DraftReader(ctx))

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        laws: Laws = {}
        if state.reader.can_read(ctx.tokens):
            laws = yield from self._draft_levels(ctx, state.reader, tree, budget)
        state.index.extend(ctx.tokens)
        copied_tree, twins = self._copy_tree(ctx, state.index, tree, laws, budget)
        free_nodes = budget - len(tree)
        kept_nodes: list[int] = []
        for node in range(1, len(copied_tree)):
            if node not in twins:
                free_nodes -= 1
            if free_nodes < 0:
                break
            kept_nodes.append(node)
        return merge_trees(tree, copied_tree.keep(kept_nodes))

    def _draft_levels(
        self, ctx: Context, reader: DraftReader, tree: TokenTree, budget: int
    ) -> Generator[Ask, Any, Laws]:
        """Drafts into `tree`; returns the distribution below every node the draft model was asked
        about.
        """
        chain_count = min(self.drafts, budget - 1)
        laws: Laws = {}
        level = {0: chain_count}  # node -> chains that go on from it
        draw_count = 0
        for _ in range(min(self.length, reader.max_depth(ctx))):
            # Decided before anything of the level is drawn, so that no draw can sway it.
            if not any(level.values()) or len(tree) + chain_count > budget:
                break
            reply = yield Ask(tree, "draft", ctx.branch, rows=list(level))
            for node, row in zip(level, reader.resized_rows(reply), strict=True):
                output = [*ctx.output, *tree.tokens_to(node)]
                if ctx.sampler.greedy:
                    laws[node] = ctx.sampler.scores(row, output).softmax(-1)
                else:
                    laws[node] = ctx.sampler.law(row, output)
            if ctx.sampler.greedy:
                child_nodes = add_best_continuations(
                    tree, {node: laws[node] for node in level}, chain_count
                )
            else:
                child_nodes = []
                for node, count in level.items():
                    q = laws[node]
                    keys = range(draw_count + 1, draw_count + 1 + count)
                    tokens = [ctx.rng.sample(q, "draft", len(ctx.output), key) for key in keys]
                    child_nodes += add_drawn(tree, node, Law(q), tokens, NAME)
                    draw_count += count
            level = {}
            for child in child_nodes:
                if not ctx.ends(tree, child):
                    level[child] = level.get(child, 0) + 1
        return laws

    def _copy_tree(
        self, ctx: Context, index: Index, tree: TokenTree, laws: Laws, budget: int
    ) -> tuple[TokenTree, dict[int, int]]:
        """A tree of what followed the newest tokens before, best first; and of those of its nodes
        that stand in `tree` too, which node that is there.
        """
        tokens = ctx.tokens
        n = self.longest
        first_places = index.all_positions(tokens, n, self.places)
        while not first_places and n > self.shortest:
            n -= 1
            first_places = index.all_positions(tokens, n, self.places)
        node_places = {0: first_places}  # node -> the places where the text went on by its path
        twins = {0: 0}

        def copied_token(position: int, depth: int) -> int:
            # A copy that reaches the end of the text goes on into itself.
            return tokens[position + depth % (len(tokens) - position)]

        def successors(copies: TokenTree, node: int) -> list[tuple[int, float]]:
            depth = copies.depths[node]
            if node:
                parent, token = copies.parents[node], copies.tokens[node]
                if parent in twins and (twin := tree.find_child(twins[parent], token)) >= 0:
                    twins[node] = twin
                if ctx.ends(copies, node):
                    return []
                node_places[node] = [
                    p for p in node_places[parent] if copied_token(p, depth - 1) == token
                ]
            counts = Counter(copied_token(place, depth) for place in node_places[node])
            q = laws.get(twins[node]) if node in twins else None
            continuations = []
            for token, count in counts.items():
                probability = HELD if q is None else float(q[token])
                if node or q is None or probability >= self.threshold:
                    continuations.append((token, probability * count / len(node_places[node])))
            return sorted(continuations, key=lambda continuation: -continuation[1])

        copies = grow_tree(tokens[-1], successors, budget, min(self.copy, ctx.depth), NAME)
        copies.matches[1:] = [n] * (len(copies) - 1)
        return copies, twins


def add_best_continuations(tree: TokenTree, laws: Laws, count: int) -> list[int]:
    """Adds the `count` most probable continuations of these nodes; returns their nodes."""
    continuations = []
    for node, q in laws.items():
        best_pairs = q.topk(min(count, len(q)))
        for probability, token in zip(
            best_pairs.values.tolist(), best_pairs.indices.tolist(), strict=True
        ):
            if probability > 0:  # what the options forbid is no continuation
                continuations.append((-tree.values[node] * probability, node, token))
    return [
        tree.add(node, token, value=-value, source=NAME)
        for value, node, token in sorted(continuations)[:count]
    ]

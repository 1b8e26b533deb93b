"""Draws a tree from what the target said wherever the text last ended like this.

For every n-gram of the outputs, 4 to 2 tokens long, a memory shared by all requests holds the
target's best tokens after it and the mean of their probabilities. At each node of the tree the
longest n-gram that ends there is looked up, and children are drawn from what is found, without
replacement and under the request's sampling options; how many children which node has is fixed
beforehand. It is made for many samples of one problem, which go over the same ground in much the
same words. At temperature 0 the best tokens take the place of draws. A request sees the memory as
it was when the request began, and what it learnt itself, so its tokens are those of its seed
whatever runs beside it.

Paper: Song et al., Accelerated Test-Time Scaling with Model-Free Speculative Sampling (STAND),
arXiv:2506.04708
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the shape is the best tree for the acceptance of each rank, measured with the bundled model and
prompts, where the paper keeps the 80 most useful of 625 nodes on AIME problems
- children are drawn one after the other, which has the distribution of Gumbel-top-k
- where only the request's own text knows an n-gram, the token that followed there is proposed
- penalties act on log-probabilities rather than logits
- nothing is drafted after a token that ends the text
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import grow_tree
from foretell.drafters.lookup.lookup import Index
from foretell.drafters.lookup.ngram_means import NgramMeans, Seen

# probability that the child of this rank is accepted if its parent is; measured
CHANCE = (0.6, 0.06, 0.02, 0.015, 0.01, 0.007)
# Score of tokens the memory does not hold: finite, so that a ban of all it does hold is no error.
LOW = -1e4

Rows = tuple[torch.Tensor, torch.Tensor]  # token ids (N, k) and their scores (N, k)


@lru_cache(maxsize=128)
def plan_tree(size: int) -> TokenTree:
    """The `size` nodes, root included, that are accepted most often; a node's token is its rank
    among its siblings.
    """
    return grow_tree(0, lambda tree, node: list(enumerate(CHANCE)), size)


@dataclass
class State:
    """State of a request."""

    memory: NgramMeans  # of all requests
    seen: Seen  # what this one sees of it
    index: Index  # of its own text


@dataclass(frozen=True)
class Stand(Drafter):
    """All but `megabytes` are counts."""

    n: Annotated[int, Range(2, 16)] = 4  # tokens of the longest n-gram; the shortest has 2
    k: Annotated[int, Range(1, 1024)] = 10  # tokens kept of a row
    size: Annotated[int, Range(1, 1024)] = 80  # nodes drafted at most
    megabytes: Annotated[int, Range(1, 1 << 20)] = 64  # of the memory

    needs = ("tree", "rows")
    draws = True

    def start(self, ctx: Context) -> State:
        vocab = ctx.models["target"].vocab
        memory = ctx.shared(lambda: NgramMeans(self.n, self.k, vocab, self.megabytes << 20))
        return State(memory, memory.table.snapshot(), Index(self.n))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        state.index.extend(ctx.tokens)
        tree = TokenTree(ctx.tokens[-1])
        plan = plan_tree(min(budget, self.size + 1))
        draw_count = 0
        level = [(0, 0)]  # (node of the plan, node of the tree) that may have children
        for _ in range(ctx.depth):
            level = [(plan_node, node) for plan_node, node in level if plan.tries[plan_node]]
            if not level:
                break
            ids, scores = self._rows_of(ctx, state, tree, [node for _, node in level])
            row_probs = scores.softmax(-1).nan_to_num(0.0)
            q, sorted_order = row_probs.sort(dim=-1, descending=True, stable=True)
            ids = ids.gather(-1, sorted_order)
            possible_counts = (q > 0).sum(-1).tolist()
            next_level: list[tuple[int, int]] = []
            for row_index, (plan_node, node) in enumerate(level):
                children = plan.tries[plan_node][: possible_counts[row_index]]
                if ctx.sampler.greedy:
                    nodes = add_best_children(tree, node, ids[row_index], len(children))
                else:
                    keys = range(draw_count + 1, draw_count + 1 + len(children))
                    nodes = draw_children(ctx, tree, node, ids[row_index], q[row_index], keys)
                    draw_count += len(children)
                next_level += zip(children, nodes, strict=True)
            level = [level_pair for level_pair in next_level if not ctx.ends(tree, level_pair[1])]
        return tree

    def _rows_of(self, ctx: Context, state: State, tree: TokenTree, nodes: list[int]) -> Rows:
        """Tokens that may follow each of the nodes, under the request's options; score -inf: it may
        not.
        """
        memory = state.memory
        paths = [tree.tokens_to(node) for node in nodes]
        ids = np.zeros((len(nodes), memory.k), np.int64)
        probs = np.zeros((len(nodes), memory.k))
        for row_index, path in enumerate(paths):
            text = [*ctx.tokens[-self.n :], *path]
            packed_row = memory.find_row(state.seen, text)
            if packed_row is not None:
                ids[row_index], probs[row_index] = memory.unpack_row(packed_row)
                continue
            position, _ = state.index.find_longest(text, min_length=2)
            next_token = ctx.tokens[position] if position >= 0 else 0
            ids[row_index] = (
                next_token + np.arange(memory.k)
            ) % memory.vocab  # any others, of probability 0
            probs[row_index, 0] = position >= 0
        tokens, scores = torch.from_numpy(ids), torch.from_numpy(probs).log()
        if not ctx.sampler.plain:
            for row_index, path in enumerate(paths):
                scores[row_index] = self._apply_options(
                    ctx, tokens[row_index], scores[row_index], path
                )
        if not ctx.sampler.greedy:
            for warper in ctx.sampler.warpers:
                scores = warper(None, scores)
        return tokens, scores

    def _apply_options(
        self, ctx: Context, ids: torch.Tensor, scores: torch.Tensor, path: list[int]
    ) -> torch.Tensor:
        """Scores (k,) of the tokens ids (k,) after a path, under penalties, bans and the like."""
        target = ctx.models["target"]
        row = torch.full((target.vocab,), LOW, device=target.device)
        row[ids] = scores.clamp_min(LOW).to(row)
        processed = ctx.sampler.scores(row, [*ctx.output, *path])[ids].to(scores)
        return processed.masked_fill(scores == -torch.inf, -torch.inf)

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        memory = state.memory
        # The rows that committed tokens came from, and where in the text each of these stands.
        committed_rows = step.reply.logits[[0, *step.outcome.path][: len(step.tokens)]]
        first_position = len(ctx.tokens) - len(step.tokens)
        best_rows = committed_rows.topk(memory.k)
        probs = (best_rows.values - committed_rows.logsumexp(-1, keepdim=True)).exp()
        for end_position, ids, token_probs in zip(
            range(first_position, len(ctx.tokens)),
            best_rows.indices.tolist(),
            probs.tolist(),
            strict=True,
        ):
            for n in range(2, min(self.n, end_position) + 1):
                gram = tuple(ctx.tokens[end_position - n : end_position])
                memory.learn_row(state.seen, gram, ids, token_probs)


def add_best_children(tree: TokenTree, node: int, ids: torch.Tensor, count: int) -> list[int]:
    """Adds the first `count` of the tokens ids (k,) below `node`; returns their nodes."""
    nodes = []
    for token, probability in zip(ids[:count].tolist(), CHANCE, strict=False):
        value = tree.values[node] * probability
        nodes.append(tree.add(node, token, value=value, source="stand"))
    return nodes


def draw_children(
    ctx: Context, tree: TokenTree, node: int, ids: torch.Tensor, q: torch.Tensor, keys: range
) -> list[int]:
    """Draws tokens of ids (k,) from q (k,) without replacement, one for each key, and adds them
    below `node`; returns their nodes.
    """
    nodes = []
    for rank, key in enumerate(keys):
        if rank:
            q = q / q.sum()
        choice = ctx.rng.sample(q, "draft", len(ctx.output), key)
        value = tree.values[node] * CHANCE[rank]
        law = Law(q, ids)
        nodes.append(tree.add(node, int(ids[choice]), law=law, value=value, source="stand"))
        q = q.index_fill(0, torch.tensor(choice), 0)
    return nodes

"""Draws a tree from what the target said wherever the text last ended like this.

For every n-gram of the outputs, 4 to 2 tokens long, a memory shared by all requests holds the
target's best tokens behind it and the mean of their probabilities. At each node of the tree the
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
- children are drawn one after the other, which has the law of Gumbel-top-k
- where only the request's own text knows an n-gram, the token that followed there is proposed
- penalties act on log-probabilities rather than logits
- nothing is drafted behind a token that ends the text
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import grow
from foretell.drafters.lookup.lookup import Index
from foretell.drafters.lookup.ngram_means import NgramMeans, Seen
from foretell.errors import BadConfig

# chance that the child of this rank is accepted if its parent is; measured
CHANCE = (0.6, 0.06, 0.02, 0.015, 0.01, 0.007)
# Score of tokens the memory does not hold: finite, so that a ban of all it does hold is no error.
LOW = -1e4

Rows = tuple[torch.Tensor, torch.Tensor]  # token ids (N, k) and their scores (N, k)


@lru_cache(maxsize=128)
def shape(size: int) -> TokenTree:
    """The `size` nodes, root included, that are accepted most often; a node's token is its rank
    among its siblings.
    """
    return grow(0, lambda tree, node: list(enumerate(CHANCE)), size)


@dataclass
class State:
    """Of a request."""

    memory: NgramMeans  # of all requests
    seen: Seen  # what this one sees of it
    index: Index  # of its own text


@dataclass(frozen=True)
class Stand(Drafter):
    """All but `megabytes` are counts."""

    n: int = 4  # tokens of the longest n-gram; the shortest has 2
    k: int = 10  # tokens kept of a row
    size: int = 80  # nodes drafted at most
    megabytes: int = 64  # of the memory

    needs = ("tree", "rows")
    draws = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("n", 2, 16),
            ("k", 1, 1024),
            ("size", 1, 1024),
            ("megabytes", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"stand:{name}", value, f"between {low} and {high}")

    def start(self, ctx: Context) -> State:
        vocab = ctx.models["target"].vocab
        memory = ctx.shared(lambda: NgramMeans(self.n, self.k, vocab, self.megabytes << 20))
        return State(memory, memory.table.snapshot(), Index(self.n))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        state.index.extend(ctx.tokens)
        tree = TokenTree(ctx.tokens[-1])
        plan = shape(min(budget, self.size + 1))
        draws = 0
        level = [(0, 0)]  # (node of the plan, node of the tree) that may have children
        for _ in range(ctx.depth):
            level = [(place, node) for place, node in level if plan.tries[place]]
            if not level:
                break
            ids, scores = self._rows(ctx, state, tree, [node for _, node in level])
            laws = scores.softmax(-1).nan_to_num(0.0)
            q, order = laws.sort(dim=-1, descending=True, stable=True)
            ids = ids.gather(-1, order)
            possible = (q > 0).sum(-1).tolist()
            below: list[tuple[int, int]] = []
            for row, (place, node) in enumerate(level):
                children = plan.tries[place][: possible[row]]
                if ctx.sampler.greedy:
                    nodes = best_children(tree, node, ids[row], len(children))
                else:
                    keys = range(draws + 1, draws + 1 + len(children))
                    nodes = draw_children(ctx, tree, node, ids[row], q[row], keys)
                    draws += len(children)
                below += zip(children, nodes, strict=True)
            level = [pair for pair in below if not ctx.ends(tree, pair[1])]
        return tree

    def _rows(self, ctx: Context, state: State, tree: TokenTree, nodes: list[int]) -> Rows:
        """What may follow each of the nodes, under the request's options; -inf: it may not."""
        memory = state.memory
        paths = [tree.tokens_to(node) for node in nodes]
        ids = np.zeros((len(nodes), memory.k), np.int64)
        probs = np.zeros((len(nodes), memory.k))
        for i, path in enumerate(paths):
            text = [*ctx.tokens[-self.n :], *path]
            row = memory.find(state.seen, text)
            if row is not None:
                ids[i], probs[i] = memory.unpack(row)
                continue
            place, _ = state.index.longest(text, least=2)
            first = ctx.tokens[place] if place >= 0 else 0
            ids[i] = (first + np.arange(memory.k)) % memory.vocab  # any others, of probability 0
            probs[i, 0] = place >= 0
        tokens, scores = torch.from_numpy(ids), torch.from_numpy(probs).log()
        if not ctx.sampler.plain:
            for i, path in enumerate(paths):
                scores[i] = self._processed(ctx, tokens[i], scores[i], path)
        if not ctx.sampler.greedy:
            for warper in ctx.sampler.warpers:
                scores = warper(None, scores)
        return tokens, scores

    def _processed(
        self, ctx: Context, ids: torch.Tensor, scores: torch.Tensor, path: list[int]
    ) -> torch.Tensor:
        """Scores (k,) of the tokens ids (k,) behind a path, under penalties, bans and the like."""
        target = ctx.models["target"]
        row = torch.full((target.vocab,), LOW, device=target.device)
        row[ids] = scores.clamp_min(LOW).to(row)
        processed = ctx.sampler.scores(row, [*ctx.output, *path])[ids].to(scores)
        return processed.masked_fill(scores == -torch.inf, -torch.inf)

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        memory = state.memory
        # The rows that committed tokens came from, and where in the text each of these stands.
        rows = step.reply.logits[[0, *step.outcome.path][: len(step.tokens)]]
        first = len(ctx.tokens) - len(step.tokens)
        best = rows.topk(memory.k)
        probs = (best.values - rows.logsumexp(-1, keepdim=True)).exp()
        for end, ids, chances in zip(
            range(first, len(ctx.tokens)), best.indices.tolist(), probs.tolist(), strict=True
        ):
            for n in range(2, min(self.n, end) + 1):
                gram = tuple(ctx.tokens[end - n : end])
                memory.learn(state.seen, gram, ids, chances)


def best_children(tree: TokenTree, node: int, ids: torch.Tensor, count: int) -> list[int]:
    """Adds the first `count` of the tokens ids (k,) below `node`; returns their nodes."""
    nodes = []
    for token, chance in zip(ids[:count].tolist(), CHANCE, strict=False):
        value = tree.values[node] * chance
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
        place = ctx.rng.sample(q, "draft", len(ctx.output), key)
        value = tree.values[node] * CHANCE[rank]
        law = Law(q, ids)
        nodes.append(tree.add(node, int(ids[place]), law=law, value=value, source="stand"))
        q = q.index_fill(0, torch.tensor(place), 0)
    return nodes

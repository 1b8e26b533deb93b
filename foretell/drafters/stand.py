"""Draws a tree from what the target said wherever the text last ended like this.

For every n-gram of the outputs, 4 to 2 tokens long, a memory shared by all requests holds the
target's best tokens behind it and the mean of their probabilities. At each node of the tree the
longest n-gram that ends there is looked up, and children are drawn from what is found, without
replacement and under the request's sampling options; how many children which node has is fixed
beforehand. It is made for many samples of one problem, which go over the same ground in much the
same words. At temperature 0 the best tokens take the place of draws.

Paper: Song et al., Accelerated Test-Time Scaling with Model-Free Speculative Sampling (STAND),
arXiv:2506.04708
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the shape is the best tree for the acceptance of each rank, measured with the bundled model and
prompts, where the paper keeps the 80 most useful of 625 nodes on AIME problems - children are drawn
one after the other, which has the law of Gumbel-top-k - where only the request's own text knows an
n-gram, the token that followed there is proposed - penalties act on log-probabilities rather than
logits
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import Law, TokenTree
from foretell.errors import BadConfig
from foretell.ops.lookup import Index
from foretell.ops.trees import grow

CHANCE = (
    0.6,
    0.06,
    0.02,
    0.015,
    0.01,
    0.007,
)  # that the child of this rank is accepted if its parent is; measured
KEY = 280  # bytes of an n-gram and its place in the memory, about
LOW = (
    -1e4
)  # score of tokens the memory does not hold: finite, so that a ban of all it does hold is no error


class Memory:
    """n-gram -> its best tokens, best first, with their mean probabilities. The one met longest ago
    is dropped first.

    Arrays by slot: ids and probs (M, k), counts (M,), the rows that a mean was taken over.
    """

    def __init__(self, n: int, k: int, vocab: int, limit: int):
        """`limit`: bytes."""
        self.n, self.k, self.vocab = n, min(k, vocab), vocab
        self.capacity = max(1, limit // (KEY + 8 * self.k + 4))  # n-grams
        self.slots: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._make(64)

    def _make(self, size: int) -> None:
        size = min(size, self.capacity)
        self.ids, self.probs = (
            np.zeros((size, self.k), np.int32),
            np.zeros((size, self.k), np.float32),
        )
        self.counts = np.zeros(size, np.int32)

    @property
    def nbytes(self) -> int:
        return len(self.slots) * KEY + self.ids.nbytes + self.probs.nbytes + self.counts.nbytes

    def find(self, text: Sequence[int]) -> int:
        """The slot of the longest n-gram known that ends `text`, or -1."""
        for n in range(min(self.n, len(text)), 1, -1):
            if (slot := self.slots.get(tuple(text[-n:]), -1)) >= 0:
                return slot
        return -1

    def learn(self, gram: tuple[int, ...], ids: Sequence[int], probs: Sequence[float]) -> None:
        """Takes one row into the mean: the target's `k` best tokens there, best first. Others count
        as 0.
        """
        slot = self.slots.pop(gram, -1)
        if slot < 0:
            slot = self._slot()
            self.counts[slot] = 0
        elif seen := int(self.counts[slot]):
            sums = dict(
                zip(self.ids[slot].tolist(), (self.probs[slot] * float(seen)).tolist(), strict=True)
            )
            for token, prob in zip(ids, probs, strict=True):
                sums[token] = sums.get(token, 0.0) + prob
            best = sorted(sums.items(), key=lambda item: -item[1])[: self.k]
            ids, probs = [token for token, _ in best], [total / (seen + 1) for _, total in best]
        self.slots[gram] = slot
        self.ids[slot], self.probs[slot] = ids, probs
        self.counts[slot] += 1

    def _slot(self) -> int:
        """A free slot, or that of the n-gram met longest ago."""
        if (size := len(self.slots)) == self.capacity:
            return self.slots.popitem(last=False)[1]
        if size == len(self.counts):
            old = self.ids, self.probs, self.counts
            self._make(2 * size)
            self.ids[:size], self.probs[:size], self.counts[:size] = old
        return size

    def tensors(self) -> dict[str, torch.Tensor]:
        """For `restore`: grams (M, n), shorter ones padded in front with -1, ids and probs (M, k),
        counts (M,).
        """
        grams = [[-1] * (self.n - len(gram)) + list(gram) for gram in self.slots]
        found = {"grams": torch.tensor(grams, dtype=torch.int64).reshape(-1, self.n)}
        for name in ("ids", "probs", "counts"):
            found[name] = torch.from_numpy(getattr(self, name)[list(self.slots.values())])
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        size = tensors["grams"].numel() // self.n if "grams" in tensors else 0
        shapes = {
            "grams": [size, self.n],
            "ids": [size, self.k],
            "probs": [size, self.k],
            "counts": [size],
        }
        for name, shape in shapes.items():
            dtype = {"grams": torch.int64, "probs": torch.float32}.get(name, torch.int32)
            if (got := tensors.get(name)) is None or got.dtype != dtype or [*got.shape] != shape:
                raise ValueError(f"{name} is missing, not {dtype} or not of shape {shape}")
        grams, ids, probs, counts = (tensors[name] for name in shapes)
        keys = [tuple(token for token in gram if token >= 0) for gram in grams.tolist()]
        padded = (grams[:, 1:] < 0) & (grams[:, :-1] >= 0)
        if bool((grams < -1).any() | (grams >= self.vocab).any() | padded.any()) or not all(
            len(k) > 1 for k in keys
        ):
            raise ValueError(
                f"grams holds what is no n-gram of a vocabulary of {self.vocab} tokens"
            )
        if len(set(keys)) < len(keys):
            raise ValueError("grams holds an n-gram twice")
        if bool(
            (ids < 0).any() | (ids >= self.vocab).any() | (ids.sort(-1).values.diff() == 0).any()
        ):
            raise ValueError(
                f"ids holds a token twice or one beyond the vocabulary of {self.vocab} tokens"
            )
        if not bool((probs >= 0).all() & (probs.sum(-1) < 1.001).all() & (probs[:, 0] > 0).all()):
            raise ValueError("probs are not probabilities")
        if bool((probs.diff() > 1e-6).any() | (counts < 1).any()):
            raise ValueError("probs are not best first, or counts are not positive")
        keys, rest = keys[-self.capacity :], slice(max(0, size - self.capacity), None)
        self.slots = OrderedDict((gram, slot) for slot, gram in enumerate(keys))
        self._make(max(64, len(keys)))
        for own, new in ((self.ids, ids), (self.probs, probs), (self.counts, counts)):
            own[: len(keys)] = new[rest].numpy()


@lru_cache(maxsize=128)
def shape(size: int) -> TokenTree:
    """The `size` nodes, root included, that are accepted most often; a node's token is its rank
    among its siblings.
    """
    return grow(0, lambda tree, node: list(enumerate(CHANCE)), size)


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
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"stand:{name}", getattr(self, name), f"between {low} and {high}"
                )

    def start(self, ctx: Context) -> tuple[Memory, Index]:
        vocab = ctx.models["target"].vocab
        return ctx.shared(lambda: Memory(self.n, self.k, vocab, self.megabytes << 20)), Index(
            self.n
        )

    def propose(self, ctx: Context, state: tuple[Memory, Index], budget: int) -> TokenTree:
        state[1].extend(ctx.tokens)
        tree, plan, draws, position = (
            TokenTree(ctx.tokens[-1]),
            shape(min(budget, self.size + 1)),
            0,
            len(ctx.output),
        )
        level = [(0, 0)]  # (node of the plan, node of the tree)
        while level := [
            (place, node)
            for place, node in level
            if plan.tries[place] and tree.depths[node] < ctx.depth
        ]:
            laws, below = self._laws(ctx, state, tree, [node for _, node in level]), []
            for (place, node), (ids, q, support) in zip(level, laws, strict=True):
                for rank, child in enumerate(plan.tries[place][:support]):
                    law, at = None, rank
                    if not ctx.sampler.greedy:
                        draws, q = draws + 1, q / q.sum() if rank else q
                        law, at = Law(q, ids), ctx.rng.sample(q, "draft", position, draws)
                        q = q.index_fill(0, torch.tensor(at), 0)  # without replacement
                    below.append(
                        (
                            child,
                            tree.add(
                                node, int(ids[at]), law, tree.values[node] * CHANCE[rank], "stand"
                            ),
                        )
                    )
            level = below
        return tree

    def _laws(
        self, ctx: Context, state: tuple[Memory, Index], tree: TokenTree, nodes: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Of each node: tokens (K,), their law (K,) in float64, best first, and how many of them
        are possible.
        """
        (memory, index), sampler, tail = state, ctx.sampler, ctx.tokens[-self.n :]
        words = [tree.tokens_to(node) for node in nodes]
        # Copies, for other requests go on learning before this tree is verified.
        some, probs = np.zeros((len(nodes), memory.k), np.int64), np.zeros((len(nodes), memory.k))
        for i, path in enumerate(words):
            text = [*tail, *path]
            if (slot := memory.find(text)) >= 0:
                some[i], probs[i] = memory.ids[slot], memory.probs[slot]
            else:
                places = [
                    place for n in range(self.n, 1, -1) if (place := index.find(text, n)) >= 0
                ]
                some[i] = (
                    (ctx.tokens[places[0]] if places else 0) + np.arange(memory.k)
                ) % memory.vocab
                probs[i, :1] = bool(places)
        ids, scores = torch.from_numpy(some), torch.from_numpy(probs).log()
        if not sampler.plain:
            for i, path in enumerate(words):
                row = torch.full((memory.vocab,), LOW, device=ctx.models["target"].device)
                row[ids[i]] = scores[i].clamp_min(LOW).to(row)
                after = sampler.scores(row, [*ctx.output, *path])[ids[i]].to(scores)
                scores[i] = after.masked_fill(scores[i] == -torch.inf, -torch.inf)
        for warper in () if sampler.greedy else sampler.warpers:
            scores = warper(None, scores)
        q, order = scores.softmax(-1).nan_to_num(0.0).sort(dim=-1, descending=True, stable=True)
        return list(zip(ids.gather(-1, order), q, (q > 0).sum(-1).tolist(), strict=True))

    def observe(self, ctx: Context, state: tuple[Memory, Index], step: Feedback) -> None:
        memory, start = state[0], len(ctx.tokens) - len(step.tokens)
        rows = step.reply.logits[
            [0, *step.outcome.path][: len(step.tokens)]
        ]  # those that committed tokens came from
        best = rows.topk(memory.k)
        probs = (best.values - rows.logsumexp(-1, keepdim=True)).exp().tolist()
        for end, (ids, mass) in enumerate(zip(best.indices.tolist(), probs, strict=True), start):
            for n in range(2, min(self.n, end) + 1):
                memory.learn(tuple(ctx.tokens[end - n : end]), ids, mass)
